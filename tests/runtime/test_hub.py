"""Hub names against a stand-in of its API: pinned once, downloaded once, refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import StandInHub, serving

pytestmark = pytest.mark.processes

# What a start of a run does with model.path; prints the pinned name and its files, or what is refused.
START = """
import sys
from pathlib import Path
from megatron_collab.settings import ConfigError
from megatron_collab.runtime import hub
for path in sys.argv[2:]:
    try:
        pinned = hub.pin(path, "model.path", Path(sys.argv[1]))
        hub.download(pinned, "model.path")
        print(pinned, *sorted(file.name for file in hub.folder(pinned).iterdir()))
    except ConfigError as error:
        print(error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    folder = tmp_path / "repo"
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "original/params.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    with serving() as hub:
        hub.add("model", "some/model", folder)
        hub.add("model", "some/gated", folder, gated=True)
        yield hub


def start(hub: StandInHub, folder: Path, *paths: str, run: str = "run", **other: str) -> list[str]:
    hub.requests.clear()
    environment = hub.environment(folder / "home", **other)
    command = [sys.executable, "-c", START, str(folder / run), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_run_keeps_the_commit_that_it_began_with(hub: StandInHub, tmp_path: Path) -> None:
    (first,) = start(hub, tmp_path, "some/model")
    pinned, *files = first.split()
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]  # what is needed, and no more
    assert json.loads((tmp_path / "run/hub.json").read_text()) == {"model some/model@main": pinned.partition("@")[2]}
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "config.json").write_text('{"layers": 2}')
    moved = hub.add("model", "some/model", tmp_path / "next")  # on the same branch
    assert start(hub, tmp_path, "some/model") == [first]
    assert hub.requests == []
    (other,) = start(hub, tmp_path, "some/model", run="other")
    assert other == f"some/model@{moved} config.json"
    for number, away in enumerate(({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"})):
        assert start(hub, tmp_path, "some/model", pinned, run=f"run{number}", **away) == [other, first]


def test_processes_of_a_node_download_once(hub: StandInHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "home")
    hub.requests.clear()
    command = [sys.executable, "-c", START, str(tmp_path / "run"), "some/model"]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {rank.communicate(timeout=100)[0] for rank in ranks}
    assert len(printed) == 1 and "model.safetensors" in printed.pop()
    weights = [request for request in hub.requests if request.startswith("GET") and "safetensors" in request]
    assert len(weights) == 1


def test_unavailable_models_are_reported_in_one_line(hub: StandInHub, tmp_path: Path) -> None:
    models = ("some/none", "some/gated", "some/model@v9")
    none, gated, revision = start(hub, tmp_path, *models)
    assert none.startswith("model.path=some/none: no such file or folder, and the Hub has no model of that name")
    assert "HF_TOKEN is not set" in none
    assert gated.startswith("model.path=some/gated: this model is gated; accept its terms")
    assert revision.startswith("model.path=some/model@v9: has no revision v9")
    (opened, unknown) = start(hub, tmp_path, "some/gated", "some/none", HF_TOKEN=hub.token)
    assert opened.startswith("some/gated@") and "HF_TOKEN may read" in unknown


@pytest.mark.slow
def test_a_hub_that_is_not_asked_or_does_not_answer_is_named(hub: StandInHub, tmp_path: Path) -> None:
    (offline,) = start(hub, tmp_path, "some/none", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline
    (away,) = start(hub, tmp_path, "some/none", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 did not deliver it (ConnectError" in away and "HF_ENDPOINT" in away


def test_a_local_folder_wins_and_a_path_is_no_name(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_collab.runtime import hub as names

    monkeypatch.chdir(tmp_path)
    Path("some/model").mkdir(parents=True)
    assert names.parse("some/model") is None and names.folder("some/model") == Path("some/model")
    assert names.parse("other/model@v1") == ("other/model", "v1")
    for path in ("model", "/some/model", "runs/a/hf", "./some/none", "data/*.jsonl", "some/"):
        assert names.parse(path) is None, path
    assert names.pin("some/model", "model.path", tmp_path / "run") == "some/model" and not Path("run").exists()


UPLOAD = """
import sys
from pathlib import Path
from megatron_collab.settings import ConfigError
from megatron_collab.runtime import hub
for repo in sys.argv[2:]:
    try:
        hub.check_upload(repo, "build.push_to_hub")
        print(hub.upload(Path(sys.argv[1]), repo, private=True))
    except (ConfigError, hub.UploadFailed) as error:
        print(error)
"""


@pytest.mark.slow
def test_uploads_are_retried_and_impossible_ones_are_reported(hub: StandInHub, tmp_path: Path) -> None:
    def upload(*repos: str, **other: str) -> list[str]:
        environment = hub.environment(tmp_path / "home", **other)
        command = [sys.executable, "-c", UPLOAD, str(tmp_path / "built"), *repos]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "README.md").write_text("---\nconfigs: []\n---\n# Card\n")
    (tmp_path / "built" / "train.jsonl").write_text("{}\n")
    hub.fails = 1
    (commit,) = upload("me/chats", HF_TOKEN=hub.token)
    repo = hub.repos["dataset", "me/chats"]
    assert repo.private and [*repo.commits] == [commit] and hub.fails == 0
    assert repo.commits[commit] == {file.name: file.read_bytes() for file in sorted((tmp_path / "built").iterdir())}
    hub.requests.clear()
    wrong = "hf_AnotherToken456"
    (refused,) = upload("me/chats", HF_TOKEN=wrong)
    assert refused.startswith(f"{tmp_path}/built: not uploaded to me/chats (") and wrong not in refused
    assert refused.endswith("; rerun the command to retry") and hub.requests.count("POST /api/validate-yaml") == 1
    messages = upload("chats", "me/a b", "me/chats")
    assert messages[0].startswith("build.push_to_hub=chats: has no owner; give OWNER/NAME")
    assert messages[1].startswith("build.push_to_hub=me/a b: ") and messages[1].endswith("; give OWNER/NAME")
    assert messages[2].startswith("build.push_to_hub=me/chats: needs a token with write access; set HF_TOKEN")
    (offline,) = upload("me/chats", HF_TOKEN=hub.token, HF_HUB_OFFLINE="1")
    assert offline.startswith("build.push_to_hub=me/chats: cannot upload while HF_HUB_OFFLINE is set")
