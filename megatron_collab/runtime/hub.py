"""Models and data sets by name: OWNER/NAME[@REVISION] of the Hugging Face Hub, pinned to a commit, from its cache.

A run is pinned once: hub.json in run.dir records the commit of each name. Ranks on all nodes and every later start of
the run use it, even if the branch has moved since. The checkpoint that an evaluation chose and the digests of MCP
servers' tools are pinned in the same way. A local folder or file of that name takes precedence over the Hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock

from megatron_collab.runtime import files
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import ConfigError, require

Kind = Literal["model", "dataset"]
PINS = "hub.json"
# Files that a model is loaded and served from, without copies of the weights in other formats.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*"),
)
_FIRST = ("README.md", "config.json")  # small files that are fetched to learn the commit

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class UploadFailed(RunStopped):
    """The Hub refused the files; the local files are unchanged."""


class HubName(NamedTuple):
    """OWNER/NAME (`repo`), and a branch, tag or commit (`revision`)."""

    repo: str
    revision: str


def parse(path: str) -> HubName | None:
    """The Hub name in `path`; None if it exists on disk or cannot be a name."""
    match = _NAME.fullmatch(path)
    return HubName(match["repo"], match["revision"] or "main") if match and not Path(path).exists() else None


def pin(path: str, setting: str, run_dir: Path, kind: Kind = "model") -> str:
    """`path` as OWNER/NAME@COMMIT, the same for all processes and starts of the run; a path on disk is unchanged.

    Raises ConfigError naming `setting` if the Hub has no such name or is unreachable.
    """
    name = parse(path)
    if name is None or _COMMIT.fullmatch(name.revision):
        return path
    key = f"{kind} {name.repo}@{name.revision}"
    return f"{name.repo}@{pinned_value(run_dir, key, lambda: resolve(path, setting, kind).partition('@')[2])}"


def pinned_value(run_dir: Path, key: str, compute: Callable[[], str]) -> str:
    """The value of `key` in hub.json; the first process of the run that needs it computes and records it."""
    file = run_dir / PINS
    if key not in (pins := _read(file)):
        value = compute()
        run_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(run_dir / f".{PINS}.lock"):
            pins = {key: value, **_read(file)}
            files.replace(file, json.dumps(pins, indent=1) + "\n")
    return pins[key]


def fetch_model(path: str, setting: str, run_dir: Path) -> str:
    """Pin a model's `path` and download its files to this node. Raises ConfigError naming `setting`."""
    path = pin(path, setting, run_dir)
    if parse(path):
        download(path, setting)
    return path


def resolve(path: str, setting: str, kind: Kind = "model") -> str:
    """`path` with the current commit of its branch or tag; a path on disk is unchanged. Raises ConfigError."""
    name = parse(path)
    if name is None or _COMMIT.fullmatch(name.revision):
        return path
    return f"{name.repo}@{download(path, setting, kind, _FIRST).name}"


def download(path: str, setting: str, kind: Kind = "model", patterns: Sequence[str] = MODEL_FILES) -> Path:
    """The local folder with the files of `path` that match `patterns`; missing files are downloaded from the Hub.

    Concurrent calls on one node download once. Raises ConfigError naming `setting`.
    """
    import httpx
    from huggingface_hub import constants, errors, get_token, snapshot_download

    name = parse(path)
    assert name is not None
    options: dict[str, Any] = {"repo_type": kind, "revision": name.revision, "allow_patterns": list(patterns)}
    option, noun = f"{setting}={path}", "data set" if kind == "dataset" else kind
    try:
        if _COMMIT.fullmatch(name.revision) and (cached := _cached(name.repo, options)):
            return cached
        return Path(snapshot_download(name.repo, **options))
    except errors.GatedRepoError as error:
        fault = f"this {noun} is gated; accept its terms on its page, and set HF_TOKEN to a token of that account"
        raise ConfigError(f"{option}: {fault}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{option}: has no revision {name.revision}; give a branch, tag or commit of it") from error
    except errors.RepositoryNotFoundError as error:
        token = "the token in HF_TOKEN may read" if get_token() else "can be read without a token (HF_TOKEN is not set)"
        fault = f"no such file or folder, and the Hub has no {noun} of that name that {token}; check the name"
        raise ConfigError(f"{option}: {fault}") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            fault = f"not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it, or download it first"
            raise ConfigError(f"{option}: {fault}") from error
        raise ConfigError(f"{option}: {_unreachable(error.__cause__ or error)}") from error
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(f"{option}: {_unreachable(error)}") from error


def check_upload(repo: str, setting: str) -> None:
    """Raises ConfigError if nothing can be uploaded to `repo`; does not use the network."""
    from huggingface_hub import constants, errors, get_token
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        fault = "" if "/" in repo else "has no owner"
    except errors.HFValidationError as error:
        fault = " ".join(str(error).split())
    require(not fault, f"{setting}={repo}: {fault}; give OWNER/NAME")
    message = "cannot upload while HF_HUB_OFFLINE is set; unset it, or remove this"
    require(not constants.HF_HUB_OFFLINE, f"{setting}={repo}: {message}")
    message = "needs a token with write access; set HF_TOKEN, or log in with `hf auth login`"
    require(get_token() is not None, f"{setting}={repo}: {message}")


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload the files of `folder` to the data set `repo`; returns the commit. `private`: used if `repo` is created.

    huggingface_hub retries transient errors. Raises UploadFailed.
    """
    import httpx
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, repo_type="dataset").oid)
    except (errors.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise UploadFailed(f"{folder}: not uploaded to {repo} ({reason}); rerun the command to retry") from error


def folder(path: str) -> Path:
    """The local folder of model.path: the path itself, or the cached download of a Hub name; never uses the network."""
    name = parse(path)
    options = {"repo_type": "model", "revision": name.revision if name else None, "allow_patterns": list(MODEL_FILES)}
    return (_cached(name.repo, options) if name else None) or Path(path)


def _read(pins: Path) -> dict[str, str]:
    try:
        values = json.loads(pins.read_text()) if pins.is_file() else {}
        valid = all(isinstance(value, str) for value in values.values())
    except (ValueError, AttributeError, RecursionError):
        valid = False
    message = f"{pins}: is not a JSON object of commits; restore it, or remove it to use the Hub's current commits"
    require(valid, message)
    return values


def _cached(repo: str, options: dict[str, Any]) -> Path | None:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo, **options, local_files_only=True))
    except errors.LocalEntryNotFoundError:  # missing or incomplete
        return None


def _unreachable(error: BaseException) -> str:
    from huggingface_hub import constants

    reason = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "give a folder, set HF_ENDPOINT to a mirror, or fill the cache (HF_HOME) on a machine with network"
    return f"no such file or folder, and {constants.ENDPOINT} did not deliver it ({reason[:200]}); {hint}"
