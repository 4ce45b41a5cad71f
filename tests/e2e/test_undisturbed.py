"""Processes and a Ray node die, the clock jumps, a preemption notice arrives, the ranks are on two hosts.

The final parameters equal those of an undisturbed run on one host, to the last bit.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_collab.rollout.journal import JournalEntry, entries
from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.runtime.signals import EXIT_PREEMPTED, PREEMPTION
from tests.e2e.hosts import train_on_two_hosts
from tests.e2e.test_booking import RANDOM, kill, parameters
from tests.helpers import free_port, transcript_rows
from tests.program import Program, lines, steps_done

pytestmark = pytest.mark.processes

RL = ["experiment=booking", "train.steps=3", "train.checkpoint_every=1", "train.prompts_per_step=4"]
RL += ["train.rollouts_per_prompt=4", "rollout.futures=2", "train.eval_tasks=0", *RANDOM]
SAME = ("reward", "turn_tokens", "loss", "grad_norm", "missing", "ending/error")
# On PYTHONPATH: in every Python process the wall clock jumps by a day and back, every second; each leaves a file.
JUMPING = """
import os, time
real, real_ns = time.time, time.time_ns
ahead = lambda: int(time.monotonic()) % 2 * 86400
time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + ahead() * 10**9
open(f"{os.path.dirname(__file__)}/jumps-{os.getpid()}", "w").close()
"""
# Ray's default declares a node dead after five health checks, three seconds apart; these are faster.
QUICK = json.dumps(
    {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def rl(root: Path, name: str) -> list[str]:
    return [*RL, f"run.dir={root}/{name}", f"data.dir={root}/world", f"model.path={root}/world/model"]


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Path:
    Program(rl(root, "rl"), root / "rl.log").finish()
    return root / "rl"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def starter(arguments: list[str], **environment: str) -> Program:
        programs.append(Program(arguments, tmp_path / f"console{len(programs)}.log", **environment))
        return programs[-1]

    yield starter
    for program in programs:
        program.end()


def workers(run: Path, name: str) -> list[psutil.Process]:
    """The run's living Ray workers of that name."""
    pids = [int(file.stem.rpartition("-")[2]) for file in run.glob(f"stacks/{name}-*.txt")]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def assert_same(run: Path, undisturbed: Path) -> None:
    for line, expected in zip(lines(run / "metrics.jsonl"), lines(undisturbed / "metrics.jsonl"), strict=True):
        assert {name: line.get(name) for name in SAME} == {name: expected.get(name) for name in SAME}
    assert parameters(run) == parameters(undisturbed)


@pytest.mark.slow
def test_a_finished_run_trains_on_while_the_clock_jumps(
    root: Path, undisturbed: Path, start: Callable[..., Program]
) -> None:
    """With more steps, and other settings that do not change its results; the clock jumps all the time."""
    run, clock = root / "longer", root / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(JUMPING)
    jumping = {"PYTHONPATH": f"{clock}:{os.environ.get('PYTHONPATH', '')}"}
    start([*rl(root, "longer"), "train.steps=2", "train.keep_checkpoints=1"], **jumping).finish()
    assert len(list(clock.glob("jumps-*"))) >= 5  # torchrun, two ranks, at least two workers
    assert (run / "result.json").is_file() and not (run / "history.jsonl").exists()
    start([*rl(root, "longer"), "rollout.workers=2", "rollout.deadline=800"], **jumping).finish()
    assert_same(run, undisturbed)
    changes = [line for line in lines(run / "history.jsonl") if "setting" in line]
    changed = [(line["step"], line["setting"], line["before"], line["after"]) for line in changes]
    assert changed == [
        (2, "rollout.deadline", 900.0, 800.0),
        (2, "rollout.workers", 1, 2),
        (2, "train.keep_checkpoints", 1, 2),
        (2, "train.steps", 2, 3),
    ]
    done = start([*rl(root, "longer"), "rollout.workers=2", "rollout.deadline=800"])
    done.finish()
    assert "all 3 steps are done; raise train.steps to train on" in done.log.read_text()


@pytest.mark.slow
def test_training_whose_parts_are_killed(root: Path, undisturbed: Path, start: Callable[..., Program]) -> None:
    """Killed workers and servers are restarted, and their work is repeated; a killed rank ends the job."""
    run, temporary = root / "killed", tempfile.mkdtemp(dir="/tmp")
    parts = start(rl(root, "killed"), TMPDIR=temporary)
    parts.when(lambda: steps_done(run) == 1)
    time.sleep(0.5)  # the weights are published, the next step is sampled
    (server,) = (p for p in parts.processes() if "--weight-version" in p.cmdline() and os.getsid(p.pid) == p.pid)
    for process in (*workers(run, "conversation-0"), *workers(run, "reward-0"), server):
        process.kill()
    parts.when(lambda: steps_done(run) == 2)
    counted = [(line["servers/lost"], line["servers/back"]) for line in lines(run / "metrics.jsonl")[:2]]
    assert counted == [(0, 0), (1, 1)]
    assert len(list(run.glob("stacks/conversation-0-*.txt"))) == len(list(run.glob("stacks/reward-0-*.txt"))) == 2
    console = parts.log.read_text()
    assert "engine: SGLang server 0 is taken out of use and restarted: " in console
    assert "engine: SGLang server 0 is back (start 2)" in console
    (rank,) = (
        p for p in parts.processes() if p.environ().get("RANK") == "1" and "megatron_collab.train" in p.cmdline()
    )
    rank.kill()
    assert parts.wait() != 0
    assert parts.gone() == []

    in_the_update = start(rl(root, "killed"), TMPDIR=temporary)
    in_the_update.when(lambda: any(line["step"] == 2 for line in transcript_rows(run)))
    kill(in_the_update)
    in_the_save = start(rl(root, "killed"), TMPDIR=temporary)
    in_the_save.when(lambda: any(run.glob("checkpoints/step_3*")))
    kill(in_the_save)
    start(rl(root, "killed"), TMPDIR=temporary).finish()
    assert_same(run, undisturbed)
    os.rmdir(temporary)  # the killed programs left nothing in it


