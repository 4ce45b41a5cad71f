"""Produces the batch of a step: Ray workers play groups of rollouts, which become samples with credits.

Rank 0 calls the workers and broadcasts the batch; the other ranks wait for it in short collectives.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_collab.algo.credit import drop_stale, has_gradient, samples_of
from megatron_collab.config import Config
from megatron_collab.data.datasets import TrainingData
from megatron_collab.data.spec import DataSpec
from megatron_collab.observability.run import Run
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.evaluation import Evaluator
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.scheduler import Flight, GroupRequest, Slot, answers, available_results, wait, window
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.summary import mean, refuse_missing, summary
from megatron_collab.rollout.task_requirements import applicable_metrics, task_requirements
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Batch, Group, Sample, Task
from megatron_collab.weight_sync.sync import WeightSync

logger = logging.getLogger(__name__)

_COUNTING_SECONDS = 2.0  # for RewardWorkers to return their counters; late ones are skipped


class RolloutManager(AbstractContextManager["RolloutManager"]):
    """Produces batches of rollouts by step. Sampling runs up to rollout.max_staleness steps ahead of training.

    Tasks and sampling seeds depend only on (run.seed, slot). The slots of a step depend only on the step, so a resumed
    run collects the same groups; if rollout.max_staleness > 0 they also depend on `state`, and the groups that were in
    flight are played first.
    """

    def __init__(
        self,
        config: Config,
        data: DataSpec,
        servers: Servers,
        weights: WeightSync,
        run: Run,
        state: Mapping[str, Any],
    ) -> None:
        """`state`: the result of `state()` in an earlier start of the run, or {}."""
        self.config, self.play = config, servers.play
        self.servers = servers
        self.weights = weights
        self.run = run
        self._evaluator = Evaluator(self.play, data, run, self._restore)
        self.leader = dist.get_rank() == 0
        self._state = dict(state)
        self._timeout = config.launch.timeout / 2  # seconds; the other ranks wait in a collective meanwhile
        self._digests = WeightDigests(config.rollout.max_staleness + 1, state.get("weights", ()))
        if self.leader:
            assert servers.workers and servers.pool
            self._workers, self._pool = servers.workers, servers.pool
            with keys.in_environment():
                tools = self.play.tools.schemas()
            self.tasks = TrainingData[Task](data, tools, partial(task_requirements, self.play))
            self._journal = Journal(self.play.run_dir / "journal", self._digests)
            self._flight = Flight(self.play, self._workers.conversations, self._journal, servers.lost_all)
            self._evaluator.lead(servers, self._journal, background=self._flight)
            self._pending = [Slot(*slot) for slot in state.get("in_flight", ())]
            self._next = Slot(*state["next"]) if "next" in state else None
            self._spent = self._spend()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """If the run was stopped, write finished groups to the journal and stop the workers; always write costs.

        Failures here are printed; they neither skip the remaining steps nor replace the error that ends the run.
        """
        parts: list[Callable[[], object]] = []
        if self.leader and kind is None:
            parts = [self._journal.forget, self._spend]
        elif self.leader and issubclass(kind or Exception, RunStopped):
            parts = [partial(self._flight.collect, 0.0), self._evaluator.save, self._workers.stop, self._spend]
        for part in parts:
            try:
                part()
            except Exception as failure:
                logger.error(f"failed to stop sampling: {' '.join(str(failure).split())}")

    def collect(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank; the servers must have version `step`; collective.

        Raises RunStopped if too many scores are missing or no group can be trained.
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
        """Whether a set of data.eval is due at `step` and not recorded yet; collective."""
        return self._evaluator.due(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the due sets; the servers must have version `step`; training groups stay in flight; collective.

        Each task is played to its end `samples` times, as users would see it: malformed turns end no conversation.
        """
        self._digests.begin(step)
        self._evaluator.evaluate(step)

    def learned(self, stats: Mapping[str, float]) -> None:
        """Record that the last batch was trained; `stats` are the metrics of its update."""
        self._digests.learned(stats)

    def state(self) -> dict[str, Any]:
        """Checkpoint state as JSON, on rank 0: next slot, slots in flight after the last batch, weight digests."""
        return {**self._state, "weights": [*self._digests.items()]}

    def forget(self, checkpoint: tuple[int, Mapping[str, Any]]) -> None:
        """Remove journaled groups that a resume from `checkpoint` (step and state) does not need."""
        step, state = checkpoint
        if self.leader and "collector" in state:
            collector = state["collector"]
            self._journal.forget(min(step, collector["next"][0], *(slot[0] for slot in collector["in_flight"])))

    def _restore(self) -> None:
        """No server is available: wait until servers are back, and sync the last weight version to them; collective."""
        self.servers.wait_for_served()
        if from_leader(lambda: self._pool.lost_all()):
            assert self.weights.version is not None
            self.weights.sync(self.weights.version)
            from_leader(lambda: self._pool.recover())

    def _begin_step(self, step: int) -> None:
        """Begin the groups that may be in flight at `step`, first those from an earlier start of the run."""
        if not self._flight:  # an outage while nothing was in flight has no effect
            self._pool.recover()
        self._step_groups = _StepGroups(self.config, self.play.reward, step)
        self._next = self._next or Slot(step, 0, 0)
        prompts = self.config.train.prompts_per_step
        room = window(step, self.config.train.steps, prompts, self.config.rollout.max_staleness)
        while len(self._flight) < room:
            if self._pending:
                self._begin(self._pending.pop(0))
            else:
                self._begin(self._next)
                self._next = self._next.after(prompts)
        self._flight.wait_for(prompts, f"step {step} rollouts")

    def _choose(self, step: int) -> Batch | None:
        """Take the finished groups; the batch, or None if replacements of some groups must be played first."""
        groups, step_groups = self._flight.take(), self._step_groups
        self.run.transcripts(step, list(groups.values()))
        step_groups.add(groups)
        refuse_missing(step_groups.played, self.play.reward.max_missing)
        if step_groups.lacking and step_groups.refill < step_groups.refills:
            step_groups.refill += 1
            for number in range(step_groups.lacking):
                self._begin(Slot(step, step_groups.refill, number))
            self._flight.wait_for(step_groups.lacking, f"step {step} refill {step_groups.refill}")
            return None
        batch = step_groups.batch()
        batch = replace(batch, metrics={**batch.metrics, **self._step_metrics()})
        self._state = {"next": self._next, "in_flight": self._flight.slots + self._pending}
        return batch

    def _begin(self, slot: Slot) -> None:
        """Begin a group for the slot's task; every refill draws tasks in a different order."""
        seed = self.config.run.seed
        if slot.refill:
            seed = int(np.random.SeedSequence((seed, slot.refill)).generate_state(1)[0])
        at = slot.step * self.config.train.prompts_per_step + slot.number
        self._flight.begin(GroupRequest(slot, slot.stream, self.tasks.at(at, seed)))

    def _step_metrics(self) -> dict[str, float]:
        """Counters of users, tools and servers, and costs of users and judges, since the last step."""
        counts: Counter[str] = Counter()
        players = enumerate(self._workers.conversations)
        calls = {f"the counters of conversation-{n}": player.take_counters.remote() for n, player in players}
        for counters in answers(calls, self._timeout):
            counts.update(counters)
        reward_calls = [worker.take_counters.remote() for worker in self._workers.rewards]
        for counters in available_results(reward_calls, _COUNTING_SECONDS):
            counts.update(counters)
        if self._flight.from_journal:
            counts["from_journal"], self._flight.from_journal = self._flight.from_journal, 0
        before, self._spent = self._spent, self._spend()
        step = spending(before, self._spent)
        named = {name if name.startswith("llm/") else f"count/{name}": float(n) for name, n in sorted(counts.items())}
        return {**named, **step}

    def _spend(self) -> dict[str, float]:
        (spent,) = answers({"the limiter's spending": self._workers.limiter.spend.remote()}, self._timeout)
        return spent


