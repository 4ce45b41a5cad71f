"""The session of a run on this rank: hang detection, resume, run folder, checkpoints, and the save on a stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from megatron_collab import environments
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.checkpoint.hf import save_hf
from megatron_collab.checkpoint.storage import LATEST
from megatron_collab.config import Config, PlayConfig, run_record
from megatron_collab.data.datasets import SupervisedData
from megatron_collab.launch.inputs import record_inputs
from megatron_collab.observability.run import Run
from megatron_collab.runtime import hang_detector, hub, process, rank0, screen, signals
from megatron_collab.runtime.process import Preempted, RunStopped, imports_done
from megatron_collab.runtime.redact import redact
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.trainer import PolicyTrainer

logger = logging.getLogger(__name__)


class Session(ExitStack):
    """Context of a run on every rank, entered after the imports; closes the parts that it entered in reverse order.

    `folder`: of the checkpoints.
    """

    enter = ExitStack.enter_context

    def __init__(self, config: PlayConfig) -> None:
        super().__init__()
        self.config = config
        self.folder = Path(config.run.dir) / "checkpoints"

    def __enter__(self) -> Self:
        imports_done()
        if process.global_rank() == 0:
            self.enter(screen.stages(lambda: process.stage))
        self.enter(hang_detector.watch(self.config.launch.timeout, self.folder.parent))
        self.enter(parallel.leader_ends_first(self.config.launch.timeout, self.explain))
        return self

    def explain(self, error: RunStopped) -> None:
        """Print in one line why the run ends."""
        reason = str(error)
        if isinstance(error, Preempted):
            latest = self.folder / LATEST
            saved = latest.read_text().strip() if latest.is_file() else "no step"
            assert signals.notice is not None
            seconds = f"{time.monotonic() - signals.notice.received:.1f} s after the notice"
            reason += f"; saved {saved} and all groups finished since, {seconds}"
        logger.error(redact(reason))


class TrainingRun:
    """A training from its newest checkpoint on: `start` is the step to continue from, 0 in a new run.

    `run` has its folder. The session closes it and `checkpoints`.
    """

    def __init__(self, config: Config, session: Session, trainer: PolicyTrainer) -> None:
        """Load the newest checkpoint into `trainer`; collective."""
        self.config = config
        self.checkpoints = session.enter(
            Checkpoints(session.folder, config.train.keep_checkpoints, config.launch.timeout)
        )
        self.start, self._resumed = self.checkpoints.load_latest(trainer.checkpointed) or (0, dict[str, Any]())
        trainer.step = self.start
        names = environments.result_names(config.data)
        self.run = session.enter(Run(run_record(config), config.train, self.start, self._resumed, names))
        if self.run.leader:
            record_inputs(self.run.folder)

    def state(self, part: str) -> dict[str, Any]:
        """The state of a part of the run from the checkpoint that was resumed; {} if there is none."""
        return self._resumed.get(part, {})

    @contextmanager
    def save_if_stopped(self, step: int, trainer: PolicyTrainer, **parts: Mapping[str, Any]) -> Iterator[None]:
        """If the run is stopped inside the block, save the training state before `step`, with the parts' states."""
        try:
            rank0.check_preemption()  # also SIGINT, which takes effect after a step
            signals.in_step(True)
            yield
        except RunStopped:
            if step > self.start and not self.config.train.checkpoint_due(step):  # not saved yet
                self.save(step, trainer, **parts)
            raise
        finally:
            signals.in_step(False)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step; collective, so that all ranks stop on a full disk."""
        rank0.shared(lambda: self.run.record(step, metrics))

    def validate(self, step: int, trainer: PolicyTrainer, data: SupervisedData) -> bool:
        """Record the loss on the sets of data.eval that are due at `step`; returns whether any were. Collective."""
        names: list[str] = []
        for eval_set in data.eval_sets:
            if due := rank0.shared(partial(self.run.evaluation_due, eval_set.name, step)):
                metrics = trainer.validate(data.validation(eval_set))
                rank0.shared(partial(self.run.evaluation, due, eval_set.name, step, metrics))
                names.append(due)
        return bool(names)

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` finished steps."""
        return self.config.train.checkpoint_due(step) or step == self.config.train.steps

    def save(self, step: int, trainer: PolicyTrainer, **parts: Mapping[str, Any]) -> None:
        """Start to write the checkpoint of `step` finished steps; collective."""
        self.checkpoints.save(step, trainer.checkpointed, {**self.run.state(), **parts})

    def finish(self, trainer: PolicyTrainer) -> None:
        """Write the trained model as a Hugging Face folder, the result and the report; collective."""
        save_hf(trainer.chunks, Path(self.config.run.dir) / "hf", hub.folder(self.config.model.path))
        self.run.finish()
