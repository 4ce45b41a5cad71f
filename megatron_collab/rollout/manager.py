"""From tasks to a batch: have groups played on Ray workers, take those of a step, turn rewards into credits.

Rank 0 asks the workers and hands the batch to every rank; the other ranks wait for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_collab.algo.credit import fresh, samples_of, teaches
from megatron_collab.config import Config
from megatron_collab.data.datasets import Cursor, load_tasks
from megatron_collab.observability.run import Run
from megatron_collab.rollout.journal import Journal
from megatron_collab.rollout.lineage import Lineage
from megatron_collab.rollout.patience import group_seconds
from megatron_collab.rollout.scheduler import Asked, Flight, Slot, answers, window
from megatron_collab.rollout.summary import mean, summary
from megatron_collab.rollout.workers import Crew
from megatron_collab.runtime import heartbeat, stacks
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Batch, Group, Missing, Sample

_Result = TypeVar("_Result")


class TooManyMissing(RunStopped):
    """More scores are missing than reward.max_missing allows."""


class Collector:
    """Batches of rollouts, by step. Sampling runs up to rollout.max_staleness steps ahead of the step that trains.

    Which tasks are played and which seeds they are sampled with follow from (run.seed, slot) alone. Without
    staleness the slots of a step follow from the step, so a run that starts again at a step collects what it would
    have collected; else they follow from `state` too, and those that were in flight are played again first.
    """

    def __init__(
        self,
        config: Config,
        crew: Crew | None,
        run: Run,
        lacking: Callable[[], bool],
        revive: Callable[[], None],
        state: Mapping[str, Any],
    ) -> None:
        """`crew`: on rank 0 the workers to ask.

        `lacking`, asked on rank 0: whether there was, since the last `revive`, a time when no server was left.
        `revive`, collective: returns when servers sample from the present version again. `state`: what `state()` gave
        an earlier start of the run, {} if there was none.
        """
        self.config = config
        self.crew = crew
        self.run = run
        self.lacking = lacking
        self.revive = revive
        self.leader = dist.get_rank() == 0
        self._state = dict(state)
        self._lineage = Lineage(config.rollout.max_staleness + 1, state.get("weights", ()))
        if self.leader:
            assert crew is not None
            self.tasks = load_tasks(Path(config.data.train))
            self._journal = Journal(Path(config.run.dir) / "journal", self._lineage)
            self._flight, self._evaluating = self._new_flight(crew), self._new_flight(crew)
            self._left = [Slot(*slot) for slot in state.get("in_flight", ())]
            self._next = Slot(*state["next"]) if "next" in state else None
            self._spent = self._spend()

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Where the run is stopped, write down what has been finished since the last look, and play nothing more.

        What was spent is written down at a good end too. A part that fails is told and costs no other: the run ends
        for the reason it has.
        """
        if not self.leader:
            return
        assert self.crew is not None
        parts: list[Callable[[], object]] = []
        if kind is None:
            parts = [self._journal.forget, self._spend]
        elif issubclass(kind, RunStopped):
            looks = (partial(flight.look, 0.0) for flight in (self._flight, self._evaluating))
            parts = [*looks, self.crew.stop, self._spend]
        for part in parts:
            try:
                part()
            except Exception as failure:
                print(f"megatron-collab: at the end of sampling: {' '.join(str(failure).split())}", file=sys.stderr)

    def next(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank, while the servers have version `step`; collective."""
        heartbeat.at(f"the rollouts of step {step}")
        self._lineage.begin(step)
        return self._together(self._collect(step))

    def evaluate(self, name: str, step: int) -> None:
        """Play `train.eval_tasks` tasks of data.eval to their end, once each, and record the scores; collective."""
        heartbeat.at(f"evaluation {name}")
        self._lineage.begin(step)
        self._together(self._evaluate(name, step))

    def learned(self, stats: Mapping[str, float]) -> None:
        """The batch of the last step was learned, and `stats` is what its update measured."""
        self._lineage.learned(stats)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: of the last batch what is begun next and what was in flight, and which weights there are;
        JSON, on rank 0."""
        return {**self._state, "weights": self._lineage.state()}

    def forget(self, checkpoint: tuple[int, Mapping[str, Any]]) -> None:
        """Forget the groups that a run which goes on from `checkpoint` (its step and state) does not ask for."""
        step, state = checkpoint
        if self.leader and "collector" in state:
            collector = state["collector"]
            self._journal.forget(min(step, collector["next"][0], *(slot[0] for slot in collector["in_flight"])))

    def _together(self, play: Generator[bool, None, _Result]) -> _Result:
        """What `play` gives on rank 0, on every rank; where it yields True, no server is left: all ranks revive them.

        The other ranks wait for one look at a time: playing may take longer than any collective.
        """
        while True:
            lacking, result = from_leader(lambda: self._go_on(play))
            if lacking is None:
                return result
            if lacking:
                self.revive()

    def _go_on(self, play: Generator[bool, None, _Result]) -> tuple[bool | None, _Result | None]:
        """Go on with `play`: what it yields; None, and its result, where it has ended."""
        try:
            return next(play), None
        except StopIteration as end:
            return None, end.value

    def _collect(self, step: int) -> Generator[bool, None, Batch]:
        """Take the groups of a step, and others for those that cannot be trained.

        Samples that are older than rollout.max_staleness are dropped, and a group of which nothing is left to compare
        is replaced. Only what was in flight before the step can be that old, hence the number of rounds. With
        algo.dynamic_sampling groups that teach nothing are replaced too, that often (DAPO, arXiv:2503.14476, section
        3.2). Groups that are not trained stay in the transcripts and in the means.
        """
        wanted, ahead = self.config.train.prompts_per_step, self.config.rollout.max_staleness
        refills = self.config.algo.dynamic_sampling
        played: list[Group] = []
        kept: dict[Slot, list[Sample]] = {}
        lacking, idle, dropped = wanted, 0, 0
        self._fill(step)
        for refill in range(refills + 1 + ahead * wanted):
            if refill:
                for number in range(lacking):
                    self._begin(Slot(step, refill, number))
            title = f"step {step} refill {refill}" if refill else f"step {step} rollouts"
            groups = yield from self._flight.take(lacking, title)
            lacking = 0
            for slot, group in groups.items():
                samples = samples_of(group, self.config, len(played))
                young = fresh(samples, step - ahead, self.config)
                played.append(group)
                dropped += len(samples) - len(young)
                if samples and not young:
                    lacking += 1
                elif refills and not teaches(young):
                    idle += 1
                    lacking += refill < refills
                else:
                    kept[slot] = young
            self.run.transcripts(step, list(groups.values()))
            refuse_missing(played, self.config.reward.max_missing)
            if not lacking:
                break
        samples = [sample for slot in sorted(kept) for sample in kept[slot]]
        if not samples:
            reason = "rewards that differ" if refills else "rewards"
            age = f" of version {step - ahead} or newer" if ahead else ""
            raise RunStopped(f"step {step}: no group has enough {reason}{age}, so nothing can be learned")
        counts: dict[str, float] = {}
        if refills:
            counts = {"dynamic/kept": len(kept), "dynamic/dropped": idle, "dynamic/refills": refill}
        if ahead or dropped:
            ages = [float(step - sample.version) for sample in samples]
            counts |= {"staleness/mean": mean(ages), "staleness/max": max(ages), "staleness/dropped": dropped}
            counts |= {"staleness/groups_dropped": len(played) - len(kept) - idle, "staleness/groups_lacking": lacking}
        counted = {name: float(count) for name, count in counts.items()} | self._counted()
        self._state = {"next": self._next, "in_flight": self._flight.slots + self._left}
        return Batch(tuple(samples), {**summary(played), **counted})

    def _fill(self, step: int) -> None:
        """Begin what may be in flight at `step`: first what an earlier start of the run left there."""
        if self._next is None:
            self._next = Slot(step, 0, 0)
        prompts = self.config.train.prompts_per_step
        room = window(step, self.config.train.steps, prompts, self.config.rollout.max_staleness)
        while len(self._flight) < room:
            if self._left:
                self._begin(self._left.pop(0))
            else:
                self._begin(self._next)
                self._next = self._next.after(prompts)

    def _new_flight(self, crew: Crew) -> Flight:
        written = Path(self.config.run.dir) / stacks.FOLDER
        return Flight(crew.conversations, self.lacking, self._journal, partial(group_seconds, self.config), written)

    def _begin(self, slot: Slot) -> None:
        """Begin a group of the task that follows from its slot: every refill has an order of its own."""
        seed = self.config.run.seed
        if slot.refill:
            seed = int(np.random.SeedSequence((seed, slot.refill)).generate_state(1)[0])
        at = slot.step * self.config.train.prompts_per_step + slot.number
        (row,) = Cursor(len(self.tasks), seed).batch(at, 1)
        self._flight.begin(Asked(slot, slot.stream, "play", self.tasks[row]))

    def _evaluate(self, name: str, step: int) -> Generator[bool, None, None]:
        if self.config.data.eval is None or self.config.train.eval_tasks == 0:
            return
        tasks = load_tasks(Path(self.config.data.eval))[: self.config.train.eval_tasks]
        for index, task in enumerate(tasks):
            asked = Asked(Slot(step, 0, index), f"eval-{name}-{index}", "evaluate", task)
            self._evaluating.begin(asked)
        taken = yield from self._evaluating.take(len(tasks), f"evaluation {name}")
        groups = list(taken.values())
        self.run.evaluation(name, step, summary(groups), groups)

    def _counted(self) -> dict[str, float]:
        """What was counted and spent since the last step: by users, tools and servers, on users and judges."""
        assert self.crew is not None
        counts: Counter[str] = Counter()
        players = enumerate(self.crew.conversations)
        for taken in self._asked({f"the counters of conversation-{n}": p.take_counters.remote() for n, p in players}):
            counts.update(taken)
        if found := self._flight.take_found():
            counts["from_journal"] = found
        spent = self._spend()
        step = {f"llm/{name}": float(value - self._spent[name]) for name, value in sorted(spent.items())}
        self._spent = spent
        return {**{f"count/{name}": float(count) for name, count in sorted(counts.items())}, **step}

    def _spend(self) -> dict[str, float]:
        assert self.crew is not None
        (spent,) = self._asked({"what was spent, of the limiter": self.crew.limiter.spend.remote()})
        return spent

    def _asked(self, references: Mapping[str, Any]) -> list[Any]:
        return answers(references, self.config.launch.timeout / 2)  # the other ranks wait meanwhile


def refuse_missing(groups: Sequence[Group], max_missing: float) -> None:
    """Stop where an outage would decide what is learned.

    Raises TooManyMissing when the share of rollouts without a reward exceeds `max_missing`.
    """
    rewards = [rollout.reward.value for group in groups for rollout in group.rollouts]
    reasons = Counter(value.why for value in rewards if isinstance(value, Missing))
    if reasons.total() > max_missing * len(rewards):
        why, count = reasons.most_common(1)[0]
        raise TooManyMissing(
            f"{reasons.total()} of {len(rewards)} rollouts have no reward, more than "
            f"reward.max_missing={max_missing} allows; most often ({count}): {why}"
        )
