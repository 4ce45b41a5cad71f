"""The sets of data.eval: which tasks, how often each is played, by which user and under which budgets."""

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
    """An entry of data.eval; where that is a single source, the one set has no name."""

    preferred: ClassVar[tuple[str, ...]] = ("validation", "test", "train")

    name: str = option("", "part of the names of its metrics and files; empty: the last part of source")
    tasks: int | None = option(None, "the first so many rows; none: train.eval_tasks", ge=1)
    samples: int = option(1, "conversations about each task", ge=1)
    temperature: float | None = option(None, "sampling temperature, 0: greedy; none: that of training", ge=0)
    user: str | None = option(None, "user of every task, as user.name; none: that of training")
    max_user_turns: int | None = option(None, "as in rollout; none: that of training", ge=1)
    max_assistant_turns: int | None = option(None, "as in rollout; none: that of training", ge=1)
    max_messages: int | None = option(None, "as in rollout; none: that of training", ge=2)
    max_new_tokens: int | None = option(None, "token budget of every turn; none: those of training", ge=1)

    @property
    def digest(self) -> str:
        """Of the settings under which a task is played: other samples, users or budgets have another."""
        return hashlib.sha256(repr(replace(self, name="", tasks=None)).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        """What messages call it."""
        return f"data.eval[{self.name}]" if self.name else "data.eval"


def evaluation_sets(config: Config) -> tuple[EvaluationSet, ...]:
    """The sets of data.eval that have rows to be used. ConfigError names the entry that is refused."""
    given = config.data.eval
    if given is None:
        return ()
    sets = sources(given, "data.eval", EvaluationSet)
    if isinstance(given, list):
        sets = [replace(one, name=one.title) for one in sets]
    names = [one.name for one in sets]
    for number, name in enumerate(names):
        setting = f"data.eval[{number}]" if isinstance(given, list) else "data.eval"
        allowed = bool(_NAME.fullmatch(name)) or (not isinstance(given, list) and not name)
        require(allowed, f"{setting}.name={name}: use letters, digits and - . _ only")
        require(names.count(name) == 1, f"data.eval: two sets are called {name}; give each a name of its own")
    limited = (replace(one, tasks=one.tasks or config.train.eval_tasks) for one in sets)
    return tuple(one for one in limited if one.tasks)


def settings_of(config: Config, one: EvaluationSet) -> Config:
    """The settings under which the set's conversations are played: each as one rollout with one future.

    A malformed turn is played on as a user would see it, and so is what reward.mode=single_turn would end.
    """
    rollout, reward = config.rollout, config.reward
    rollout = replace(
        rollout,
        futures=1,
        routing_replay=False,
        turn=_sampling(rollout.turn, one),
        future=_sampling(rollout.future, one),
        max_user_turns=one.max_user_turns or rollout.max_user_turns,
        max_assistant_turns=one.max_assistant_turns or rollout.max_assistant_turns,
        max_messages=one.max_messages or rollout.max_messages,
    )
    return replace(
        config,
        rollout=rollout,
        train=replace(config.train, rollouts_per_prompt=one.samples),
        reward=replace(reward, malformed=None, mode="mr" if reward.mode == "single_turn" else reward.mode),
        user=replace(config.user, name=one.user or config.user.name),
    )


def _sampling(sampling: SamplingConfig, one: EvaluationSet) -> SamplingConfig:
    temperature = sampling.temperature if one.temperature is None else one.temperature
    return replace(sampling, temperature=temperature, max_new_tokens=one.max_new_tokens or sampling.max_new_tokens)
