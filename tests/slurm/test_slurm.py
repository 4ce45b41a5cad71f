"""The scripts for Slurm on a real Slurm of two nodes, which share this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_STOPPED

pytestmark = [pytest.mark.processes, pytest.mark.slurm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT.parent / "shared" / "slurm" / "local_cluster.sh"
NODES = ["launch.interface=lo", "launch.device=cpu", "launch.nproc_per_node=1", "parallel.tp=1"]
SFT = ["experiment=booking_sft", *NODES, "optim.warmup_steps=10"]
RL = [
    "experiment=booking",
    *NODES,
    "train.prompts_per_step=4",
    "train.rollouts_per_prompt=4",
    "rollout.futures=2",
    "rollout.workers=2",
    "rollout.server.replicas=2",
    "train.eval_tasks=8",
    "train.checkpoint_every=1",
]


@pytest.fixture(scope="session", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The existing cluster, otherwise a temporary one."""
    if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        yield
        return
    if not CLUSTER.is_file():
        pytest.skip(f"{CLUSTER}: not on this machine, nor a Slurm cluster")
    state = tmp_path_factory.mktemp("slurm")
    subprocess.run(["bash", CLUSTER, "start", state], check=True, timeout=600)
    yield
    subprocess.run(["bash", CLUSTER, "stop", state], check=True, timeout=60)


class Job:
    """A submitted script, and its folder."""

    def __init__(self, run: Path, *overrides: str, **variables: str) -> None:
        self.run, self.output = run, run.with_suffix(".out")
        options = ["--parsable", "--nodes=2", "--gpus-per-node=0", f"--output={self.output}"]
        environment = {**os.environ, "VENV": str(Path(sys.executable).parents[1]), "PYTHONPATH": str(ROOT), **variables}
        self.id = subprocess.run(
            ["sbatch", *options, "slurm/train_8b.sh", *overrides, f"run.dir={run}"],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def field(self, name: str) -> str:
        shown = subprocess.run(["scontrol", "show", "job", self.id], check=True, capture_output=True, text=True).stdout
        match = re.search(rf"\b{name}=(\S+)", shown)
        assert match, shown
        return match[1]

    def when(self, holds: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert not self.ended(), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def ended(self) -> bool:
        return self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    def code(self, seconds: float = 900) -> int:
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + seconds
        while not self.ended():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)
        code, by_signal = self.field("ExitCode").split(":")
        assert by_signal == "0", self.log()
        return int(code)

    def log(self) -> str:
        logs = [self.output, *sorted(self.run.glob("logs/attempt-*/*.log"))]
        return "\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in logs if log.exists())

    def processes(self) -> list[psutil.Process]:
        members = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") == self.id and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return members

    def token(self) -> str:
        """Ray's token, from a process of the job that has it."""
        tokens: set[str] = set()

        def look() -> bool:
            for process in self.processes():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    tokens.update(filter(None, [process.environ().get("RAY_AUTH_TOKEN")]))
            return bool(tokens)

        self.when(look)
        (token,) = tokens
        return token

    def nodes_of_servers(self) -> set[str]:
        """Nodes that run SGLang servers; processes inherit the node's name from Slurm, through Ray on the second."""
        nodes = set()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "megatron_collab.inference.cpu.serve" in process.cmdline():
                    nodes.add(process.environ()["SLURMD_NODENAME"])
        return nodes

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def cancel(self) -> None:
        subprocess.run(["scancel", self.id], check=True, capture_output=True)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def submitter(name: str, *overrides: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path / name, *overrides, f"data.dir={tmp_path}/world", **variables))
        return jobs[-1]

    yield submitter
    for job in jobs:
        job.cancel()


