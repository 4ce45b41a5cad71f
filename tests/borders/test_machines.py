"""Machines as they are: the program works, or ends in one line that says why and what to do."""

from __future__ import annotations

import asyncio
import errno
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_collab import train
from megatron_collab.config import Config, compose
from megatron_collab.inference import server as server_module
from megatron_collab.launch import prepare, program
from megatron_collab.observability.writers import wandb, writer_kinds
from megatron_collab.reward.multiturn import _custom_reward
from megatron_collab.reward.workers import Job, RewardWorker
from megatron_collab.rollout.users import UserError, reporting_errors
from megatron_collab.runtime import files, process, rank0, signals
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_HUNG, EXIT_STOPPED, RunStopped
from megatron_collab.settings import ConfigError
from megatron_collab.settings.extension import resolve
from megatron_collab.trainer.megatron import parallel
from megatron_collab.types import Missing, Task
from tests.helpers import free_port, policy_servers
from tests.llm.endpoint import Endpoint, hangs, in_thread, says
from tests.program import Program, evaluation_of


class Started(Exception):
    """The ranks would have been started."""


# A console that goes away

OUTPUT = """
import logging, sys
from pathlib import Path
from megatron_collab.runtime import console, screen

console.begin()
screen.LOG_EVERY = 0
progress = screen.progress("training", 9, "step")
for step in range(9):
    logging.getLogger("megatron_collab").info("step")
    logging.getLogger("megatron_collab").warning("slow")
    progress.update(1)
    print("a line", flush=True)
    print("a line", file=sys.stderr)
Path(sys.argv[1]).touch()
"""


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed_terminal() -> int:
    controller, terminal = os.openpty()
    os.close(controller)
    return terminal


@pytest.mark.processes
@pytest.mark.parametrize("console", [closed_pipe, closed_terminal, lambda: os.open("/dev/full", os.O_WRONLY), None])
def test_a_run_goes_on_without_its_console(tmp_path: Path, console: Callable[[], int] | None) -> None:
    """None: its streams were closed before the start."""
    descriptor = console() if console else os.open(os.devnull, os.O_WRONLY)
    command = [sys.executable, "-c", OUTPUT, str(tmp_path / "end")]
    if console is None:
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    ended = subprocess.run(command, stdout=descriptor, stderr=descriptor, timeout=100)
    os.close(descriptor)
    assert ended.returncode == 0 and (tmp_path / "end").exists()


def test_a_signal_from_a_closed_terminal_ends_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, isatty=lambda: True))
    signals.end_at_once(signal.SIGHUP, 0)
    assert codes == [signals.EXIT_TERMINATED]


# Variables that other programs have left

