"""From tasks to a batch: play the groups of a step on Ray workers, turn rewards into credits.

Rank 0 asks the workers and hands the batch to every rank; the other ranks wait for it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist

from megatron_collab import files
from megatron_collab.algo.credit import samples_of, teaches
from megatron_collab.config import Config
from megatron_collab.data.datasets import Cursor, load_tasks
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.observe.progress import progress
from megatron_collab.observe.run import Run
from megatron_collab.processes import RunStopped
from megatron_collab.rollout.worker import Crew
from megatron_collab.types import Batch, Group, Missing, Sample, Task


class TooManyMissing(RunStopped):
    """More scores are missing than reward.max_missing allows."""


class Collector:
    """Batches of rollouts, by step.

    Which tasks a step plays and which seeds it samples with follow from (run.seed, step) alone, the tasks of a
    refill from its number too, so a run that starts again at a step collects what it would have collected.
    """

    def __init__(self, config: Config, crew: Crew | None, run: Run) -> None:
        """`crew`: on rank 0 the workers to ask."""
        self.config = config
        self.crew = crew
        self.run = run
        self.leader = dist.get_rank() == 0
        if self.leader:
            self.tasks = load_tasks(Path(config.data.train))
            self._ledger = Path(config.run.dir) / "spend.json"
            self._spent = self._restore_spend()

    def next(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank; collective."""
        return _from_leader(lambda: self._accounted(self._collect, step))

    def evaluate(self, name: str, step: int) -> None:
        """Play `train.eval_tasks` tasks of data.eval to their end, once each, and record the scores; collective."""
        _from_leader(lambda: self._accounted(self._evaluate, name, step))

    def _accounted(self, play: Callable[..., Any], *arguments: Any) -> Any:
        """What `play` gives; what was spent is on disk afterwards, however it ends, so that the budget holds."""
        assert self.crew is not None
        try:
            return play(*arguments)
        finally:
            files.replace(self._ledger, json.dumps(ray.get(self.crew.limiter.spend.remote())))

    def _collect(self, step: int) -> Batch:
        """Play the step's tasks; with algo.dynamic_sampling others for the groups that teach nothing, that often.

        DAPO, arXiv:2503.14476, section 3.2. Groups that are not trained stay in the transcripts and in the means.
        """
        wanted, refills = self.config.train.prompts_per_step, self.config.algo.dynamic_sampling
        played: list[Group] = []
        kept: list[list[Sample]] = []
        for refill in range(refills + 1):
            stream = f"train-{step}.{refill}" if refill else f"train-{step}"
            title = f"step {step} refill {refill}" if refill else f"step {step} rollouts"
            groups = self._play("play", self._tasks(step, refill)[: wanted - len(kept)], stream, title)
            made = [samples_of(group, self.config, number) for number, group in enumerate(groups, start=len(played))]
            kept += [samples for samples in made if teaches(samples)] if refills else made
            played += groups
            self.run.transcripts(step, groups)
            refuse_missing(played, self.config.reward.max_missing)
            if len(kept) == wanted:
                break
        samples = [sample for made in kept for sample in made]
        if not samples:
            lacking = "rewards that differ" if refills else "rewards"
            raise RunStopped(f"step {step}: no group has enough {lacking}, so nothing can be learned")
        counts = {"kept": len(kept), "dropped": len(played) - len(kept), "refills": refill}
        dynamic = {f"dynamic/{name}": float(count) for name, count in counts.items()} if refills else {}
        return Batch(tuple(samples), {**summary(played), **dynamic, **self._counted()})

    def _tasks(self, step: int, refill: int) -> list[Task]:
        """The tasks that a step plays first, or what its refill takes from; every refill has an order of its own."""
        seed = self.config.run.seed
        if refill:
            seed = int(np.random.SeedSequence((seed, refill)).generate_state(1)[0])
        rows = Cursor(len(self.tasks), seed).batch(step, self.config.train.prompts_per_step)
        return [self.tasks[row] for row in rows]

    def _evaluate(self, name: str, step: int) -> None:
        if self.config.data.eval is None or self.config.train.eval_tasks == 0:
            return
        tasks = load_tasks(Path(self.config.data.eval))[: self.config.train.eval_tasks]
        groups = self._play("evaluate", tasks, f"eval-{name}", f"evaluation {name}")
        self.run.evaluation(name, step, summary(groups), groups)

    def _play(self, what: str, tasks: Sequence[Task], stream: str, title: str) -> list[Group]:
        """One group a task, all at once, in the order of the tasks; `what` names a method of Player."""
        assert self.crew is not None
        workers = self.crew.conversations
        pending = {}
        for index, task in enumerate(tasks):
            worker = workers[index % len(workers)]
            pending[getattr(worker, what).remote(task, f"{stream}-{index}")] = index
        groups: dict[int, Group] = {}
        with progress(title, len(tasks)) as bar:
            while pending:
                (done,), _ = ray.wait(list(pending), num_returns=1)
                groups[pending.pop(done)] = ray.get(done)
                bar.update(1)
        return [groups[index] for index in range(len(tasks))]

    def _counted(self) -> dict[str, float]:
        """What was counted and spent since the last step: by users, tools and servers, on users and judges."""
        assert self.crew is not None
        counts: Counter[str] = Counter()
        for taken in ray.get([worker.take_counters.remote() for worker in self.crew.conversations]):
            counts.update(taken)
        spent = ray.get(self.crew.limiter.spend.remote())
        step = {f"llm/{name}": float(value - self._spent[name]) for name, value in sorted(spent.items())}
        self._spent = spent
        return {**{f"count/{name}": float(count) for name, count in sorted(counts.items())}, **step}

    def _restore_spend(self) -> dict[str, float]:
        """Totals of the run's earlier starts, which its budget counts, and steps that are done again as well."""
        assert self.crew is not None
        if self._ledger.is_file():
            ray.get(self.crew.limiter.restore.remote(json.loads(self._ledger.read_text())))
        return ray.get(self.crew.limiter.spend.remote())


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
        "reward": _mean([float(reward.value) for reward in rewarded if not isinstance(reward.value, Missing)]),
        "reward_se": _mean([reward.standard_error for reward in rewarded]),
        "spread": _mean([float(spread) for spread in spreads]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "futures": len(futures) / len(rollouts),
        "turn_tokens": _mean([float(tokens) for tokens in sampled]),
        **{name: _mean(scores) for name, scores in sorted(values.items())},
        **{f"ending/{name}": count / len(futures) for name, count in sorted(endings.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _from_leader(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; where rank 0 fails, every rank raises instead of waiting for it.

    A budget that is used up stops the run: RunStopped on every rank.
    """
    box: list[Any] = [None, None, False]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except BudgetSpent as error:
            failure = RunStopped(str(error))
        except Exception as error:
            failure = error
        if failure is not None:
            box[1:] = f"{type(failure).__name__}: {failure}", isinstance(failure, RunStopped)
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise (RunStopped if box[2] else RuntimeError)(f"rank 0 failed: {box[1]}")
    return box[0]
