"""Our torchrun: whose exit code it has, where it listens, and that SIGUSR1 reaches the ranks and ends nobody, however
early it comes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from torch.distributed import run

from megatron_collab.launch import torchrun
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_STOPPED
from megatron_collab.runtime.signals import EXIT_PREEMPTED, PREEMPTION
from tests.helpers import listening

pytestmark = pytest.mark.processes

TIMEOUT = 300
# Rank 0 has a process like any server; it waits for the signal, rank 1 for rank 0.
WAITS = """
import os, subprocess, sys, time
from pathlib import Path
from megatron_collab.runtime import signals
from megatron_collab.runtime.process import Preempted, raise_if_preempted

signals.begin()
folder = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    time.sleep(600)
signals.keep_notices(0, 20.0)
child = subprocess.Popen(["sleep", "600"])
(folder / "ready").touch()
try:
    while True:
        time.sleep(0.01)
        raise_if_preempted()
except Preempted:
    time.sleep(0.1)  # for the child to have it
    code = 75 if child.poll() is None else 1
    child.kill()
    sys.exit(code)
"""
# Rank 1 alone gets the signal, which is here that of another node; both wait for rank 0's word.
TELLS = """
import os, signal, sys
from pathlib import Path
from megatron_collab.runtime import signals

signals.begin()
rank = int(os.environ["RANK"])
signals.keep_notices(rank, 60.0)
import torch.distributed as dist
from pathlib import Path
from megatron_collab.runtime import hang_detector
from megatron_collab.runtime.process import Interrupted, Preempted
from megatron_collab.runtime.rank0 import check_preemption

dist.init_process_group("gloo")
if rank == 1:
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
code = 1
with hang_detector.watch(600.0, Path(sys.argv[1])):
    try:
        while True:
            check_preemption()
    except Preempted as error:
        code = 130 if isinstance(error, Interrupted) else 75
        (Path(sys.argv[1]) / f"said-{rank}").write_text(str(error))
        dist.barrier()
os._exit(code)
"""
MEETS = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from torch.distributed.rendezvous import rendezvous

store, rank, ranks = next(rendezvous("env://", timeout=timedelta(seconds=60)))
store.set(str(rank), os.environ["MASTER_ADDR"])
met = {store.get(str(other)) for other in range(ranks)}
(Path(sys.argv[1]) / f"met-{rank}").write_bytes(b" ".join(met))
time.sleep(600)
"""
ENDS = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # ends by SIGTERM, as a rank that waits for it does
    time.sleep(600)
code = int(sys.argv[1])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@contextmanager
def agent(script: str, folder: Path, *arguments: str, options: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of `script`; started with the signal blocked, as `env --block-signal=USR1` does."""
    (folder / "rank.py").write_text(script)
    command = [sys.executable, "-m", "megatron_collab.launch.torchrun", *options, "--nproc-per-node=2"]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {PREEMPTION})
    try:
        process = subprocess.Popen([*command, str(folder / "rank.py"), *arguments], stderr=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        yield process
    finally:
        if process.poll() is None:
            for target in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):  # the end of one ends others
                    target.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    stderr = process.communicate(timeout=TIMEOUT)[1]
    return process.returncode, stderr


def test_a_signal_before_the_first_line_is_heeded(tmp_path: Path) -> None:
    with agent(WAITS, tmp_path, str(tmp_path)) as process:
        process.send_signal(PREEMPTION)
        assert ended(process)[0] == EXIT_PREEMPTED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SIGUSR1", 75),
        ("SIGTERM", 75),
        ("SIGINT", 130),
    ],
)
def test_a_signal_that_reaches_one_other_rank_alone_ends_the_run_everywhere(
    tmp_path: Path, name: str, code: int
) -> None:
    with agent(TELLS, tmp_path, str(tmp_path), name) as process:
        assert ended(process)[0] == code
    assert [(tmp_path / f"said-{rank}").read_text() for rank in range(2)] == [
        f"received {name}",
        f"rank 0 failed: {'Interrupted' if code == 130 else 'Preempted'}: received {name}",
    ]


def test_a_signal_to_all_processes_of_a_job_ends_none(tmp_path: Path) -> None:
    with agent(WAITS, tmp_path, str(tmp_path)) as process:
        deadline = time.monotonic() + TIMEOUT
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        everyone: Sequence[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
        assert len(everyone) == 3
        for other in everyone:
            other.send_signal(PREEMPTION)
        assert ended(process)[0] == EXIT_PREEMPTED


@pytest.mark.parametrize(
    ("code", "shown"),
    [pytest.param(EXIT_STOPPED, EXIT_STOPPED, marks=pytest.mark.slow), (-signal.SIGKILL, 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path, code: int, shown: int) -> None:
    """The others are ended by it, with codes of their own; what nobody has explained is explained."""
    with agent(ENDS, tmp_path, str(code)) as process:
        exit_code, stderr = ended(process)
        assert (exit_code, "rank      : 1" in stderr) == (shown, code < 0)


@pytest.mark.parametrize(
    ("options", "address"),
    [
        pytest.param([], "127.0.0.1", marks=pytest.mark.slow),
        pytest.param(["--standalone"], "127.0.0.1", marks=pytest.mark.slow),
        (["--master-addr=127.0.0.2"], "127.0.0.2"),
    ],
)
def test_it_listens_on_one_address(tmp_path: Path, options: list[str], address: str) -> None:
    """torchrun would listen on all of them, and unpickle what anybody has put into the store of a single node."""
    with agent(MEETS, tmp_path, str(tmp_path), options=options) as process:
        deadline = time.monotonic() + TIMEOUT
        met = [tmp_path / f"met-{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in met):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        assert {file.read_text() for file in met} == {address}
        family = psutil.Process(process.pid)
        listeners = listening([family, *family.children(recursive=True)])
        assert {host for sockets in listeners.values() for host, _ in sockets} == {address}


def test_a_single_node_has_no_store_that_unpickles() -> None:
    """As torchrun's own of --standalone does, with whatever anybody has put into it."""
    options = run.parse_args(["--standalone", "rank.py"])
    store = torchrun._store(options)
    assert store and store.port == options.master_port and not options.standalone
    config, *_ = run.config_from_args(options)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", f"127.0.0.1:{store.port}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rdzv-backend=c10d"], "--rdzv-backend, --rdzv-endpoint: "),
        (["--master-addr=192.0.2.1"], "--master-addr=192.0.2.1, --master-port=0: "),  # of nobody (RFC 5737)
        (["--master-port={port}"], "--master-addr=127.0.0.1, --master-port={port}: "),
    ],
)
def test_where_it_cannot_listen_nothing_is_started(options: list[str], message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        arguments = ["--master-addr=127.0.0.1", *(option.format(port=port) for option in options), "rank.py"]
        with pytest.raises(ValueError) as refused:
            torchrun._store(run.parse_args(arguments))
    assert str(refused.value).startswith(message.format(port=port)) and "\n" not in str(refused.value)


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    with agent(ENDS, tmp_path, "0", options=["--rdzv-backend=c10d"]) as process:
        code, error = ended(process)
    assert code == EXIT_BAD_INPUT
    assert error.startswith("megatron-collab: --rdzv-backend, --rdzv-endpoint: ") and error.count("\n") == 1
