"""Parts of the real program are killed, and its clock jumps: it ends with the parameters of an undisturbed run."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_booking import Program, lines, parameters, steps_done
from tests.helpers import free_port

pytestmark = pytest.mark.slow

RL = ["experiment=booking", "train.steps=3", "train.checkpoint_every=1", "train.prompts_per_step=4"]
RL += ["train.rollouts_per_prompt=4", "rollout.futures=2", "train.eval_tasks=0"]
RL += ["reward.malformed=null", "reward.weights.token_amount=-0.01"]  # the random model ends no turn by itself
SAME = ("reward", "turn_tokens", "loss", "grad_norm", "missing", "ending/error")
# On PYTHONPATH: every Python process sees the wall clock jump by a day, forth and back, every second, and says so.
JUMPING = """
import os, time
real, real_ns = time.time, time.time_ns
ahead = lambda: int(time.monotonic()) % 2 * 86400
time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + ahead() * 10**9
open(f"{os.path.dirname(__file__)}/jumps-{os.getpid()}", "w").close()
"""
# Ray asks a node five times, three seconds apart, before it is dead; here less often.
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


def same(run: Path, undisturbed: Path) -> None:
    for ours, theirs in zip(lines(run / "metrics.jsonl"), lines(undisturbed / "metrics.jsonl"), strict=True):
        assert {name: ours.get(name) for name in SAME} == {name: theirs.get(name) for name in SAME}
    assert parameters(run) == parameters(undisturbed)


def test_workers_and_a_rank_that_are_killed(root: Path, undisturbed: Path, start: Callable[..., Program]) -> None:
    """Ray starts the workers again, and what they were doing is done again; a rank ends the job."""
    run = root / "killed"
    program = start(rl(root, "killed"))
    program.when(lambda: steps_done(run) == 1)
    time.sleep(0.5)  # the weights are published, the next step is sampled
    for name in ("conversation-0", "reward-0"):
        (worker,) = workers(run, name)
        worker.kill()
    program.when(lambda: steps_done(run) == 2)
    assert len(list(run.glob("stacks/conversation-0-*.txt"))) == len(list(run.glob("stacks/reward-0-*.txt"))) == 2
    (rank,) = (p for p in program.left() if p.environ().get("RANK") == "1" and "megatron_collab.train" in p.cmdline())
    began = time.monotonic()
    rank.kill()
    assert program.wait() != 0
    assert program.gone() == []
    print(f"ended {time.monotonic() - began:.1f} s after its rank")
    start(rl(root, "killed")).finish()
    same(run, undisturbed)


def test_a_clock_that_jumps_changes_nothing(root: Path, undisturbed: Path, start: Callable[..., Program]) -> None:
    (root / "clock").mkdir()
    (root / "clock" / "sitecustomize.py").write_text(JUMPING)
    start(rl(root, "jumps"), PYTHONPATH=f"{root}/clock:{os.environ.get('PYTHONPATH', '')}").finish()
    same(root / "jumps", undisturbed)
    assert len(list((root / "clock").glob("jumps-*"))) >= 5  # torchrun, two ranks, at least two workers


Nodes = tuple[str, psutil.Process, dict[str, str]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two Ray nodes, each a raylet of its own: the address of the first, the process of the second, their secret."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONUNBUFFERED": "1"}
    address = f"127.0.0.1:{free_port()}"
    head = ["--head", f"--port={address.split(':')[1]}", "--include-dashboard=false", f"--system-config={QUICK}"]
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
            with suppress(psutil.NoSuchProcess):  # they end each other
                process.kill()


def test_a_ray_node_that_is_killed(root: Path, undisturbed: Path, nodes: Nodes, start: Callable[..., Program]) -> None:
    """Its workers are started again on the other node, and what they were doing is done again."""
    run, (address, node, secret) = root / "node", nodes
    program = start([*rl(root, "node"), "rollout.workers=2", "reward.workers=2"], RAY_ADDRESS=address, **secret)
    program.when(lambda: steps_done(run) == 1)
    there = node.children(recursive=True)
    assert [worker for name in ("conversation", "reward") for worker in workers(run, name) if worker in there]
    time.sleep(0.5)  # the weights are published, the next step is sampled
    for process in there:
        process.kill()
    program.finish()
    same(run, undisturbed)
