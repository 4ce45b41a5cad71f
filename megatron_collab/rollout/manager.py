"""From tasks to a batch: have groups played on Ray workers, take those of a step, turn rewards into credits.

Rank 0 asks the workers and hands the batch to every rank; the other ranks wait for it, a look at a time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_collab.algo.credit import fresh, samples_of, teaches
from megatron_collab.config import Config
from megatron_collab.data.datasets import load_tasks, rows_of_step
from megatron_collab.inference.pool import ServerPool
from megatron_collab.observability.run import Run
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.scheduler import Asked, Flight, Look, Slot, answers, window
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.workers import Workers
from megatron_collab.runtime import heartbeat
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Batch, Group, Missing, Sample
from megatron_collab.weight_sync.sync import WeightSync


class TooManyMissing(RunStopped):
    """More scores are missing than reward.max_missing allows."""


class RolloutManager:
    """Batches of rollouts, by step. Sampling runs up to rollout.max_staleness steps ahead of the step that trains.

    Which tasks are played and which seeds they are sampled with follow from (run.seed, slot) alone. Without
    staleness the slots of a step follow from the step, so a run that starts again at a step collects what it would
    have collected; else they follow from `state` too, and those that were in flight are played again first.
    """

    def __init__(
        self, config: Config, servers: Servers, weights: WeightSync, run: Run, state: Mapping[str, Any]
    ) -> None:
        """`state`: what `state()` gave an earlier start of the run, {} if there was none."""
        self.config = config
        self.servers = servers
        self.weights = weights
        self.run = run
        self.evaluates = config.data.eval is not None and config.train.eval_tasks > 0
        self.leader = dist.get_rank() == 0
        self._state = dict(state)
        self._digests = WeightDigests(config.rollout.max_staleness + 1, state.get("weights", ()))
        if self.leader:
            self.tasks = load_tasks(Path(config.data.train), "data.train", config.data)
            self._journal = Journal(Path(config.run.dir) / "journal", self._digests)
            self._flight, self._evaluating = (
                Flight(config, self._workers.conversations, self._journal, self._pool.lost_all) for _ in range(2)
            )
            self._left = [Slot(*slot) for slot in state.get("in_flight", ())]
            self._next = Slot(*state["next"]) if "next" in state else None
            self._spent = self._spend()

    def __enter__(self) -> RolloutManager:
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
        parts: list[Callable[[], object]] = []
        if kind is None:
            parts = [self._journal.forget, self._spend]
        elif issubclass(kind, RunStopped):
            looks = (partial(flight.collect, 0.0) for flight in (self._flight, self._evaluating))
            parts = [*looks, self._workers.stop, self._spend]
        for part in parts:
            try:
                part()
            except Exception as failure:
                print(f"megatron-collab: at the end of sampling: {' '.join(str(failure).split())}", file=sys.stderr)

    def collect(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank, while the servers have version `step`; collective.

        TooManyMissing, or RunStopped where nothing can be learned.
        """
        heartbeat.at(f"the rollouts of step {step}")
        self._digests.begin(step)
        from_leader(lambda: self._begin_step(step))
        while True:
            self._wait(lambda: self._flight)
            batch: Batch | None = from_leader(lambda: self._choose(step))
            if batch is not None:
                return batch

    def evaluate(self, name: str, step: int) -> None:
        """Play `train.eval_tasks` tasks of data.eval to their end, once each, and record the scores; collective."""
        heartbeat.at(f"evaluation {name}")
        self._digests.begin(step)
        from_leader(lambda: self._begin_evaluation(name, step))
        self._wait(lambda: self._evaluating)
        from_leader(lambda: self._record_evaluation(name, step))

    def learned(self, stats: Mapping[str, float]) -> None:
        """The batch of the last step was learned, and `stats` is what its update measured."""
        self._digests.learned(stats)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: of the last batch what is begun next and what was in flight, and which weights there are;
        JSON, on rank 0."""
        return {**self._state, "weights": self._digests.state()}

    def forget(self, checkpoint: tuple[int, Mapping[str, Any]]) -> None:
        """Forget the groups that a run which goes on from `checkpoint` (its step and state) does not ask for."""
        step, state = checkpoint
        if self.leader and "collector" in state:
            collector = state["collector"]
            self._journal.forget(min(step, collector["next"][0], *(slot[0] for slot in collector["in_flight"])))

    @property
    def _workers(self) -> Workers:
        assert self.servers.workers is not None
        return self.servers.workers

    @property
    def _pool(self) -> ServerPool:
        assert self.servers.pool is not None
        return self.servers.pool

    def _wait(self, flight: Callable[[], Flight]) -> None:
        """Until as many groups of rank 0's `flight` are finished as it waits for; collective, a look at a time.

        Playing may take longer than any collective. Where no server is left, all ranks give the weights to those that
        are started again.
        """
        while (look := from_leader(lambda: flight().look())) is not Look.FINISHED:
            if look is Look.SERVERS_LOST:
                assert self.weights.version is not None
                self.weights.sync(self.weights.version)
                from_leader(lambda: self._pool.recover())

    def _begin_step(self, step: int) -> None:
        """Begin what may be in flight at `step`, first what an earlier start of the run left there."""
        if not self._flight:  # an outage of before has cost nothing
            self._pool.recover()
        self._chosen = _Chosen(self.config, step)
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
        counted = self._counted()
        self._state = {"next": self._next, "in_flight": self._flight.slots + self._left}
        return replace(batch, metrics={**batch.metrics, **counted})

    def _begin(self, slot: Slot) -> None:
        """Begin a group of the task that follows from its slot: every refill has an order of its own."""
        seed = self.config.run.seed
        if slot.refill:
            seed = int(np.random.SeedSequence((seed, slot.refill)).generate_state(1)[0])
        at = slot.step * self.config.train.prompts_per_step + slot.number
        (row,) = rows_of_step(len(self.tasks), seed, at, 1)
        self._flight.begin(Asked(slot, slot.stream, "play", self.tasks[row]))

    def _begin_evaluation(self, name: str, step: int) -> None:
        if not self._flight:
            self._pool.recover()
        assert self.config.data.eval is not None
        tasks = load_tasks(Path(self.config.data.eval), "data.eval", self.config.data)
        tasks = tasks[: self.config.train.eval_tasks]
        for index, task in enumerate(tasks):
            self._evaluating.begin(Asked(Slot(step, 0, index), f"eval-{name}-{index}", "evaluate", task))
        self._evaluating.wait_for(len(tasks), f"evaluation {name}")

    def _record_evaluation(self, name: str, step: int) -> None:
        groups = list(self._evaluating.take().values())
        self.run.evaluation(name, step, summary(groups), groups)

    def _counted(self) -> dict[str, float]:
        """What was counted and spent since the last step: by users, tools and servers, on users and judges."""
        counts: Counter[str] = Counter()
        players = enumerate(self._workers.conversations)
        for taken in self._asked({f"the counters of conversation-{n}": p.take_counters.remote() for n, p in players}):
            counts.update(taken)
        if found := self._flight.take_found():
            counts["from_journal"] = found
        spent = self._spend()
        step = {f"llm/{name}": float(value - self._spent[name]) for name, value in sorted(spent.items())}
        self._spent = spent
        return {**{f"count/{name}": float(count) for name, count in sorted(counts.items())}, **step}

    def _spend(self) -> dict[str, float]:
        (spent,) = self._asked({"what was spent, of the limiter": self._workers.limiter.spend.remote()})
        return spent

    def _asked(self, references: Mapping[str, Any]) -> list[Any]:
        return answers(references, self.config.launch.timeout / 2)  # the other ranks wait meanwhile


class _Chosen:
    """The groups of a step: which are trained, and how many are lacking.

    Samples that are older than rollout.max_staleness are dropped, and a group of which nothing is left to compare is
    replaced. Only what was in flight before the step can be that old, hence the number of `refills`. With
    algo.dynamic_sampling groups that teach nothing are replaced too, that often (DAPO, arXiv:2503.14476, section 3.2).
    Groups that are not trained stay in the transcripts and in the means.
    """

    def __init__(self, config: Config, step: int) -> None:
        self.config, self.step = config, step
        self.ahead = config.rollout.max_staleness
        self.refill, self.refills = 0, config.algo.dynamic_sampling + self.ahead * config.train.prompts_per_step
        self.played: list[Group] = []
        self.lacking = 0
        self._kept: dict[Slot, list[Sample]] = {}
        self._idle = self._dropped = 0

    def add(self, groups: Mapping[Slot, Group]) -> None:
        """Those of a round: the step's own, or a refill."""
        dynamic = self.config.algo.dynamic_sampling
        self.lacking = 0
        for slot, group in groups.items():
            samples = samples_of(group, self.config, len(self.played))
            young = fresh(samples, self.step - self.ahead, self.config)
            self.played.append(group)
            self._dropped += len(samples) - len(young)
            if samples and not young:
                self.lacking += 1
            elif dynamic and not teaches(young):
                self._idle += 1
                self.lacking += self.refill < dynamic
            else:
                self._kept[slot] = young

    def batch(self) -> Batch:
        """What is trained, in the order of the slots; RunStopped where that is nothing."""
        dynamic, step, ahead = self.config.algo.dynamic_sampling, self.step, self.ahead
        samples = [sample for slot in sorted(self._kept) for sample in self._kept[slot]]
        if not samples:
            reason = "rewards that differ" if dynamic else "rewards"
            age = f" of version {step - ahead} or newer" if ahead else ""
            raise RunStopped(f"step {step}: no group has enough {reason}{age}, so nothing can be learned")
        counts: dict[str, float] = {}
        if dynamic:
            counts = {"dynamic/kept": len(self._kept), "dynamic/dropped": self._idle, "dynamic/refills": self.refill}
        if ahead or self._dropped:
            ages = [float(step - sample.version) for sample in samples]
            counts |= {"staleness/mean": mean(ages), "staleness/max": max(ages), "staleness/dropped": self._dropped}
            replaced = len(self.played) - len(self._kept) - self._idle
            counts |= {"staleness/groups_dropped": replaced, "staleness/groups_lacking": self.lacking}
        return Batch(tuple(samples), summary(self.played) | {name: float(count) for name, count in counts.items()})


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


