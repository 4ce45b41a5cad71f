"""Whole runs on odd machines, without SGLang: evaluations of a model behind an endpoint, with torchrun and Ray.

The program works, or ends in one line that says why and what to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_HUNG, EXIT_STOPPED
from tests.llm.endpoint import Endpoint, hangs, in_thread, says
from tests.program import Program, evaluation_of

NO_HOST = ("unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid; exec "$@"', "sh")
ONLY_IPV6 = ("unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo; exec "$@"', "sh")
root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for namespaces of its own")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short path, in which killed runs and other programs have left something."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        leftover = Path(folder) / "mgcollab-leftover"
        (leftover / "session_1" / "sockets").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(leftover / "session_1" / "sockets" / "raylet"))
        (leftover / "session_latest").symlink_to("nowhere")
        (Path(folder) / "mgcollab-file").touch()
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.processes
@root_only
@pytest.mark.parametrize("name", ["no host, private, long", "umask 000"])
def test_a_run_on_an_odd_machine(name: str, tmp_path: Path, temporary: Path) -> None:
    """No host has this machine's name, nobody else may read, and paths are longer than a socket's; or all may write.

    What killed runs have left in the temporary folder is removed, and what is not of runs stays.
    """
    folder, within, rights = tmp_path, ("sh", "-c", 'umask 000; exec "$@"', "sh"), 0o666
    tmpdir = temporary
    if "long" in name:
        folder, rights = tmp_path.joinpath(*["long " + "x" * 240] * 8), 0o600
        within = (*NO_HOST[:-2], 'hostname no-such-host.invalid; umask 077; exec "$@"', "sh")
        tmpdir = temporary / ("deep" * 30)  # sockets there would be too long, so runs use /tmp
        tmpdir.mkdir()
        shutil.rmtree(temporary / "mgcollab-leftover")
    with in_thread(Endpoint(says("hello"))) as endpoint:
        settings = evaluation_of(endpoint, folder)
        log = tmp_path / "log"
        program = Program(
            settings, log, "megatron_collab.evaluate", within=within, OPENAI_API_KEY="k", TMPDIR=str(tmpdir)
        )
        try:
            program.finish()
            assert program.gone() == []
        finally:
            program.end()
    run = folder / "run"
    assert (run / "result.json").stat().st_mode & 0o777 == rights
    assert "Traceback" not in log.read_text() and len(endpoint.requests) == 4
    assert (temporary / "mgcollab-file").exists()
    assert [*temporary.rglob("mgcollab-*")] == [temporary / "mgcollab-file"], "leftovers are removed"


@pytest.mark.processes
@root_only
def test_a_machine_without_ipv4_is_refused(tmp_path: Path) -> None:
    with in_thread(Endpoint(says("hello"))) as endpoint:
        command = [sys.executable, "-m", "megatron_collab.evaluate", *evaluation_of(endpoint, tmp_path)]
    ended = subprocess.run([*ONLY_IPV6, *command], capture_output=True, text=True, timeout=100)
    assert ended.returncode == EXIT_BAD_INPUT and ended.stderr.count("\n") == 1, ended.stderr
    assert "launch.interface=lo: no interface with an IPv4 address" in ended.stderr
    assert not (tmp_path / "run").exists()


# The process, its signal, how the run ends and what a line says.
LOST = {
    "the node": ("raylet", signal.SIGKILL, EXIT_STOPPED, "Ray has lost a process of the run"),
    "an agent": ("DashboardAgent", signal.SIGKILL, EXIT_STOPPED, "Ray has lost a process of the run"),
    "the store": ("gcs_server", signal.SIGKILL, EXIT_STOPPED, "Ray has lost a process of the run"),
    "a worker": ("ConversationWorker", signal.SIGSTOP, EXIT_HUNG, "rank 0 has waited"),
    "the limiter": ("Limiter", signal.SIGSTOP, EXIT_STOPPED, "did not end within rollout.deadline=4 s"),
}
QUICK = ["launch.timeout=20", "rollout.deadline=4", "reward.timeout=3", "rollout.tool_timeout=1", "user.deadline=4"]
QUICK += ["assistant.deadline=4", "assistant.attempts=1"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", LOST)
def test_a_process_of_ray_that_is_lost_or_frozen_ends_the_run(name: str, tmp_path: Path) -> None:
    """In one line, within the time that a group may take, and without leaving a process."""
    part, number, code, line = LOST[name]
    with in_thread(Endpoint(hangs(600.0))) as endpoint, tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        more = QUICK if number == signal.SIGSTOP else ["assistant.deadline=600", "rollout.deadline=600"]
        settings = evaluation_of(endpoint, tmp_path, *more)
        program = Program(settings, tmp_path / "log", "megatron_collab.evaluate", OPENAI_API_KEY="k", TMPDIR=temporary)
        try:
            program.when(lambda: bool(endpoint.requests))
            # A process that forks has its name twice for a moment.
            named = [p for p in program.processes() if part in p.name() or part in " ".join(p.cmdline()[:1])]
            victim = min(named, key=psutil.Process.create_time)
            victim.send_signal(number)
            began = time.monotonic()
            assert program.wait() == code, program.log.read_text()[-3000:]
            assert time.monotonic() - began < 120
            if number == signal.SIGSTOP and victim.is_running():
                victim.send_signal(signal.SIGCONT)
            assert program.gone() == []
            assert os.listdir(temporary) == []
        finally:
            program.end()
    log = program.log.read_text()
    assert "Traceback" not in log and any(line in text for text in log.splitlines()), log[-3000:]
