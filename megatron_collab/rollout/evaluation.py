"""Evaluations: plays the sets of data.eval on the run's workers, between steps or without training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from megatron_collab.data.datasets import SurveyedSources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec
from megatron_collab.observability.folder import RunFolder
from megatron_collab.rollout.lead import Lead
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.scheduler import Flight, GroupRequest, Slot, wait
from megatron_collab.rollout.summary import evaluation_summary, refuse_incomplete
from megatron_collab.rollout.task_requirements import applicable_metrics, task_requirements
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Group, Task


class Evaluator:
    """Plays the sets that are due and records their scores; methods with a `step` parameter are collective.

    A conversation's seeds depend on the set, the moment of the evaluation and the task. Finished groups are in the
    journal, so an interrupted evaluation resumes. Groups that lack a score are played twice: an endpoint may be back,
    and between steps the weights change after the evaluation.
    """

    def __init__(
        self,
        play: PlaySpec,
        data: DataSpec,
        run: RunFolder,
        restore: Callable[[], None],
        lead: Lead | None,
        background: Flight | None = None,
    ) -> None:
        """`restore`: if no server is available, waits until servers have the weights again; collective.

        `lead`, `background`: on rank 0; training groups in `background` stay in flight.
        """
        self.play, self.data, self.run, self._restore = play, data, run, restore
        self.sets = data.eval_sets
        self._lead, self._background = lead, background
        self._tasks: dict[EvaluationSet, list[Task]] = {}
        self._flight: Flight | None = None
        self._played: dict[Slot, Group] = {}  # in the current evaluation, on rank 0
        if lead:
            run.record_metric_kinds(play.reward.opinions, play.reward.ground_truths)

    @property
    def _rank_0_lead(self) -> Lead:
        assert self._lead is not None
        return self._lead

    @contextmanager
    def standalone(self) -> Iterator[None]:
        """On rank 0, in a run without training: if the run is stopped, save and stop the workers."""
        try:
            yield
        except RunStopped:
            self.save()
            self._rank_0_lead.workers.stop()
            raise
        if self.run.complete:  # if not, the groups that lack no score serve the next start
            self._rank_0_lead.journal.forget()

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
            if from_leader(lambda: self._begin_again(eval_set, name, step)):
                wait(self._flight, self._restore)
            from_leader(lambda: self._record(eval_set, name, step))

    def save(self) -> None:
        """On rank 0, when the run is stopped: write finished groups to the journal."""
        if self._flight:
            self._flight.collect(0.0)

    def _begin(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        self._played = {}
        self._play(eval_set, name, {Slot(step, 0, index): task for index, task in enumerate(self._prepared(eval_set))})

    def _begin_again(self, eval_set: EvaluationSet, name: str, step: int) -> bool:
        """Begin once more the groups that lack a score; returns whether there are any.

        Raises RunStopped if too many lack one: the same command then plays them again, with the same weights.
        """
        self._take(name)
        tasks = self._prepared(eval_set)
        lacking = [slot for slot, group in self._played.items() if _failures(group)]
        if lacking:
            self._play(eval_set, name, {slot: tasks[slot.number] for slot in lacking})
        return bool(lacking)

    def _play(self, eval_set: EvaluationSet, name: str, tasks: Mapping[Slot, Task]) -> None:
        play, stream = self.play.for_set(eval_set), f"eval-{name.replace('/', '-')}"
        self._flight = self._rank_0_lead.flight(play, self._background)
        for slot, task in tasks.items():
            self._flight.begin(GroupRequest(slot, f"{stream}-{slot.number}", task, eval_set))
        self._flight.wait_for(len(tasks), f"evaluation {name}{', once more' if self._played else ''}")

    def _take(self, name: str) -> None:
        """Keep the finished groups; of one that was played twice, the one with fewer failures.

        Raises RunStopped if too many lack a score.
        """
        if self._flight is not None:
            for slot, group in self._flight.take().items():
                self._played[slot] = min(self._played.get(slot, group), group, key=_failures)
            self._flight = None
        refuse_incomplete(name, list(self._played.values()), self.play.reward.max_missing)

    def _prepared(self, eval_set: EvaluationSet) -> list[Task]:
        """The tasks of a set; clears an outage that happened while no group was in flight."""
        if not self._background:  # an outage while nothing was in flight has no effect
            self._rank_0_lead.pool.recover()
        if not self._tasks:
            with keys.in_environment():
                tools = self.play.tools.schemas()
            requirements, renders = partial(task_requirements, self.play), self.play.assistant is None
            sources = SurveyedSources[Task](self.data, "data.eval", self.sets, tools, requirements, renders=renders)
            self._tasks = {entry: tasks[: entry.tasks] for entry, tasks in zip(self.sets, sources.sets, strict=True)}
        return self._tasks[eval_set]

    def _record(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        self._take(name)
        groups = list(self._played.values())
        metrics = evaluation_summary(groups, applicable_metrics(self.play.reward.metrics))
        self.run.evaluation(name, eval_set.name, step, metrics, groups, eval_set.against)


def _failures(group: Group) -> int:
    """How many of its rollouts lack a score."""
    return sum(bool(rollout.failures) for rollout in group.rollouts)
