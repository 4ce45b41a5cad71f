"""Models and data sets by name: OWNER/NAME[@REVISION] of the Hugging Face Hub, pinned to a commit, from its cache.

A run is pinned once: hub.json in run.dir holds the commit of each name, which ranks on all nodes and every later start
of the run go by, whatever has happened to the branch since; so it is with the checkpoint that an evaluation found, and
with digests of the tools of MCP servers. A folder or file of that name wins over the Hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock

from megatron_collab.config import ConfigError, require
from megatron_collab.runtime import files
from megatron_collab.runtime.process import RunStopped

Kind = Literal["model", "dataset"]
PINS = "hub.json"
# What a model is loaded and served from; not the same weights again in other formats.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*"),
)
_FIRST = ("README.md", "config.json")  # small files that a commit is found with

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class UploadFailed(RunStopped):
    """The Hub does not take the files, which stay as they are."""


class HubName(NamedTuple):
    """OWNER/NAME, and the branch, tag or commit."""

    repo: str
    revision: str


def named(path: str) -> HubName | None:
    """What `path` names on the Hub; None for what is here, or cannot be a name."""
    found = _NAME.fullmatch(path)
    return HubName(found["repo"], found["revision"] or "main") if found and not Path(path).exists() else None


def pin(path: str, setting: str, run_dir: Path, kind: Kind = "model") -> str:
    """`path` as OWNER/NAME@COMMIT, the same for all processes and starts of the run; a path on disk as it is.

    Raises ConfigError naming `setting` where the Hub has no such name or cannot be asked.
    """
    name = named(path)
    if name is None or _COMMIT.fullmatch(name.revision):
        return path
    key = f"{kind} {name.repo}@{name.revision}"
    return f"{name.repo}@{found_first(run_dir, key, lambda: resolved(path, setting, kind).partition('@')[2])}"


def found_first(run_dir: Path, key: str, find: Callable[[], str]) -> str:
    """What the first process of the run that asked for `key` has found."""
    file = run_dir / PINS
    if key not in (pins := _read(file)):
        found = find()
        run_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(run_dir / f".{PINS}.lock"):
            pins = {key: found, **_read(file)}
            files.replace(file, json.dumps(pins, indent=1) + "\n")
    return pins[key]


def fetched(path: str, setting: str, run_dir: Path) -> str:
    """A model's `path` as `pin` gives it, with its files on this node. Raises ConfigError naming `setting`."""
    path = pin(path, setting, run_dir)
    if named(path):
        download(path, setting)
    return path


def resolved(path: str, setting: str, kind: Kind = "model") -> str:
    """`path` with the commit that its branch or tag is at; a path on disk as it is. Raises ConfigError."""
    name = named(path)
    if name is None or _COMMIT.fullmatch(name.revision):
        return path
    return f"{name.repo}@{download(path, setting, kind, _FIRST).name}"


def download(path: str, setting: str, kind: Kind = "model", patterns: Sequence[str] = MODEL_FILES) -> Path:
    """The folder with the files of the Hub's `path` that match `patterns`; the network is asked for what is missing.

    Processes of a node that ask at once download once. Raises ConfigError naming `setting`.
    """
    import httpx
    from huggingface_hub import constants, errors, get_token, snapshot_download

    name = named(path)
    assert name is not None
    options: dict[str, Any] = {"repo_type": kind, "revision": name.revision, "allow_patterns": list(patterns)}
    said, what = f"{setting}={path}", "data set" if kind == "dataset" else kind
    try:
        if _COMMIT.fullmatch(name.revision) and (found := _cached(name.repo, options)):
            return found
        return Path(snapshot_download(name.repo, **options))
    except errors.GatedRepoError as error:
        fault = f"this {what} is gated; accept its terms on its page, and set HF_TOKEN to a token of that account"
        raise ConfigError(f"{said}: {fault}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{said}: has no revision {name.revision}; give a branch, tag or commit of it") from error
    except errors.RepositoryNotFoundError as error:
        token = "the token in HF_TOKEN may read" if get_token() else "can be read without a token (HF_TOKEN is not set)"
        fault = f"no such file or folder, and the Hub has no {what} of that name that {token}; check the name"
        raise ConfigError(f"{said}: {fault}") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            fault = f"not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, or download it before"
            raise ConfigError(f"{said}: {fault}") from error
        raise ConfigError(f"{said}: {_unreachable(error.__cause__ or error)}") from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(f"{said}: {_unreachable(error)}") from error


def check_upload(repo: str, setting: str) -> None:
    """ConfigError, without asking the network, where nothing can be uploaded to `repo`."""
    from huggingface_hub import constants, errors, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        fault = "" if "/" in repo else "names no owner"
    except errors.HFValidationError as error:
        fault = " ".join(str(error).split())
    require(not fault, f"{setting}={repo}: {fault}; give OWNER/NAME")
    message = "HF_HUB_OFFLINE is set, and the data set is to be uploaded; unset it, or remove this"
    require(not constants.HF_HUB_OFFLINE, f"{setting}={repo}: {message}")
    message = "needs a token that may write; set HF_TOKEN, or log in by `hf auth login`"
    require(get_token() is not None, f"{setting}={repo}: {message}")


def upload(folder: Path, repo: str, private: bool) -> str:
    """The commit of the data set `repo` that has the files of `folder`; `private`: where it is made for them.

    huggingface_hub tries again what may pass. Raises UploadFailed.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, repo_type="dataset").oid)
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise UploadFailed(f"{folder}: not uploaded to {repo} ({why}); the same command tries again") from error


def folder(path: str) -> Path:
    """The local folder of model.path: itself, or what `download` has fetched of a name; never asks the network."""
    name = named(path)
    options = {"repo_type": "model", "revision": name.revision if name else None, "allow_patterns": list(MODEL_FILES)}
    return (_cached(name.repo, options) if name else None) or Path(path)


def _read(pins: Path) -> dict[str, str]:
    try:
        found = json.loads(pins.read_text()) if pins.is_file() else {}
        whole = all(isinstance(pin, str) for pin in found.values())
    except (ValueError, AttributeError, RecursionError):
        whole = False
    message = f"{pins}: holds no commits; restore it, or remove it: names then are of the commits that the Hub has now"
    require(whole, message)
    return found


def _cached(repo: str, options: dict[str, Any]) -> Path | None:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo, **options, local_files_only=True))
    except errors.LocalEntryNotFoundError:  # not there, or not all of it
        return None


def _unreachable(error: BaseException) -> str:
    from huggingface_hub import constants

    why = " ".join(f"{type(error).__name__}: {error}".split())
    way_out = "give a folder, set HF_ENDPOINT to a mirror, or fill the cache (HF_HOME) where there is a network"
    return f"no such file or folder, and {constants.ENDPOINT} did not deliver it ({why[:200]}); {way_out}"
