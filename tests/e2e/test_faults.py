"""Parts of the real program are killed, and its clock jumps: it ends with the parameters of an undisturbed run."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.e2e.test_booking import Program, lines, parameters, steps_done

pytestmark = pytest.mark.slow

SFT = ["experiment=booking_sft", "train.steps=30", "optim.warmup_steps=5"]
RL = ["experiment=booking", "train.steps=3", "train.checkpoint_every=1", "train.prompts_per_step=4"]
RL += ["train.rollouts_per_prompt=4", "rollout.futures=2", "train.eval_tasks=0"]
SAME = ("reward", "turn_tokens", "loss", "grad_norm", "missing", "ending/error")
# On PYTHONPATH: every Python process sees the wall clock jump by a day, forth and back, every second.
JUMPING = """
import time
real, real_ns = time.time, time.time_ns
ahead = lambda: int(time.monotonic()) % 2 * 86400
time.time = lambda: real() + ahead()
time.time_ns = lambda: real_ns() + ahead() * 10**9
"""
# Ray asks a node five times, three seconds apart, before it is dead; here less often.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def rl(root: Path, name: str) -> list[str]:
    return [*RL, f"run.dir={root}/{name}", f"data.dir={root}/world", f"model.path={root}/sft/hf"]


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> Path:
    Program([*SFT, f"run.dir={root}/sft", f"data.dir={root}/world"], root / "sft.log").finish()
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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two Ray nodes, each a raylet of its own."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    options = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_a_ray_node_that_is_killed(
    root: Path, undisturbed: Path, cluster: Cluster, start: Callable[..., Program]
) -> None:
    """Its workers are started again on the other node, and what they were doing is done again."""
    run, node = root / "node", cluster.add_node(num_cpus=1)
    program = start([*rl(root, "node"), "rollout.workers=2", "reward.workers=2"], RAY_ADDRESS=cluster.address)
    program.when(lambda: steps_done(run) == 1)
    (raylet,) = (info.process for info in node.all_processes["raylet"])
    there = {process.pid for process in psutil.Process(raylet.pid).children(recursive=True)}
    lost = [name for name in ("conversation", "reward") for worker in workers(run, name) if worker.pid in there]
    assert lost, "no worker was on that node"
    os.kill(raylet.pid, signal.SIGKILL)
    program.finish()
    same(run, undisturbed)