def spending(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The difference of two totals of the limiter, as metrics; without llm/usd if the price of a call is unknown."""
    step = {f"llm/{name}": float(total - before[name]) for name, total in sorted(after.items())}
    if step.get("llm/unpriced"):
        del step["llm/usd"]
    return step


class _StepGroups:
    """The groups of a step: which are trained, and how many must be replaced.

    Samples older than rollout.max_staleness are dropped, and a group is replaced if no samples remain. Only groups that
    were in flight before the step can be that old, which bounds the number of `refills`. With algo.dynamic_sampling
    groups without a gradient are replaced too, up to that many times (DAPO, arXiv:2503.14476, section 3.2). Groups that
    are not trained stay in the transcripts and in the means.
    """

    def __init__(self, config: Config, reward: RewardSpec, step: int) -> None:
        self.config, self.reward, self.step = config, reward, step
        self.max_staleness, self.dynamic = config.rollout.max_staleness, config.algo.dynamic_sampling
        self.refill, self.refills = 0, self.dynamic + self.max_staleness * config.train.prompts_per_step
        self.played: list[Group] = []
        self.lacking = 0
        self._trained: dict[Slot, list[Sample]] = {}
        self._idle = self._dropped = self._pairless = 0

    def add(self, groups: Mapping[Slot, Group]) -> None:
        """Add the groups of a round: the step's regular groups, or a refill."""
        self.lacking = 0
        for slot, group in groups.items():
            samples = samples_of(group, self.config, len(self.played), self.reward.formula)
            fresh_samples = drop_stale(samples, self.step - self.max_staleness, self.config)
            self.played.append(group)
            self._pairless += not samples and self.config.objective == "dpo"
            self._dropped += len(samples) - len(fresh_samples)
            if samples and not fresh_samples:
                self.lacking += 1
            elif self.dynamic and not has_gradient(fresh_samples):
                self._idle += 1
                self.lacking += self.refill < self.dynamic
            else:
                self._trained[slot] = fresh_samples

    def batch(self) -> Batch:
        """The trained samples, in slot order, and the metrics. Raises RunStopped if there are no samples."""
        samples = tuple(sample for slot in sorted(self._trained) for sample in self._trained[slot])
        if not samples:
            reason = "different rewards" if self.dynamic or self.config.objective == "dpo" else "rewards"
            age = f" of version {self.step - self.max_staleness} or newer" if self.max_staleness else ""
            raise RunStopped(f"step {self.step}: no group has enough {reason}{age}; nothing can be trained")
        metrics, trained_groups = (
            summary(self.played, applicable_metrics(self.reward.metrics)),
            float(len(self._trained)),
        )
        if self.dynamic:
            metrics |= {"dynamic/kept": trained_groups, "dynamic/dropped": self._idle, "dynamic/refills": self.refill}
        if self.config.objective == "dpo":
            metrics["dpo/groups_without_pair"] = self._pairless
        if self.max_staleness or self._dropped:
            ages = [float(self.step - sample.version) for sample in samples]
            metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages), "staleness/dropped": self._dropped}
            replaced = len(self.played) - len(self._trained) - self._idle
            metrics |= {"staleness/groups_dropped": replaced, "staleness/groups_lacking": self.lacking}
        return Batch(samples, {name: float(value) for name, value in metrics.items()})
