"""What killed runs and other programs have left does not stop the next start, and what is not of runs stays."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.train import main
from tests.borders.test_folders import Started, no_process, run, settings, started, world
from tests.helpers import free_port
from tests.llm.endpoint import Endpoint, in_thread, says
from tests.program import Program, evaluation_of

__all__ = ["no_process", "run", "started", "world"]  # fixtures
DEAD = 4_194_303  # above the kernel's usual limit of process ids


def write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def stale_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(file))


def locks(run: Path) -> None:
    """Of processes that are gone, on this host and on another one; the locks themselves ended with them."""
    write(run / ".lock", json.dumps({"pid": DEAD, "host": "node-17", "since": "2026-01-01"}))
    for name in (".hub.json.lock", ".writer.lock", ".fork.lock", "data/.survey-0.json.lock", "data/.rows-0.lock"):
        write(run / name, str(DEAD))


def half_written_checkpoints(run: Path) -> None:
    for name in ("step_7.tmp/state.json", "step_7.old/rank_0.pt", "step_7.tmp/.metadata"):
        write(run / "checkpoints" / name, "{")
    write(run / ".hf.partial/model.safetensors", "half")
    write(run / ".hf.old/config.json", "{}")


def half_written_files(run: Path) -> None:
    """Of writers that put a file in the place of another at the end, and of rows as Arrow."""
    for name in ("config.json", "inputs.json", "result.json"):
        write(run / f".{name}.tmp", "{")
        write(run / f"{name}.tmp", "{")
    write(run / "data/rows-0123456789abcdef.arrow.tmp", "ARROW")
    (run / "data/rows-0123456789abcdef.partial").mkdir()


def odd_entries(run: Path) -> None:
    """A socket, a pipe that nobody writes to, a link to nowhere and one to itself."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        stale_socket(Path(short) / "s")
        shutil.move(Path(short) / "s", run / "serve.sock")
    os.mkfifo(run / "console")
    (run / "latest").symlink_to("nowhere")
    (run / "loop").symlink_to("loop")


def lines_of_a_killed_writer(run: Path) -> None:
    for name in ("metrics.jsonl", "history.jsonl", "alarms.jsonl"):
        write(run / name, '{"step": 0')


def data_that_was_cut(run: Path) -> None:
    """What the start keeps of the data, after a full disk or a power loss: it is made again."""
    for pattern in ("survey-*.json", "rows-*.json", "rows-*.arrow"):
        (file,) = (run / "data").glob(pattern)
        os.truncate(file, file.stat().st_size // 2)


REMAINS = [
    locks,
    half_written_checkpoints,
    half_written_files,
    odd_entries,
    lines_of_a_killed_writer,
    data_that_was_cut,
]


@pytest.mark.processes
@pytest.mark.parametrize("leave", REMAINS)
def test_a_run_starts_again_among_what_a_killed_one_has_left(
    leave: Callable[[Path], None], world: Path, run: Path
) -> None:
    leave(run)
    with pytest.raises(Started):
        main(settings(world, run))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def leave_scratch(temporary: Path) -> None:
    """Folders of killed runs: a session of Ray with its socket, a pipe, files that may not be read."""
    session = temporary / "mgcollab-ray" / "session_1" / "sockets"
    session.mkdir(parents=True)
    stale_socket(session / "raylet")
    (temporary / "mgcollab-ray" / "session_latest").symlink_to("nowhere")
    write(temporary / "mgcollab-ray" / "ray_current_cluster", "127.0.0.1:1")
    (temporary / "mgcollab-pipe").mkdir()
    os.mkfifo(temporary / "mgcollab-pipe" / "p")
    write(temporary / "mgcollab-closed" / "sub" / "file")
    (temporary / "mgcollab-closed" / "sub").chmod(0o500)
    (temporary / "mgcollab-closed").chmod(0o500)


def foreign(temporary: Path, kept: Path) -> list[Path]:
    """What only has such a name: a file, links to a folder and to nowhere, and another user's folder."""
    write(temporary / "mgcollab-file")
    write(kept / "precious")
    (temporary / "mgcollab-link").symlink_to(kept)
    (temporary / "mgcollab-nowhere").symlink_to("nowhere")
    names = ["mgcollab-file", "mgcollab-link", "mgcollab-nowhere"]
    if os.getuid() == 0:
        (temporary / "mgcollab-other").mkdir()
        os.chown(temporary / "mgcollab-other", 65_534, 65_534)
        names.append("mgcollab-other")
    return sorted(temporary / name for name in names)


def test_only_the_scratch_of_killed_runs_of_this_user_is_removed(temporary: Path, tmp_path: Path) -> None:
    leave_scratch(temporary)
    expected = foreign(temporary, tmp_path / "kept")
    with ScratchFolder() as folder:
        assert sorted(temporary.iterdir()) == sorted([*expected, folder])
    assert (tmp_path / "kept" / "precious").exists()


@pytest.fixture
def segments() -> Iterator[list[Path]]:
    """Shared memory of processes that were killed: of SGLang's queues, multiprocessing, torch and Ray."""
    names = (f"sgl_shm_mq_{DEAD}", f"sem.mp-{DEAD}", f"torch_{DEAD}_1", f"plasma_{DEAD}", f"psm_{DEAD}")
    files = [Path("/dev/shm") / name for name in names]
    for file in files:
        file.write_bytes(bytes(4096))
    yield files
    for file in files:
        file.unlink()


@pytest.mark.slow
@pytest.mark.processes
def test_a_whole_run_among_leftovers(temporary: Path, segments: list[Path], tmp_path: Path) -> None:
    """It works, removes the scratch of killed runs, and leaves nothing of its own."""
    leave_scratch(temporary)
    expected = foreign(temporary, tmp_path / "kept")
    for name, text in {"ray_current_cluster": f"127.0.0.1:{free_port()}", "session_1/logs/raylet.err": "fatal"}.items():
        write(temporary / "ray" / name, text)
    (temporary / "ray" / "session_latest").symlink_to("session_1")
    write(temporary / "torchinductor_root" / "broken.py", "(")
    with in_thread(Endpoint(says("hello"))) as endpoint:
        settings = evaluation_of(endpoint, tmp_path)
        program = Program(
            settings,
            tmp_path / "log",
            "megatron_collab.evaluate",
            OPENAI_API_KEY="k",
            TMPDIR=str(temporary),
            RAY_TMPDIR=str(temporary),
        )
        try:
            program.finish()
            assert program.gone() == []
        finally:
            program.end()
    assert "Traceback" not in (tmp_path / "log").read_text() and len(endpoint.requests) == 4
    assert sorted(temporary.iterdir()) == sorted([*expected, temporary / "ray", temporary / "torchinductor_root"])
    assert all(file.stat().st_size == 4096 for file in segments), "another run may have them"
