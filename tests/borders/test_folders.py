"""A folder that cannot be a run's, is another run's, or has torn files: one line with the way out, and no traceback."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname

import pytest

from megatron_collab.checkpoint import storage
from megatron_collab.commands.__main__ import run as command
from megatron_collab.config import Config, compose, recorded, run_record
from megatron_collab.launch import prepare, tasks
from megatron_collab.observability.run import Run
from megatron_collab.runtime import process
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.runtime.run_lock import RunLock
from megatron_collab.settings import ConfigError
from megatron_collab.train import main


class Started(Exception):
    """All was well, and the ranks would have been started."""


def start(*_: object) -> None:
    raise Started


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "replace_by_torchrun", start)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "world"
    config = compose(["experiment=booking_sft", f"data.dir={folder}", "run.dir=unused"])
    prepare.environments.prepare(config.data, config.run.seed)
    return folder


def settings(world: Path, run: Path | str) -> list[str]:
    return ["experiment=booking_sft", f"data.dir={world}", f"run.dir={run}", "launch.device=cpu"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    began = time.monotonic()
    assert main(list(arguments)) == EXIT_BAD_INPUT
    assert time.monotonic() - began < 60
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, out + err
    return err


@pytest.fixture(scope="module")
def started(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was started once, without its settings."""
    folder = tmp_path_factory.mktemp("started") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Started):
        patch.setattr(prepare, "replace_by_torchrun", start)
        main(settings(world, folder))
    return folder


@pytest.fixture
def run(world: Path, started: Path, tmp_path: Path) -> Path:
    """A run that was started once, with its settings."""
    folder = Path(shutil.copytree(started, tmp_path / "run"))
    config = compose(settings(world, folder))
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("place", ["/proc/x", "/proc/self/x", "/dev/null", "/dev/null/x", "FILE", "FILE/x"])
def test_a_place_where_no_run_can_be(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").write_text("")
    folder = place.replace("FILE", f"{tmp_path}/file")
    line = refused(capsys, *settings(world, folder))
    assert f"run.dir={folder}: cannot be used (" in line and "choose another run.dir" in line


@pytest.mark.processes
def test_a_folder_that_another_run_has(world: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run):
        line = refused(capsys, *settings(world, run))
        assert f"run.dir={run}: in use by process {os.getpid()} on {gethostname()} since 20" in line
        assert "wait until it ends, or choose another run.dir" in line and "gone" not in line
        file = run / ".lock"
        file.write_text(json.dumps({"pid": 7, "host": "node-17", "since": "yesterday"}))
        line = refused(capsys, *settings(world, run))
        assert "process 7 on node-17 since yesterday; wait until it ends, or choose another run.dir; if that " in line
        assert f"if that host is gone, remove {file}" in line
        file.write_text("torn")
        assert "in use by another process; wait" in refused(capsys, *settings(world, run))
    with pytest.raises(Started):
        main(settings(world, run))


@pytest.mark.seconds
def test_the_lock_comes_before_the_data(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = {tasks: ("read_data",), prepare: ("check_arguments", "check_model", "_pinned")}
    for module, names in early.items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("before the lock"))
    with RunLock(tmp_path / "run"):
        assert "in use by process" in refused(capsys, *settings(world, tmp_path / "run"))


def test_a_lock_whose_file_was_removed_is_free(tmp_path: Path) -> None:
    """As of a host that is gone: what is asked for then."""
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="in use by another process"), RunLock(tmp_path):
        pass
    (tmp_path / ".lock").unlink()
    with RunLock(tmp_path), pytest.raises(ConfigError, match="in use by process"), RunLock(tmp_path):
        pass
    os.close(descriptor)


def test_only_the_first_process_of_a_run_takes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.run.dir = str(tmp_path)
    with RunLock(tmp_path):
        for name, value in ((process.LAUNCHER, "1"), ("RANK", "1")):  # a rank; one of another node, started by hand
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with prepare.run_lock(config):
                    pass
        with pytest.raises(ConfigError), prepare.run_lock(config):
            pass


