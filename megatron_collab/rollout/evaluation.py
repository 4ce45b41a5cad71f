"""Evaluations: the sets of data.eval, played by the workers of the run, between steps or without any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.data.datasets import SurveyedSources
from megatron_collab.data.evaluation import EvaluationSet, evaluation_sets, settings_of
from megatron_collab.observability.folder import RunFolder
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.needs import applying, needs
from megatron_collab.rollout.scheduler import Asked, Flight, Slot, wait
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.summary import evaluated
from megatron_collab.rollout.tools.toolbox import make_tools, schemas
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Task


class Evaluator:
    """Plays the sets that are due and records what they scored; the methods with a step are collective.

    A conversation's seeds follow from the set, when it is evaluated, and the task. Finished groups are in the journal,
    so an evaluation that was interrupted goes on.
    """

    def __init__(self, config: Config, run: RunFolder, restore: Callable[[], None]) -> None:
        """`restore`: after a time when no server was left, waits for servers with the weights; collective."""
        self.config, self.run, self._restore = config, run, restore
        self.sets = evaluation_sets(config)
        self._tasks: dict[EvaluationSet, list[Task]] = {}
        self._flight: Flight | None = None

    def lead(self, servers: Servers, journal: Journal, beside: Flight | None = None) -> None:
        """On rank 0, before anything else: who plays. `beside`: groups of training, which stay in flight."""
        assert servers.workers and servers.pool
        self._workers, self._pool = servers.workers.conversations, servers.pool
        self._limiter = servers.workers.limiter
        self._lost_all, self._journal, self._beside = servers.lost_all, journal, beside

    @contextmanager
    def alone(self, servers: Servers, step: int) -> Iterator[None]:
        """On rank 0, in a folder of evaluations only: lead, with a journal of its own for the weights of `step`."""
        digests = WeightDigests(keep=1)
        digests.begin(step)
        journal = Journal(Path(self.config.run.dir) / "journal", digests)
        self.lead(servers, journal)
        try:
            yield
        except RunStopped:
            self.keep()
            if servers.workers:
                servers.workers.stop()
            raise
        journal.forget()

    def due(self, step: int) -> bool:
        """Whether a set is to be evaluated at `step`."""
        found: bool = from_leader(lambda: any(self.run.evaluation_due(one.name, step) for one in self.sets))
        return found

    def evaluate(self, step: int) -> None:
        """Play the sets that are due at `step`, one after the other, and record each."""
        for one in self.sets:
            self._evaluate(one, step)

    def _evaluate(self, one: EvaluationSet, step: int) -> None:
        name: str | None = from_leader(lambda: self.run.evaluation_due(one.name, step))
        if name:
            beat(f"evaluation {name}")
            from_leader(lambda: self._begin(one, name, step))
            wait(self._flight, self._restore)
            from_leader(lambda: self._record(one, name, step))

    def keep(self) -> None:
        """On rank 0, where the run is stopped: what is finished goes to the journal."""
        if self._flight:
            self._flight.collect(0.0)

    def _begin(self, one: EvaluationSet, name: str, step: int) -> None:
        tasks, settings = self._prepared(one), settings_of(self.config, one)
        self._flight = Flight(settings, self._workers, self._journal, self._lost_all, self._beside)
        stream = f"eval-{name.replace('/', '-')}"
        for index, task in enumerate(tasks):
            self._flight.begin(Asked(Slot(step, 0, index), f"{stream}-{index}", task, one))
        self._flight.wait_for(len(tasks), f"evaluation {name}")

    def _prepared(self, one: EvaluationSet) -> list[Task]:
        """The tasks of a set, which are about to be begun."""
        if not self._beside:  # an outage while nothing was in flight has no effect
            self._pool.recover()
        if not self._tasks:
            with keys.lent():
                tools = schemas(make_tools(self.config.rollout))
            given = SurveyedSources[Task](self.config, "data.eval", self.sets, tools, needs)
            self._tasks = {each: tasks[: each.tasks] for each, tasks in zip(self.sets, given.sets, strict=True)}
        return self._tasks[one]

    def _record(self, one: EvaluationSet, name: str, step: int) -> None:
        assert self._flight is not None
        groups = list(self._flight.take().values())
        self._flight = None
        self.run.evaluation(name, one.name, step, evaluated(groups, applying(self.config)), groups)
