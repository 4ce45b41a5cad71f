"""From tasks to a batch: play the groups of a step on Ray workers, turn rewards into advantages.

Rank 0 asks the workers and hands the batch to every rank; the other ranks wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist

from megatron_collab.algo.advantage import grpo
from megatron_collab.config import Config
from megatron_collab.data.datasets import Cursor, load_tasks
from megatron_collab.observe.progress import progress
from megatron_collab.observe.run import Run
from megatron_collab.types import Batch, Group, Missing, Rollout, Sample


class TooManyMissing(RuntimeError):
    """More scores are missing than reward.max_missing allows."""


class Collector:
    """Batches of rollouts, by step.

    Which tasks a step plays and which seeds it samples with follow from (run.seed, step) alone, so a run
    that starts again at a step collects what it would have collected.
    """

    def __init__(self, config: Config, workers: Sequence[Any], run: Run) -> None:
        self.config = config
        self.workers = workers
        self.run = run
        self.leader = dist.get_rank() == 0
        if self.leader:
            self.tasks = load_tasks(Path(config.data.train))
            self.cursor = Cursor(len(self.tasks), config.run.seed)

    def next(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank; collective."""
        return _from_leader(lambda: self._collect(step))

    def evaluate(self, name: str, step: int) -> None:
        """Play `train.eval_tasks` tasks of data.eval to their end, once each, and record the scores; collective."""
        _from_leader(lambda: self._evaluate(name, step))

    def _collect(self, step: int) -> Batch:
        train = self.config.train
        tasks = [self.tasks[i] for i in self.cursor.batch(step, train.prompts_per_step)]
        futures = 0 if self.config.reward.mode == "single_turn" else self.config.rollout.futures
        groups = self._play(tasks, f"train-{step}", train.rollouts_per_prompt, futures, f"step {step} rollouts")
        refuse_missing(groups, self.config.reward.max_missing)
        self.run.transcripts(step, groups)
        samples = [sample for group in groups for sample in samples_of(group)]
        if not samples:
            raise TooManyMissing(f"step {step}: no group has two rollouts with a reward, so nothing can be learned")
        return Batch(tuple(samples), summary(groups))

    def _evaluate(self, name: str, step: int) -> None:
        if self.config.data.eval is None or self.config.train.eval_tasks == 0:
            return
        tasks = load_tasks(Path(self.config.data.eval))[: self.config.train.eval_tasks]
        groups = self._play(tasks, f"eval-{name}", 1, 1, f"evaluation {name}")
        self.run.evaluation(name, step, summary(groups), groups)

    def _play(self, tasks: Sequence[Any], stream: str, rollouts: int, futures: int, title: str) -> list[Group]:
        """One group a task, all at once, in the order of the tasks."""
        pending = {}
        for index, task in enumerate(tasks):
            worker = self.workers[index % len(self.workers)]
            pending[worker.play.remote(task, f"{stream}-{index}", rollouts, futures)] = index
        groups: dict[int, Group] = {}
        with progress(title, len(tasks)) as bar:
            while pending:
                (done,), _ = ray.wait(list(pending), num_returns=1)
                groups[pending.pop(done)] = ray.get(done)
                bar.update(1)
        return [groups[index] for index in range(len(tasks))]


def samples_of(group: Group) -> list[Sample]:
    """The trained turns of a group with their advantages; rollouts without a reward leave their group."""
    rewarded = [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)]
    if len(rewarded) < 2:
        return []
    advantages_G = grpo(np.array([rollout.reward.value for rollout in rewarded], dtype=np.float64))
    return [_sample(rollout, float(advantage)) for rollout, advantage in zip(rewarded, advantages_G, strict=True)]


def _sample(rollout: Rollout, advantage: float) -> Sample:
    turn = rollout.turn
    prompt, reply = len(turn.prompt_ids), len(turn.token_ids)
    mask = np.concatenate([np.zeros(prompt, np.float32), np.ones(reply, np.float32)])
    log_probs = np.concatenate([np.zeros(prompt, np.float32), np.array(turn.log_probs, np.float32)])
    token_ids = np.array(turn.prompt_ids + turn.token_ids, np.int64)
    return Sample(token_ids, mask, mask * np.float32(advantage), log_probs)


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

    `reward_se` is the standard error of one turn's reward that comes from its futures' spread, averaged;
    `spread` the standard deviation of the rewards within a group, averaged: what GRPO learns from.
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
    return {
        "reward": _mean([float(reward.value) for reward in rewarded if not isinstance(reward.value, Missing)]),
        "reward_se": _mean([reward.standard_error for reward in rewarded]),
        "spread": _mean([float(spread) for spread in spreads]),
        "missing": float(sum(rollout.reward.missing for rollout in rollouts)),
        "turn_tokens": _mean([float(len(rollout.turn.token_ids)) for rollout in rollouts if rollout.turn.token_ids]),
        **{name: _mean(scores) for name, scores in sorted(values.items())},
        **{f"ending/{name}": count / len(futures) for name, count in sorted(endings.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _from_leader(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; where rank 0 fails, every rank raises instead of waiting for it."""
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:
            failure, box[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise RuntimeError(f"rank 0 failed: {box[1]}")
    return box[0]