RANK = dict.fromkeys(("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
RANK |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
LEFTOVERS = {
    "the id": ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID: set, but torchrun did not start this process"),
    "a rank": ({"RANK": "1"}, "RANK: set, but torchrun did not start this process (TORCHELASTIC_RUN_ID is not set)"),
    "a local rank": ({"LOCAL_RANK": "3"}, "LOCAL_RANK: set, but "),
    "a size, as Kubernetes operators set it": ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE: set, but "),
    "a launcher": ({process.LAUNCHER: "7"}, f"{process.LAUNCHER}: set, but "),
    "torchrun's number of nodes": ({"PET_NNODES": "2"}, "PET_NNODES: set, but torchrun did not start this process"),
    "torchrun's other defaults": (
        {"PET_NPROC_PER_NODE": "4", "PET_MODULE": "1", "PET_RDZV_BACKEND": "c10d"},
        "PET_MODULE, PET_NPROC_PER_NODE, PET_RDZV_BACKEND: set, but ",
    ),
    "all without a master": (RANK, "(MASTER_PORT is not set); unset them"),
    "all of a rank, none of torchrun": (RANK | {"MASTER_PORT": "{port}"}, "(TORCHELASTIC_USE_AGENT_STORE is not set);"),
    "all": (RANK | AGENT | {"MASTER_PORT": "{port}"}, "(MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: "),
    "no port": (RANK | AGENT | {"MASTER_PORT": "x"}, "MASTER_PORT=x: invalid literal"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = [name for name in os.environ if name.startswith("PET_")]
    for name in (*RANK, *AGENT, *defaults, "MASTER_PORT", process.LAUNCHER, signals.LAUNCHER):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", LEFTOVERS)
def test_left_over_variables_of_torchrun_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    variables, message = LEFTOVERS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.replace("{port}", port))
    assert train.main(["experiment=booking_sft", f"run.dir={tmp_path}/run"]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message.replace("{port}", port) in err and "; unset them" in err, err
    assert not (tmp_path / "run").exists()


def test_a_rank_of_torchrun_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store of torchrun, and with one of rank 0, which is not there yet; also if PET_NNODES is a setting."""
    assert process.leftover_rank() is None
    with socket.create_server(("127.0.0.1", 0)) as master:
        for name, value in (RANK | AGENT | {"MASTER_PORT": str(master.getsockname()[1]), "PET_NNODES": "1"}).items():
            monkeypatch.setenv(name, value)
        assert process.leftover_rank() is None
    assert process.leftover_rank() is not None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert process.leftover_rank() is None


@pytest.mark.parametrize(
    ("world", "local", "local_rank", "nodes"),
    [(3, 3, 0, 1), (3, 3, 1, 1), (1, 1, 0, 1), (4, 2, 0, 1), (4, 2, 1, 1), (2, 2, 0, 2), (2, 1, 0, 1), (4, 4, 0, 2)],
)
def test_another_number_of_ranks_than_in_the_settings_is_refused_once(
    world: int, local: int, local_rank: int, nodes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(program.time, "sleep", waits.append)
    monkeypatch.setattr(process, "leftover_rank", lambda: None)
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": local_rank}
    for name, value in (RANK | sizes).items():
        monkeypatch.setenv(name, str(value))
    settings = ["launch.nproc_per_node=2", f"launch.nodes={nodes}", "run.dir=unused"]
    config = compose(["experiment=booking_sft", *settings])
    assert program.run("a.module", "", Config, [], lambda *_: (config, 2, lambda: None)) == EXIT_BAD_INPUT
    message = f"launch.nodes={nodes}: torchrun has started {world} ranks, {local} of them on this node; start it with "
    message += f"--nnodes={nodes} --nproc-per-node=2, or change the settings"
    assert capsys.readouterr().err.count(message) == (local_rank == 0)
    assert bool(waits) == (local_rank == 1)  # for the launcher, which ends it after the first rank


# Services that are gone


class Refuses(BaseHTTPRequestHandler):
    """A server that does not know the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server_that(how: str) -> Iterator[str]:
    """Address of a server that is gone, never answers, refuses the key, or is another one; or a name of none."""
    match how:
        case "silent":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        case "refuses":
            with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
                Thread(target=server.serve_forever).start()
                yield f"http://127.0.0.1:{server.server_port}"
                server.shutdown()
        case "another":
            with in_thread(Endpoint(says("hello"))) as endpoint:
                yield f"http://127.0.0.1:{endpoint.port}"
        case "no host":
            yield "http://no-such-host.invalid"
        case _:
            yield f"http://127.0.0.1:{free_port()}"


KEY = "0" * 40
GONE = ("gone", "", KEY)  # a server at its address, one at the proxy's, and the key
UNREACHABLE = [("silent", "", KEY), ("refuses", "", KEY), ("another", "", KEY), ("no host", "", KEY)]
UNREACHABLE += [("no host", "silent", KEY), ("gone", "", "too-short")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("server", "proxy", "key"), [GONE, *(pytest.param(*names, marks=pytest.mark.slow) for names in UNREACHABLE)]
)
def test_weights_and_biases_without_a_network_goes_on_offline(
    server: str,
    proxy: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "_SECONDS", 1.0)
    config = Config()
    config.run.dir, config.run.wandb_project = str(tmp_path), "p"
    with server_that(server) as address, server_that(proxy) as behind:
        for name, value in {"API_KEY": key, "BASE_URL": address, "SILENT": "true"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        if proxy:
            monkeypatch.setenv("HTTP_PROXY", behind)
        writer = wandb.WandbWriter(None, config.run, {}, 0)
        writer.scalars(0, {"reward": 1.0})
        writer.close(failed=False)
        writer._wandb.teardown()
    err = capsys.readouterr().err
    assert err.count("megatron-collab: Weights & Biases: ") == 1 and "continuing offline" in err
    assert err.count("\n") == 1, err
    assert [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]


@pytest.mark.parametrize("key", [" ", f"{'0' * 40}\n", "0" * 40 + "é"])
def test_a_key_of_a_writer_that_no_header_can_hold_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases would not even go on offline."""
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ConfigError, match=r"^WANDB_API_KEY: must be printable ASCII without line breaks, and without"):
        writer_kinds(Config().run)
    monkeypatch.setenv("WANDB_API_KEY", key.strip().removesuffix("é"))
    assert ("wandb" in writer_kinds(Config().run)) is bool(key.strip())


# Folders

NAMES = ["a [b] * c", "hash#percent%41", "quote'd", "Übung ä", "x" * 120]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "world"
    prepare.environments.prepare(compose(["experiment=booking_sft", f"data.dir={folder}", "run.dir=unused"]))
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


# A full disk

FULL = OSError(errno.ENOSPC, "No space left on device", "/run/file")


def test_a_full_disk_on_rank_0_stops_all_ranks(one_rank: Config) -> None:
    def write() -> None:
        raise FULL

    with pytest.raises(RunStopped, match=r"^/run/file: cannot be written: No space left on device; free "):
        rank0.shared(write)


@pytest.mark.parametrize(
    ("rank", "leader_ended", "error", "raised", "explained"),
    [
        (0, False, FULL, RunStopped, 1),
        (1, False, FULL, RunStopped, 1),
        (1, True, RuntimeError("Connection closed by peer"), RunStopped, 0),
        (1, False, RuntimeError("Connection closed by peer"), RuntimeError, 0),
        (0, False, FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError, 0),
    ],
)
def test_a_rank_explains_a_full_disk_and_not_what_rank_0_has_explained(
    rank: int,
    leader_ended: bool,
    error: Exception,
    raised: type[Exception],
    explained: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SimpleNamespace(set=lambda *_: None, check=lambda keys: leader_ended)
    monkeypatch.setattr(parallel, "run_store", lambda: (store, rank, 2))
    lines: list[RunStopped] = []
    with pytest.raises(raised) as end, parallel.leader_ends_first(1.0, lines.append):
        raise error
    assert end.type is raised and len(lines) == explained


# Programs of users that end or cancel what called them


def ends() -> None:
    sys.exit(0)


def cancels() -> None:
    raise asyncio.CancelledError


@pytest.fixture
def extension(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my.py").write_text("import sys\nsys.exit(0)\n")
    yield tmp_path / "my.py"


def test_an_extension_that_exits_at_its_import_is_refused(extension: Path) -> None:
    with pytest.raises(ConfigError, match=r"importing .* failed: SystemExit: 0"):
        resolve(f"{extension}:Mine", "algo.loss", object)


def test_a_function_that_exits_does_not_end_a_run_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run("a.module", "", Config, [], lambda *_: ends()) == EXIT_BAD_INPUT  # type: ignore[func-returns-value]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and __file__ in err and "ends the run by SystemExit(0)" in err


@pytest.mark.parametrize("fails", [ends, cancels])
def test_an_extension_that_exits_or_cancels_has_failed(fails: Callable[[], None]) -> None:
    task = Task("t", (), "", "", "")
    users: Any = SimpleNamespace(counters=Counter(), directory=SimpleNamespace(name_of=lambda _: ""))
    worker: Any = RewardWorker.__new__(RewardWorker)
    metric = SimpleNamespace(counters=Counter(), score=lambda *_: fails())
    worker.metrics, worker.timeout, worker._judged = {"mine": metric}, 10.0, set()

    async def play() -> None:
        worker._places = {"mine": asyncio.Semaphore(1)}
        score = await worker._apply("mine", Job(("mine",), task, None))  # type: ignore[arg-type]
        assert isinstance(score, Missing) and "metric mine: " in score.why and metric.counters["failed"] == 1
        with pytest.raises(UserError), reporting_errors(task, users):
            fails()
        reward = _custom_reward("m", lambda *_: fails(), (), {})  # type: ignore[arg-type, return-value]
        assert isinstance(reward.value, Missing)

    asyncio.run(play())


def test_a_cancellation_from_outside_goes_on() -> None:
    users: Any = SimpleNamespace(counters=Counter(), directory=SimpleNamespace(name_of=lambda _: ""))

    async def wait() -> None:
        with reporting_errors(Task("t", (), "", "", ""), users):
            await asyncio.Event().wait()

    async def cancel() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(cancel())
    assert not users.counters


# A whole run, without SGLang: an evaluation of a model behind an endpoint, with torchrun and Ray

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