def check_nothing_left(job: Job, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while job.processes():
        assert time.monotonic() < deadline, [" ".join(process.cmdline()[:6]) for process in job.processes()]
        time.sleep(0.2)
    assert not list(Path("/tmp").glob(f"ray-{job.id}-*"))


def check_logs(job: Job, attempt: int) -> None:
    folder = job.run / "logs" / f"attempt-{attempt}"
    for name in ("ray-0.log", "ray-1.log", "ranks.log", "ranks-0.log", "ranks-1.log"):
        assert (folder / name).is_file(), name
    for node in (0, 1):
        assert len(list(folder.glob(f"ranks-{node}/*/attempt_0/0/stderr.log"))) == 1
        assert (folder / f"ray-{node}" / "raylet.out").is_file()


def check_nowhere(secret: str, job: Job) -> None:
    for file in [job.output, *job.run.rglob("*")]:
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


def test_a_supervised_run_on_two_nodes(submit: Callable[..., Job]) -> None:
    job = submit("sft", *SFT, "train.steps=20")
    token = job.token()
    assert job.code() == 0, job.log()
    assert job.steps() == 20 and (job.run / "result.json").is_file()
    config = json.loads((job.run / "config.json").read_text())
    assert (config["launch"]["nodes"], config["run"]["dir"]) == (2, str(job.run))
    assert "Ray has 2 of 2 nodes" in job.output.read_text()
    check_logs(job, 0)
    check_nowhere(token, job)
    check_nothing_left(job)


def test_bad_input_before_anything_is_started(submit: Callable[..., Job]) -> None:
    job = submit("refused", *SFT, "parallel.pq=2")
    assert job.code() == EXIT_BAD_INPUT
    assert "parallel.pq" in job.output.read_text() and not job.run.exists()


def test_bad_input_that_the_ranks_find(submit: Callable[..., Job]) -> None:
    """The checks that depend on the machine run on the nodes of the ranks."""
    job = submit("refused", *SFT, "launch.device=cuda")
    assert job.code() == EXIT_BAD_INPUT, job.log()
    assert "launch.device=cuda" in job.output.read_text()
    check_nothing_left(job)


@pytest.mark.parametrize("victim", ["rank", "raylet"])
def test_a_process_that_dies_ends_the_job(submit: Callable[..., Job], victim: str) -> None:
    job = submit("killed", *SFT, "train.steps=1000000", "train.checkpoint_every=1000000")
    job.when(lambda: job.steps() >= 1)

    def is_victim(process: psutil.Process) -> bool:
        if victim == "raylet":
            return process.name() == "raylet"
        return process.environ().get("RANK") == "1" and "megatron_collab.train" in " ".join(process.cmdline())

    doomed = next(process for process in job.processes() if is_victim(process))
    os.kill(doomed.pid, signal.SIGKILL)
    assert job.code() != 0
    output = job.output.read_text()
    assert ("Ray on n" if victim == "raylet" else "the ranks ended with") in output
    check_nothing_left(job)


def test_reinforcement_learning_on_two_nodes(submit: Callable[..., Job]) -> None:
    supervised = submit("sft", *SFT, "train.steps=60")
    assert supervised.code() == 0, supervised.log()
    job = submit("rl", *RL, "train.steps=2", f"model.path={supervised.run}/hf")
    token = job.token()
    job.when(lambda: job.nodes_of_servers() == {"n0", "n1"})
    assert job.code() == 0, job.log()
    assert job.steps() == 2 and (job.run / "result.json").is_file()
    check_logs(job, 0)
    check_nowhere(token, job)
    assert {log.name for log in job.run.glob("sglang-*.log")} == {"sglang-0.log", "sglang-1.log"}
    check_nothing_left(job)


def test_a_run_that_stops_ends_with_its_code(submit: Callable[..., Job]) -> None:
    """Unreachable users: too many rollouts have no reward."""
    supervised = submit("sft", *SFT, "train.steps=2", "optim.warmup_steps=0")
    assert supervised.code() == 0, supervised.log()
    users = ["user.name=llm", "user.model=hosted_vllm/nobody", "user.api_base=http://127.0.0.1:9/v1", "user.deadline=5"]
    job = submit("stopped", *RL, "train.steps=2", f"model.path={supervised.run}/hf", *users)
    assert job.code() == EXIT_STOPPED, job.log()
    check_nothing_left(job)


def test_a_preemption_notice_requeues_a_job_which_goes_on(submit: Callable[..., Job]) -> None:
    supervised = submit("sft", *SFT, "train.steps=60")
    assert supervised.code() == 0, supervised.log()
    job = submit("preempted", *RL, "train.steps=3", f"model.path={supervised.run}/hf")
    job.when(lambda: job.steps() == 1)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], check=True)
    job.when(lambda: job.field("Restarts") == "1" and job.field("JobState") == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=True)  # otherwise in two minutes
    assert job.code() == 0, job.log()
    assert job.steps() == 3 and "goes back into the queue" in job.output.read_text()
    for attempt in (0, 1):
        check_logs(job, attempt)
    check_nothing_left(job)


def test_a_job_that_does_not_save_in_time_is_requeued_all_the_same(submit: Callable[..., Job]) -> None:
    job = submit("slow", *SFT, "train.steps=1000000", "train.checkpoint_every=1000000", SAVE_SECONDS="0")
    job.when(lambda: job.steps() >= 1)
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], check=True)
    job.when(lambda: job.field("Restarts") == "1" and job.field("JobState") == "PENDING")
    assert "not saved 0 s after USR1 (SAVE_SECONDS)" in job.output.read_text()
    check_logs(job, 0)
    check_nothing_left(job)


def test_a_preemption_notice_before_there_are_ranks(submit: Callable[..., Job]) -> None:
    job = submit("early", *SFT, "train.steps=2", "optim.warmup_steps=0")
    job.when(lambda: (job.run / "logs/attempt-0/ray-0.log").exists())
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.id], check=True)
    job.when(lambda: job.field("Restarts") == "1" and job.field("JobState") == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job.id}", "StartTime=now"], check=True)  # otherwise in two minutes
    assert job.code() == 0, job.log()
    assert not (job.run / "logs/attempt-0/ranks.log").exists()
    check_logs(job, 1)
    check_nothing_left(job)
