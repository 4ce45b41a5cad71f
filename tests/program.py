"""Programs of the package as users start them, and the supervised run that several files' tests go on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_collab.runtime import files
from tests.helpers import listening
from tests.llm.endpoint import Endpoint

SFT = ["experiment=booking_sft", "train.steps=60", "train.checkpoint_every=20", "optim.warmup_steps=10"]
SFT += ["data.eval=${data.dir}/sft.jsonl", "train.eval_tasks=16", "train.eval_every=20", "train.keep_best=-eval/loss"]


class Program:
    """One start of the program in its own session, which finds all its processes by a mark in their environment.

    `within`: a command that changes its environment and then runs the rest of its arguments.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        module: str = "megatron_collab.train",
        defaults: str = "INT,HUP",
        within: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.mark = f"e2e-{os.getpid()}-{time.monotonic_ns()}"
        self.log = log
        self.descendants: list[psutil.Process] = []
        inherited = dict(os.environ)
        inherited.pop(files.COMPILE_CACHE[0], None)  # which this process has set: a program does so by itself
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                # Tests in the background inherit an ignored SIGINT, tests under nohup an ignored SIGHUP.
                ["env", f"--default-signal={defaults}", *within, sys.executable, "-m", module, *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, **environment, "MEGATRON_COLLAB_TEST": self.mark},
            )

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def finish(self, timeout: float = 600) -> None:
        """Wait for exit code 0."""
        assert self.wait(timeout) == 0, self.log.read_text()[-5000:]

    def when(self, holds: Callable[[], bool], timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            assert self.process.poll() is None, f"ended before the moment came:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"the moment never came:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.002)
        # Some of Ray's processes hide their environment, so record them while they still have their parents.
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def processes(self) -> list[psutil.Process]:
        """Living processes that were started by this program, directly or not."""
        living = []
        for process in {*psutil.process_iter(), *self.descendants}:
            try:
                ours = process in self.descendants or environment_of(process).get("MEGATRON_COLLAB_TEST") == self.mark
                if ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return living

    def values(self, variable: str) -> set[str]:
        """Values of the variable in the environments of its processes, except those of Ray that hide theirs."""
        return {value for process in self.processes() if (value := environment_of(process).get(variable))}

    def gone(self, timeout: float = 60) -> list[str]:
        """Wait until all its processes have ended; return those that still live after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return [" ".join(process.cmdline()[:6]) for process in self.processes()]

    def end(self) -> None:
        for process in self.processes():
            process.kill()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The process's environment; empty if it has ended or may not be read."""
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}


def lines(file: Path) -> list[dict]:
    """The complete lines of a file that may be being written."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def evaluation_of(endpoint: Endpoint, folder: Path, *more: str) -> list[str]:
    """Settings of a short evaluation in `folder` of a model behind an endpoint: with torchrun and Ray, no SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"prompt": "hi", "goal": "g", "user": "replay", "metadata": {"replay": ["go on"]}}
    (folder / "tasks.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    model = ["assistant.model=openai/m", f"assistant.api_base=http://127.0.0.1:{endpoint.port}/v1"]
    prices = ["llm.prices={openai/m: [0, 0]}", "reward.weights={token_amount: -1}", "launch.device=cpu"]
    workers = ["rollout.workers=1", "reward.workers=1"]
    return [f'run.dir="{folder}/run"', f'data.eval="{folder}/tasks.jsonl"', *model, *prices, *workers, *more]


def steps_done(run: Path) -> int:
    return len(lines(run / "metrics.jsonl"))


@dataclass(frozen=True)
class Supervised:
    """A finished supervised run of the booking world, and the addresses at which each process listened meanwhile."""

    root: Path  # has the run as sft, the world as world
    addresses: list[set[str]]

    @property
    def run(self) -> Path:
        return self.root / "sft"


def train_supervised(root: Path) -> Supervised:
    program = Program([*SFT, f"run.dir={root}/sft", f"data.dir={root}/world"], root / "sft.log")
    try:
        program.when(lambda: steps_done(root / "sft") >= 1)
        listeners = listening([psutil.Process(program.process.pid), *program.descendants])
        program.finish()
    finally:
        program.end()
    return Supervised(root, [{host for host, _ in sockets} for sockets in listeners.values()])
