"""Folders of any name, too long a name, and no home folder."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from megatron_collab import train
from megatron_collab.config import Config, compose
from megatron_collab.inference import server as server_module
from megatron_collab.launch import prepare
from megatron_collab.runtime import files
from tests.helpers import policy_servers


class Started(Exception):
    """The ranks would have been started."""


NAMES = ["a [b] * c", "hash#percent%41", "quote'd", "Übung ä", "x" * 120]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "world"
    config = compose(["experiment=booking_sft", f"data.dir={folder}", "run.dir=unused"])
    prepare.environments.prepare(config.data, config.run.seed)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_a_run_starts_in_a_folder_of_any_name(
    name: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(prepare, "replace_by_torchrun", start)
    (tmp_path / name).mkdir()
    (tmp_path / name / "world").symlink_to(world)
    settings = [f'run.dir="{tmp_path}/{name}/run"', f'data.dir="{tmp_path}/{name}/world"']
    with pytest.raises(Started):
        train.main(["experiment=booking_sft", "launch.device=cpu", *settings])
    assert (tmp_path / name / "run" / "data").is_dir()


@pytest.mark.parametrize("name", NAMES)
def test_a_server_reads_a_model_folder_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes the path for a pattern."""
    commands: list[list[str]] = []

    def popen(command: list[str], **_: object) -> None:
        commands.append(command)

    monkeypatch.setattr(server_module.subprocess, "Popen", popen)
    (folder := tmp_path / name).mkdir()
    config = Config()
    config.model.path, config.launch.device = str(folder), "cpu"
    server = server_module.ServerProcess(policy_servers(config), tmp_path / "server.log", 0, "key")
    (command,) = commands
    path = command[command.index("--model-path") + 1]
    assert glob.escape(path) == path and Path(path).samefile(folder)
    server._scratch.remove()


@pytest.mark.parametrize("home", ["/proc/none", "/dev/null", None])
def test_caches_without_a_home_folder_are_temporary(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    else:  # a user id without an account, as in containers
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert files._cache().name == f"cache-{os.getuid()}"


@pytest.mark.parametrize(
    ("name", "reason"), [("x" * 256, "File name too long"), ("/".join(["x" * 200] * 20), "File name too long")]
)
def test_a_run_folder_with_too_long_a_name_is_refused(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["experiment=booking_sft", f"run.dir={tmp_path}/{name}", f"data.dir={tmp_path}/w"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"({reason}" in err and "choose another run.dir" in err
    assert not [*tmp_path.iterdir()]
