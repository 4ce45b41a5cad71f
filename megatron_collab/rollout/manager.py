"""From tasks to a batch: Ray workers play groups; those of a step become samples with credits.

Rank 0 asks the workers and broadcasts the batch; the other ranks wait for it in short collectives.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_collab.algo.credit import fresh, samples_of, teaches
from megatron_collab.config import Config
from megatron_collab.data.datasets import TrainingData
from megatron_collab.observability.run import Run
from megatron_collab.rollout.evaluation import Evaluator
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.needs import applying, needs
from megatron_collab.rollout.scheduler import Asked, Flight, Slot, answered, answers, wait, window
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.summary import mean, refuse_missing, summary
from megatron_collab.rollout.tools.toolbox import make_tools, schemas
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Batch, Group, Sample, Task
from megatron_collab.weight_sync.sync import WeightSync

_COUNTING_SECONDS = 2.0  # for RewardWorkers to say what they have counted; one that hangs stops nothing


class RolloutManager(AbstractContextManager["RolloutManager"]):
    """Batches of rollouts, by step. Sampling runs up to rollout.max_staleness steps ahead of the step that trains.

    Tasks and sampling seeds follow from (run.seed, slot) alone. The slots of a step follow from the step, and so does
    what a resumed run collects; with staleness from `state` too, and those that were in flight are played first.
    """

    def __init__(
        self, config: Config, servers: Servers, weights: WeightSync, run: Run, state: Mapping[str, Any]
    ) -> None:
        """`state`: `state()` of an earlier start of the run, or {}."""
        self.config = config
        self.servers = servers
        self.weights = weights
        self.run = run
        self._evaluator = Evaluator(config, run, self._restore)
        self.leader = dist.get_rank() == 0
        self._state = dict(state)
        self._timeout = config.launch.timeout / 2  # seconds, in which the other ranks wait
        self._digests = WeightDigests(config.rollout.max_staleness + 1, state.get("weights", ()))
        if self.leader:
            assert servers.workers and servers.pool
            self._workers, self._pool = servers.workers, servers.pool
            with keys.lent():
                tools = schemas(make_tools(config.rollout))
            self.tasks = TrainingData[Task](config, tools, needs)
            self._journal = Journal(Path(config.run.dir) / "journal", self._digests)
            self._flight = Flight(config, self._workers.conversations, self._journal, servers.lost_all)
            self._evaluator.lead(servers, self._journal, beside=self._flight)
            self._left = [Slot(*slot) for slot in state.get("in_flight", ())]
            self._next = Slot(*state["next"]) if "next" in state else None
            self._spent = self._spend()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Where the run is stopped, write finished groups to the journal and stop playing; write costs in any case.

        Failures here are printed: they neither stop the other parts nor change the reason for which the run ends.
        """
        parts: list[Callable[[], object]] = []
        if self.leader and kind is None:
            parts = [self._journal.forget, self._spend]
        elif self.leader and issubclass(kind or Exception, RunStopped):
            parts = [partial(self._flight.collect, 0.0), self._evaluator.keep, self._workers.stop, self._spend]
        for part in parts:
            try:
                part()
            except Exception as failure:
                print(f"megatron-collab: at the end of sampling: {' '.join(str(failure).split())}", file=sys.stderr)

    def collect(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank, while the servers have version `step`; collective.

        RunStopped where too many scores are missing, or nothing can be learned.
        """
        beat(f"the rollouts of step {step}")
        self._digests.begin(step)
        from_leader(lambda: self._begin_step(step))
        while True:
            wait(self._flight if self.leader else None, self._restore)
            batch: Batch | None = from_leader(lambda: self._choose(step))
            if batch is not None:
                return batch

    def evaluation_due(self, step: int) -> bool:
        """Whether a set of data.eval is to be evaluated at `step`, and is not recorded yet; collective."""
        return self._evaluator.due(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the sets that are due while the servers have version `step`; what is in flight stays so; collective.

        Tasks are played to their end, `samples` times each, as a user would see it: malformed turns are played on.
        """
        self._digests.begin(step)
        self._evaluator.evaluate(step)

    def learned(self, stats: Mapping[str, float]) -> None:
        """The batch of the last step was learned; `stats` are the metrics of its update."""
        self._digests.learned(stats)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON, on rank 0: after the last batch the next slot and those in flight; weight digests."""
        return {**self._state, "weights": [*self._digests.items()]}

    def forget(self, checkpoint: tuple[int, Mapping[str, Any]]) -> None:
        """Forget the groups that a run which resumes from `checkpoint` (its step and state) does not need."""
        step, state = checkpoint
        if self.leader and "collector" in state:
            collector = state["collector"]
            self._journal.forget(min(step, collector["next"][0], *(slot[0] for slot in collector["in_flight"])))

    def _restore(self) -> None:
        """No server is left: wait for some, and give them the weights of the version that they had; collective."""
        self.servers.wait_for_served()
        if from_leader(lambda: self._pool.lost_all()):
            assert self.weights.version is not None
            self.weights.sync(self.weights.version)
            from_leader(lambda: self._pool.recover())

    def _begin_step(self, step: int) -> None:
        """Begin the groups that may be in flight at `step`, first those of an earlier start of the run."""
        if not self._flight:  # an outage while nothing was in flight has no effect
            self._pool.recover()
        self._chosen = _Chosen(self.config, step)
        self._next = self._next or Slot(step, 0, 0)
        prompts = self.config.train.prompts_per_step
        room = window(step, self.config.train.steps, prompts, self.config.rollout.max_staleness)
        while len(self._flight) < room:
            if self._left:
                self._begin(self._left.pop(0))
            else:
                self._begin(self._next)
                self._next = self._next.after(prompts)
        self._flight.wait_for(prompts, f"step {step} rollouts")

    def _choose(self, step: int) -> Batch | None:
        """Take the groups that were waited for; the batch, or None where others are played for some of them."""
        groups, chosen = self._flight.take(), self._chosen
        self.run.transcripts(step, list(groups.values()))
        chosen.add(groups)
        refuse_missing(chosen.played, self.config.reward.max_missing)
        if chosen.lacking and chosen.refill < chosen.refills:
            chosen.refill += 1
            for number in range(chosen.lacking):
                self._begin(Slot(step, chosen.refill, number))
            self._flight.wait_for(chosen.lacking, f"step {step} refill {chosen.refill}")
            return None
        batch = chosen.batch()
        batch = replace(batch, metrics={**batch.metrics, **self._counted()})
        self._state = {"next": self._next, "in_flight": self._flight.slots + self._left}
        return batch

    def _begin(self, slot: Slot) -> None:
        """Begin a group of the task that follows from its slot: every refill has an order of its own."""
        seed = self.config.run.seed
        if slot.refill:
            seed = int(np.random.SeedSequence((seed, slot.refill)).generate_state(1)[0])
        at = slot.step * self.config.train.prompts_per_step + slot.number
        self._flight.begin(Asked(slot, slot.stream, self.tasks.at(at, seed)))

    def _counted(self) -> dict[str, float]:
        """Counts of users, tools and servers, and costs of users and judges, since the last step."""
        counts: Counter[str] = Counter()
        players = enumerate(self._workers.conversations)
        asked = {f"the counters of conversation-{n}": player.take_counters.remote() for n, player in players}
        for taken in answers(asked, self._timeout):
            counts.update(taken)
        for taken in answered([worker.take_counters.remote() for worker in self._workers.rewards], _COUNTING_SECONDS):
            counts.update(taken)
        if self._flight.from_journal:
            counts["from_journal"], self._flight.from_journal = self._flight.from_journal, 0
        before, self._spent = self._spent, self._spend()
        step = spending(before, self._spent)
        named = {name if name.startswith("llm/") else f"count/{name}": float(n) for name, n in sorted(counts.items())}
        return {**named, **step}

    def _spend(self) -> dict[str, float]:
        (spent,) = answers({"what was spent, of the limiter": self._workers.limiter.spend.remote()}, self._timeout)
        return spent


def spending(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was spent between two totals of the limiter; no llm/usd where it is unknown, since a call had no price."""
    step = {f"llm/{name}": float(total - before[name]) for name, total in sorted(after.items())}
    if step.get("llm/unpriced"):
        del step["llm/usd"]
    return step


class _Chosen:
    """The groups of a step: which are trained, and how many are lacking.

    Samples that are older than rollout.max_staleness are dropped, and a group of which nothing is left to compare is
    replaced. Only groups that were in flight before the step can be that old, hence the number of `refills`. With
    algo.dynamic_sampling groups without a gradient are replaced too, that often (DAPO, arXiv:2503.14476, section 3.2).
    Groups that are not trained stay in the transcripts and in the means.
    """

    def __init__(self, config: Config, step: int) -> None:
        self.config, self.step = config, step
        self.ahead, self.dynamic = config.rollout.max_staleness, config.algo.dynamic_sampling
        self.refill, self.refills = 0, self.dynamic + self.ahead * config.train.prompts_per_step
        self.played: list[Group] = []
        self.lacking = 0
        self._kept: dict[Slot, list[Sample]] = {}
        self._idle = self._dropped = self._pairless = 0

    def add(self, groups: Mapping[Slot, Group]) -> None:
        """The groups of a round: the step's own, or a refill."""
        self.lacking = 0
        for slot, group in groups.items():
            samples = samples_of(group, self.config, len(self.played))
            young = fresh(samples, self.step - self.ahead, self.config)
            self.played.append(group)
            self._pairless += not samples and self.config.objective == "dpo"
            self._dropped += len(samples) - len(young)
            if samples and not young:
                self.lacking += 1
            elif self.dynamic and not teaches(young):
                self._idle += 1
                self.lacking += self.refill < self.dynamic
            else:
                self._kept[slot] = young

    def batch(self) -> Batch:
        """The trained samples, in the order of the slots, and the metrics; RunStopped where there are none."""
        samples = tuple(sample for slot in sorted(self._kept) for sample in self._kept[slot])
        if not samples:
            reason = "rewards that differ" if self.dynamic or self.config.objective == "dpo" else "rewards"
            age = f" of version {self.step - self.ahead} or newer" if self.ahead else ""
            raise RunStopped(f"step {self.step}: no group has enough {reason}{age}, so nothing can be learned")
        metrics, kept = summary(self.played, applying(self.config)), float(len(self._kept))
        if self.dynamic:
            metrics |= {"dynamic/kept": kept, "dynamic/dropped": self._idle, "dynamic/refills": self.refill}
        if self.config.objective == "dpo":
            metrics["dpo/groups_without_pair"] = self._pairless
        if self.ahead or self._dropped:
            ages = [float(self.step - sample.version) for sample in samples]
            metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages), "staleness/dropped": self._dropped}
            replaced = len(self.played) - len(self._kept) - self._idle
            metrics |= {"staleness/groups_dropped": replaced, "staleness/groups_lacking": self.lacking}
        return Batch(samples, {name: float(value) for name, value in metrics.items()})