def summary(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the rollouts of a step: reward and its standard error, every metric, endings, tokens.

    `reward_se` is the standard error of one turn's reward that comes from its futures' spread, averaged; `spread`
    the standard deviation of the rewards within a group, averaged: what GRPO learns from. `futures` and `turn_tokens`
    are those of one rollout.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    futures = [future for rollout in rollouts for future in rollout.futures]
    rewarded = [rollout.reward for rollout in rollouts if not isinstance(rollout.reward.value, Missing)]
    values: dict[str, list[float]] = {}
    for future in futures:
        for name, score in future.scores.items():
            if not isinstance(score, Missing):
                values.setdefault(f"score/{name}", []).append(score)
    endings = Counter(str(future.conversation.ending) for future in futures)
    spreads = [
        np.std([r.reward.value for r in group.rollouts if not isinstance(r.reward.value, Missing)] or [0.0])
        for group in groups
    ]
    sampled = [sum(len(turn.token_ids) for turn in rollout.start.turns) for rollout in rollouts if rollout.start.turns]
    return {
        "reward": mean([float(reward.value) for reward in rewarded if not isinstance(reward.value, Missing)]),
        "reward_se": mean([reward.standard_error for reward in rewarded]),
        "spread": mean([float(spread) for spread in spreads]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "futures": len(futures) / len(rollouts),
        "turn_tokens": mean([float(tokens) for tokens in sampled]),
        **{name: mean(scores) for name, scores in sorted(values.items())},
        **{f"ending/{name}": count / len(futures) for name, count in sorted(endings.items())},
    }


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