BECOME = """
import os, sys
from pathlib import Path
from megatron_collab.runtime.run_lock import RunLock
RunLock(Path(sys.argv[1])).__enter__()
os.execv(sys.executable, [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '100'])"])
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_stays_with_the_program_that_its_process_becomes(tmp_path: Path, how: signal.Signals) -> None:
    """And with that one alone: a process that it has started may outlive it, as the ranks of a killed launcher do."""
    launcher = subprocess.Popen([sys.executable, "-c", BECOME, str(tmp_path)])
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    started, program = list[str](), b""
    while not program.startswith(b"sleep\0"):  # until it has become its program, it has the lock's file as well
        time.sleep(0.05)
        if started := children.read_text().split():
            program = Path(f"/proc/{started[0]}/cmdline").read_bytes()
    try:
        with pytest.raises(ConfigError, match=f"in use by process {launcher.pid} on"), RunLock(tmp_path):
            pass
        launcher.send_signal(how)
        launcher.wait()
        with RunLock(tmp_path):
            assert Path(f"/proc/{started[0]}").exists()
    finally:
        for child in started:
            os.kill(int(child), signal.SIGKILL)


TORN: dict[str, tuple[str, str, str]] = {
    "settings cut": ("config.json", '{"run": {', "contains no run settings; restore it, or choose another run.dir"),
    "settings a list": ("config.json", "[]", "contains no run settings"),
    "settings deep": ("config.json", "[" * 100_000, "contains no run settings"),
    "evaluations cut": ("evaluations.json", '{"before": {"st', "cannot be read as JSON"),
    "evaluations a list": ("evaluations.json", "[1]", "holds a list, not evaluations; restore it, or remove it"),
    "evaluations foreign": ("evaluations.json", '{"a": {"score": 1}}', "'a' is not an evaluation record"),
    "inputs a list": ("inputs.json", "[1]", "contains no fingerprints; restore it, or remove it"),
    "pins cut": ("hub.json", "{", "is not a JSON object of commits; restore it, or remove it"),
}


@pytest.mark.parametrize("name", TORN)
def test_a_file_without_which_a_run_cannot_go_on(
    world: Path, run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file, text, message = TORN[name]
    (run / file).write_text(text)
    more = ["model.path=some/model", "data.world=null", f"data.train={world}/sft.jsonl"] if file == "hub.json" else []
    line = refused(capsys, *settings(world, run), *more)
    assert f"{run / file}: " in line and message in line, line


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
def test_a_folder_in_the_place_of_a_file(world: Path, run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    line = refused(capsys, *settings(world, run))
    assert f"{run / name}: " in line and "or choose another run.dir" in line


@pytest.mark.seconds
@pytest.mark.parametrize("text", ["garbage", "", "[]", "\x00", '{"train_minutes": 1'])
def test_a_result_that_is_none_does_not_end_a_run(world: Path, run: Path, text: str) -> None:
    (run / "result.json").write_text("{}")
    assert main(settings(world, run)) == 0, "done"
    (run / "result.json").write_text(text)
    with pytest.raises(Started):
        main(settings(world, run))


def opened(folder: Path, start: int) -> Run:
    config = Config()
    config.run.dir, config.train.steps = str(folder), 4
    return Run(run_record(config), config.train, start, {}, {})


@pytest.mark.parametrize("name", ["metrics.jsonl", "alarms.jsonl", "judges.jsonl", "history.jsonl"])
def test_of_torn_lines_the_others_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    whole = [json.dumps({"step": step, "text": "\ud800 \u2028", "reward": 0.5}) for step in range(2)]
    foreign = ["[1]", "7", '{"step": "1"}', '{"reward": 1}', "{" * 9999]
    content = "\n".join([whole[0], *foreign, whole[1], '{"step": 1, "rew']).encode() + b"\xff\x00"
    (tmp_path / name).write_bytes(content)
    (tmp_path / "best.json").write_text("{")
    with opened(tmp_path, 2):
        pass
    assert (tmp_path / name).read_text().splitlines() == whole
    assert f"{tmp_path / name}: skipped 6 unreadable lines" in capsys.readouterr().err
    assert not (tmp_path / "best.json").exists(), "it is written again from the evaluations"


@pytest.mark.parametrize("text", ["{", "[]", '{"step": null}', "7"])
def test_a_best_checkpoint_that_is_not_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(ConfigError, match=r"best\.json: contains no step; remove it: .* or give RUN@STEP$"):
        storage.find_checkpoint(Path(f"{tmp_path}@best"))


@pytest.mark.parametrize("text", ["{}", '{"step": 1}', '{"step": 1, "ranks": 1, "state": {}, "files": {"a": 1}}', "[]"])
def test_a_checkpoint_whose_state_says_nothing_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert storage.damage(tmp_path, storage.read_state(tmp_path)) == ["no valid state.json"]
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").mkdir()
    assert storage.read_state(tmp_path) is None


STEP = {"step": 0, "reward": 0.5, "reward_se": 0.1, "score/right": 0.5, "loss": 1.0}
PLAYED = {
    "task": "t-1",
    "ending": "user_done",
    "error": "",
    "messages": [{"role": "user", "content": "a table \ud800"}],
    "scores": {"right": 1.0, "other": None, "text": "no", "huge": 10**400, "gone": {"missing": "down"}},
}
LIVE: dict[str, tuple[str, str]] = {
    "a live run": ("metrics.jsonl", f'{json.dumps(STEP)}\n{{"step": 1, "rew'),
    "null": ("metrics.jsonl", json.dumps(STEP | {"reward": None, "score/right": None})),
    "numbers": ("metrics.jsonl", json.dumps(STEP | {"loss": 1e308, "kl": 10**400, "score/right": float("nan")})),
    "extremes": ("metrics.jsonl", json.dumps(STEP | {"loss": 9e99}) + "\n" + json.dumps(STEP | {"loss": -9e99})),
    "foreign": ("metrics.jsonl", json.dumps({"epoch": 1, "accuracy": [0.5]}) + "\n[1]\n\n7\n" + json.dumps(STEP)),
    "names": ("metrics.jsonl", json.dumps(STEP | {"score/$x_{$\\frac": 1.0, "score/\ud800": 2.0, "score/_": "a"})),
    "binary": ("metrics.jsonl", "\x00\x01\u2028\n"),
    "conversations": ("eval_before.jsonl", json.dumps(PLAYED) + "\n" + json.dumps({"task": 1}) + '\n{"task": "t'),
    "conversations cut": ("eval_before.parquet", "PAR1 cut"),
    "no messages": ("eval_before.jsonl", json.dumps(PLAYED | {"messages": None, "scores": None})),
    "evaluations": ("evaluations.json", json.dumps({"before": {"step": 0, "score/right": None}, "x": [], "y": {}})),
    "evaluations cut": ("evaluations.json", '{"before": {'),
    "settings": ("config.json", "\x00{"),
}  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize("name", LIVE)
def test_a_report_of_what_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    file, text = LIVE[name]
    (tmp_path / file).write_text(text)
    assert command("report", [str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/report.html\n"
    assert "Warning" not in err and all(line.startswith("megatron-collab: ") for line in err.splitlines()), err
    page = (tmp_path / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert "<svg" in page or name in ("binary", "null")


@pytest.mark.seconds
def test_a_live_run_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text = LIVE["a live run"]
    (tmp_path / file).write_text(text)
    assert command("report", [str(tmp_path)]) == 0
    assert f"{tmp_path / file}: skipped 1 unreadable line\n" in capsys.readouterr().err
    assert "<p>1 steps.</p>" in (tmp_path / "report.html").read_text()
