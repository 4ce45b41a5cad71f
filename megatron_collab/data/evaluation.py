"""The sets of data.eval: their tasks, how often each is played, by which user and under which budgets."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_collab.config import Config, SamplingConfig, option, require
from megatron_collab.data.sources import Source, sources

_NAME = re.compile(r"[\w.-]+")  # part of the names of files and metrics


@dataclass(frozen=True)
class EvaluationSet(Source):
    """An entry of data.eval. If data.eval is a single source, its set has no name."""

    preferred: ClassVar[tuple[str, ...]] = ("validation", "test", "train")

    name: str = option("", "its name in metrics and files; empty: the last part of source")
    tasks: int | None = option(None, "number of rows, from the first; null: train.eval_tasks", ge=1)
    samples: int = option(1, "conversations per task", ge=1)
    temperature: float | None = option(None, "sampling temperature, 0: greedy; null: that of training", ge=0)
    user: str | None = option(None, "user of every task, as user.name; null: that of training")
    max_user_turns: int | None = option(None, "as in rollout; null: that of training", ge=1)
    max_assistant_turns: int | None = option(None, "as in rollout; null: that of training", ge=1)
    max_messages: int | None = option(None, "as in rollout; null: that of training", ge=2)
    max_new_tokens: int | None = option(None, "token budget of every turn; null: those of training", ge=1)

    @property
    def digest(self) -> str:
        """Digest of the settings under which a task is played, such as samples, user and budgets."""
        return hashlib.sha256(repr(replace(self, name="", tasks=None)).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        """Its name in messages."""
        return f"data.eval[{self.name}]" if self.name else "data.eval"


def evaluation_sets(config: Config) -> tuple[EvaluationSet, ...]:
    """The sets of data.eval that have tasks to play. Raises ConfigError naming the invalid entry."""
    entries = config.data.eval
    if entries is None:
        return ()
    sets = sources(entries, "data.eval", EvaluationSet)
    if isinstance(entries, list):
        sets = [replace(eval_set, name=eval_set.title) for eval_set in sets]
    names = [eval_set.name for eval_set in sets]
    for number, name in enumerate(names):
        setting = f"data.eval[{number}]" if isinstance(entries, list) else "data.eval"
        allowed = bool(_NAME.fullmatch(name)) or (not isinstance(entries, list) and not name)
        require(allowed, f"{setting}.name={name}: use letters, digits and - . _ only")
        require(names.count(name) == 1, f"data.eval: two sets are named {name}; rename one")
    limited = (replace(eval_set, tasks=eval_set.tasks or config.train.eval_tasks) for eval_set in sets)
    return tuple(eval_set for eval_set in limited if eval_set.tasks)


def settings_of(config: Config, eval_set: EvaluationSet) -> Config:
    """The settings under which the conversations of a set are played: each is one rollout with one future.

    Conversations that end early in training, by a malformed turn or reward.mode=single_turn, are played on as a user
    would see them.
    """
    rollout, reward = config.rollout, config.reward
    rollout = replace(
        rollout,
        futures=1,
        routing_replay=False,
        turn=_sampling(rollout.turn, eval_set),
        future=_sampling(rollout.future, eval_set),
        max_user_turns=eval_set.max_user_turns or rollout.max_user_turns,
        max_assistant_turns=eval_set.max_assistant_turns or rollout.max_assistant_turns,
        max_messages=eval_set.max_messages or rollout.max_messages,
    )
    return replace(
        config,
        rollout=rollout,
        train=replace(config.train, rollouts_per_prompt=eval_set.samples),
        reward=replace(reward, malformed=None, mode="mr" if reward.mode == "single_turn" else reward.mode),
        user=replace(config.user, name=eval_set.user or config.user.name),
    )


def _sampling(sampling: SamplingConfig, eval_set: EvaluationSet) -> SamplingConfig:
    temperature = sampling.temperature if eval_set.temperature is None else eval_set.temperature
    return replace(sampling, temperature=temperature, max_new_tokens=eval_set.max_new_tokens or sampling.max_new_tokens)
