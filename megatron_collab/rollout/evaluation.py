"""Evaluations: plays the sets of data.eval on the run's workers, between steps or without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from megatron_collab.data.datasets import SurveyedSources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec
from megatron_collab.observability.folder import RunFolder
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.scheduler import Flight, GroupRequest, Slot, wait
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.summary import evaluation_summary, refuse_incomplete
from megatron_collab.rollout.task_requirements import applicable_metrics, task_requirements
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Task


class Evaluator:
    """Plays the sets that are due and records their scores; methods with a `step` parameter are collective.

    A conversation's seeds depend on the set, the moment of the evaluation and the task. Finished groups are in the
    journal, so an interrupted evaluation resumes.
    """

    def __init__(
        self,
        play: PlaySpec,
        data: DataSpec,
        run: RunFolder,
        restore: Callable[[], None],
    ) -> None:
        """`restore`: if no server is available, waits until servers have the weights again; collective."""
        self.play, self.data, self.run, self._restore = play, data, run, restore
        self.sets = data.eval_sets
        self._tasks: dict[EvaluationSet, list[Task]] = {}
        self._flight: Flight | None = None

    def lead(self, servers: Servers, journal: Journal, background: Flight | None = None) -> None:
        """Set the workers, on rank 0 and before other methods. `background`: training groups that stay in flight."""
        assert servers.workers and servers.pool
        self._workers, self._pool = servers.workers.conversations, servers.pool
        self._limiter = servers.workers.limiter
        self._lost_all, self._journal, self._background = servers.lost_all, journal, background

    @contextmanager
    def standalone(self, servers: Servers, step: int) -> Iterator[None]:
        """On rank 0, in a run without training: `lead` with a separate journal for the weights of `step`."""
        digests = WeightDigests(keep=1)
        digests.begin(step)
        journal = Journal(self.play.run_dir / "journal", digests)
        self.lead(servers, journal)
        try:
            yield
        except RunStopped:
            self.save()
            if servers.workers:
                servers.workers.stop()
            raise
        if self.run.complete:  # if not, the groups that lack no score serve the next start
            journal.forget()

    def due(self, step: int) -> bool:
        """Whether a set is due at `step`."""
        is_due: bool = from_leader(lambda: any(self.run.evaluation_due(eval_set.name, step) for eval_set in self.sets))
        return is_due

    def evaluate(self, step: int) -> None:
        """Play the sets that are due at `step`, one after the other, and record each."""
        for eval_set in self.sets:
            self._evaluate(eval_set, step)

    def _evaluate(self, eval_set: EvaluationSet, step: int) -> None:
        name: str | None = from_leader(lambda: self.run.evaluation_due(eval_set.name, step))
        if name:
            beat(f"evaluation {name}")
            from_leader(lambda: self._begin(eval_set, name, step))
            wait(self._flight, self._restore)
            from_leader(lambda: self._record(eval_set, name, step))

    def save(self) -> None:
        """On rank 0, when the run is stopped: write finished groups to the journal."""
        if self._flight:
            self._flight.collect(0.0)

    def _begin(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        tasks, play = self._prepared(eval_set), self.play.for_set(eval_set)
        self._flight = Flight(play, self._workers, self._journal, self._lost_all, self._background)
        stream = f"eval-{name.replace('/', '-')}"
        for index, task in enumerate(tasks):
            self._flight.begin(GroupRequest(Slot(step, 0, index), f"{stream}-{index}", task, eval_set))
        self._flight.wait_for(len(tasks), f"evaluation {name}")

    def _prepared(self, eval_set: EvaluationSet) -> list[Task]:
        """The tasks of a set; clears an outage that happened while no group was in flight."""
        if not self._background:  # an outage while nothing was in flight has no effect
            self._pool.recover()
        if not self._tasks:
            with keys.in_environment():
                tools = self.play.tools.schemas()
            requirements, renders = partial(task_requirements, self.play), self.play.assistant is None
            sources = SurveyedSources[Task](self.data, "data.eval", self.sets, tools, requirements, renders=renders)
            self._tasks = {entry: tasks[: entry.tasks] for entry, tasks in zip(self.sets, sources.sets, strict=True)}
        return self._tasks[eval_set]

    def _record(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        assert self._flight is not None
        groups = list(self._flight.take().values())
        self._flight = None
        refuse_incomplete(name, groups, self.play.reward.max_missing)
        metrics = evaluation_summary(groups, applicable_metrics(self.play.reward.metrics))
        self.run.evaluation(name, eval_set.name, step, metrics, groups)
