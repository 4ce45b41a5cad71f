"""One start of a run on this rank: hang detection, resume, the run folder, checkpoints, the save when it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from megatron_collab import environments
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.checkpoint.hf import save_hf
from megatron_collab.checkpoint.storage import LATEST
from megatron_collab.config import Config
from megatron_collab.observability.run import Run
from megatron_collab.runtime import hang_detector, rank0, startup
from megatron_collab.runtime.process import Preempted, RunStopped, seconds_since_notice
from megatron_collab.runtime.redact import redact
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer

_Entered = TypeVar("_Entered")


class Session:
    """Entered by every rank once it has imported all it needs; what is given to `enter` ends with it, the last first.

    `run` (the folder) and `checkpoints` are there once `resume` has been called.
    """

    run: Run
    checkpoints: Checkpoints

    def __init__(self, config: Config) -> None:
        self.config = config
        self._folder = Path(config.run.dir) / "checkpoints"
        self._stack = ExitStack()
        self._start = 0
        self._found: dict[str, Any] = {}

    def __enter__(self) -> Session:
        startup.settled()
        self.enter(hang_detector.armed(self.config))
        self.enter(parallel.leader_ends_first(self.config.launch.timeout, self.explain))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def enter(self, part: AbstractContextManager[_Entered]) -> _Entered:
        """Enter a part of the run, to be left with the session."""
        return self._stack.enter_context(part)

    def resume(self, trainer: PolicyTrainer) -> int:
        """The step to go on with, `trainer` being what the newest checkpoint holds; 0 in a new run. Collective."""
        train, timeout = self.config.train, self.config.launch.timeout
        self.checkpoints = self.enter(Checkpoints(self._folder, train.keep_checkpoints, timeout))
        self._start, self._found = self.checkpoints.load_latest(trainer) or (0, {})
        names = environments.result_names(self.config)
        self.run = self.enter(Run(self.config, self._start, self._found, names))
        return self._start

    def state(self, part: str) -> dict[str, Any]:
        """What the checkpoint that was resumed from keeps of a part of the run; {} where there is none."""
        return self._found.get(part, {})

    @contextmanager
    def saved_when_stopped(self, step: int, trainer: PolicyTrainer, **parts: Mapping[str, Any]) -> Iterator[None]:
        """Where the run is stopped within it, what was learned before `step` is saved, with the parts' states."""
        try:
            yield
        except RunStopped:
            if step > self._start and step % self.config.train.checkpoint_every:  # not saved yet
                self.save(step, trainer, **parts)
            raise

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down a finished step; collective, so that all ranks learn of a full disk."""
        rank0.shared(lambda: self.run.record(step, metrics))

    def save_due(self, step: int) -> bool:
        """Whether the checkpoint of `step` finished steps is to be written."""
        return step % self.config.train.checkpoint_every == 0 or step == self.config.train.steps

    def save(self, step: int, trainer: PolicyTrainer, **parts: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint of `step` finished steps; collective."""
        self.checkpoints.save(step, trainer, {**self.run.state(), **parts})

    def finish(self, trainer: PolicyTrainer) -> None:
        """Write the trained model as a Hugging Face folder, the result and the report; collective."""
        save_hf(trainer.chunks, Path(self.config.run.dir) / "hf", Path(self.config.model.path), trainer.shape)
        self.run.finish()

    def explain(self, error: RunStopped) -> None:
        """Say in one line why the run ends."""
        why = str(error)
        if isinstance(error, Preempted):
            latest = self._folder / LATEST
            saved = latest.read_text().strip() if latest.is_file() else "no step"
            seconds = f"{seconds_since_notice():.1f} s after the notice"
            why += f"; {saved} and all groups that were finished since are saved, {seconds}"
        print(f"megatron-collab: {redact(why)}", file=sys.stderr, flush=True)