@pytest.mark.slow
def test_a_preemption_notice(root: Path, undisturbed: Path, start: Callable[..., Program]) -> None:
    """SIGUSR1 after a step was trained and some groups of the next were finished: the resumed run has both.

    No step before the last saves a checkpoint here, so the signal does. tools/bench/preemption.py sends it at any time.
    """
    run = root / "preempted"
    arguments = [*rl(root, "preempted"), "train.checkpoint_every=3"]
    journaled: list[JournalEntry] = []
    while not journaled:  # if all groups finished at once, the step may have been trained meanwhile
        program = start(arguments)
        program.when(lambda: steps_done(run) >= 1)
        journal, deadline = run / "journal" / f"step_{steps_done(run)}.groups", time.monotonic() + 120
        while not (journal.exists() and list(entries(journal))):
            assert time.monotonic() < deadline and program.process.poll() is None, program.log.read_text()[-3000:]
        program.process.send_signal(PREEMPTION)
        assert program.wait() == EXIT_PREEMPTED
        assert program.gone() == []
        learned = steps_done(run)
        assert (run / "checkpoints" / "latest").read_text() == f"step_{learned}"
        assert learned < 3, "the signal came too late each time"
        journaled = list(entries(journal)) if journal.exists() else []
    start(arguments).finish()
    assert lines(run / "metrics.jsonl")[learned]["count/from_journal"] == len(journaled)
    assert transcript_rows(run) == transcript_rows(undisturbed)
    assert_same(run, undisturbed)


@pytest.mark.slow
def test_pipeline_parallel_trains_the_same_and_ctrl_c_leaves_no_process_behind(
    root: Path, undisturbed: Path, start: Callable[..., Program]
) -> None:
    """Two ranks as PP2: same samples, same update as TP2."""
    run = root / "pp2"
    program = start([*rl(root, "pp2"), "parallel.tp=1", "parallel.pp=2"])
    program.when(lambda: steps_done(run) >= 2)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.wait() != 0
    assert program.gone() == []
    for line, expected in zip(lines(run / "metrics.jsonl")[:2], lines(undisturbed / "metrics.jsonl")[:2], strict=True):
        assert line["mismatch/max_abs"] <= 1e-4
        assert line["reward"] == expected["reward"]
        assert line["turn_tokens"] == expected["turn_tokens"]
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


Nodes = tuple[str, psutil.Process, dict[str, str]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two Ray nodes, each with its own raylet: the address of the first, the process of the second, their secret."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONUNBUFFERED": "1"}
    address = f"127.0.0.1:{free_port()}"
    folder = ScratchFolder()
    head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false", f"--system-config={QUICK}"]
    head.append(f"--temp-dir={folder.path}")
    started = []
    try:
        for number, options in enumerate((head, [f"--address={address}"])):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus=1", "--block"]
            with (tmp_path / f"node{number}.log").open("w") as log:
                process = subprocess.Popen(
                    [*command, "--disable-usage-stats"], env=os.environ | secret, stdout=log, stderr=log
                )
            started.append(psutil.Process(process.pid))
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in (tmp_path / f"node{number}.log").read_text():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield address, started[1], secret
    finally:
        family = [process for node in started if node.is_running() for process in (*node.children(True), node)]
        for process in family:
            with suppress(psutil.NoSuchProcess):  # the end of one may end others
                process.kill()
        folder.remove()


@pytest.mark.slow
def test_a_ray_node_that_is_killed(root: Path, undisturbed: Path, nodes: Nodes, start: Callable[..., Program]) -> None:
    """Its workers are restarted on the other node, and their work is repeated."""
    run, (address, node, secret) = root / "node", nodes
    program = start([*rl(root, "node"), "rollout.workers=2", "reward.workers=2"], RAY_ADDRESS=address, **secret)
    program.when(lambda: steps_done(run) == 1)
    node_processes = node.children(recursive=True)
    assert [worker for name in ("conversation", "reward") for worker in workers(run, name) if worker in node_processes]
    time.sleep(0.5)  # the weights are published, the next step is sampled
    for process in node_processes:
        process.kill()
    program.finish()
    assert_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "servers", "addresses"),
    [
        ("one each", ["rollout.server.replicas=2"], ["10.77.0.1", "10.77.0.2"]),
        ("one over both", ["rollout.server.tp=2", "rollout.server.nnodes=2", "publish.verify=1"], ["10.77.0.1"]),
    ],
)
def test_two_hosts_train_what_one_trains(
    name: str, servers: list[str], addresses: list[str], root: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Each host has its own network, a torchrun agent, a Ray node and an SGLang server or a part of the only one.

    Seeds decide the samples, whichever server draws them, and the two ranks compute the same.
    """
    console = train_on_two_hosts(tmp_path, [*rl(root, name), *servers])
    ready = next(line for line in console.splitlines() if line.startswith("engine: ready"))
    assert re.findall(r"http://([\d.]+):", ready) == addresses
    assert len(list((root / name).glob("sglang-*.log"))) == 2, "one per host"
    assert_same(root / name, undisturbed)
    assert parameters(undisturbed) != (root / "world" / "model" / "model.safetensors").read_bytes()
