"""Interface of players: how a group is played, from a task to rollouts with futures, scores and rewards."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.config import Config, Extension, build, require
from megatron_collab.config.extension import resolve
from megatron_collab.config.schema import PLAYERS
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.rollout.tools.toolbox import Toolbox
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Group, Missing, Task

if TYPE_CHECKING:  # settings are checked without LiteLLM and Ray, which take seconds
    from megatron_collab.inference.assistant import Assistant, Renderer
    from megatron_collab.reward.workers import RewardClient
    from megatron_collab.rollout.users import Users

SETTING = "rollout.player"


class Player(Extension, ABC):
    """Base of the players that rollout.player may name as package.module:Class.

    Every conversation worker has a player for training and another for each set of data.eval, whose settings are in
    its `config`. A player plays many groups at once, so it keeps nothing of a group in its attributes:

    policy      samples a turn: `await policy.generate(prompt_ids, …)` returns a Turn (inference/assistant.py)
    renderer    token ids of prompts: `first` of the task's messages, `next` of further ones
    users       `users.make(task, name)` creates the user of a conversation; each needs another name
    rewards     `await rewards.score(task, conversation)` returns the score of every metric that applies to the task
    reward      the function of reward.mode: `reward(futures)` returns a Reward
    tools       `async with tools.open(task)` gives the tools of a conversation, whose `fork` continues them in a future
    config      the settings; `rollout` is config.rollout
    options     rollout.player_options as an instance of the class's Options
    counters    counts by name, recorded as count/NAME
    """

    # Parts of a conversation that are played one after the other, each of up to rollout.deadline. If no group ends in
    # the time that this allows, the run counts as hung.
    phases: ClassVar[int] = 2

    def __init__(
        self, policy: Assistant, renderer: Renderer, users: Users, rewards: RewardClient, config: Config
    ) -> None:
        super().__init__(build(self.Options, config.rollout.player_options, f"{SETTING}_options."))
        self.policy, self.renderer, self.users, self.rewards = policy, renderer, users, rewards
        self.config, self.rollout = config, config.rollout
        self.tools = Toolbox(config.rollout, policy)
        self.reward = reward_function(config.reward)
        self.counters: Counter[str] = Counter()
        self.candidate_players: Mapping[str, Player] = {}  # by assistant name, if build.assistants is set

    @abstractmethod
    async def play(self, task: Task, stream: str) -> Group:
        """Play train.rollouts_per_prompt rollouts of `task`, whose rewards are compared with each other.

        `stream` names step and task. Every random draw must follow from it (`seed_of` in conversation.py), so that an
        interrupted run plays the same again.

        Returns the Group of the task, with its opening if the user opened the conversation. Of each Rollout:

        start    a Conversation whose `turns` are trained. A Turn has the token ids of its prompt and of the reply,
                 exactly as they were sampled, with the log-probability of each sampled token and the version of the
                 weights that sampled it, as `policy.generate` returns them. The prompt of a later turn continues the
                 tokens before it, unless rollout.strip_thoughts.
        futures  at least one Future: a conversation that continues `start`, or `start` itself, and its scores. They
                 are recorded in the transcripts. With rollout.train_turns=all their later turns are trained too.
        reward   a Reward for all turns of `start`; with rollout.futures=0, reward.turn_credit divides it over them. If
                 there is none, its value is Missing, never 0, and the rollout is dropped.

        If a user, a tool or the engine fails, end the conversation with Ending.ERROR or DEADLINE and the reason; its
        scores are then Missing. Any exception ends the run.
        """


def player_class(config: Config) -> type[Player]:
    """The class of the run's player. Raises ConfigError if the setting names no usable class."""
    return _class(PLAYERS.get(config.rollout.player, config.rollout.player))


@cache
def _class(spec: str) -> type[Player]:
    player: type[Player] = resolve(spec, SETTING, Player)
    missing = ", ".join(sorted(player.__abstractmethods__))
    require(not missing, f"{SETTING}={spec}: the class has no {missing}; define it, or set {SETTING}=futures")
    return player


def check_player(config: Config) -> None:
    """Raises ConfigError if rollout.player is no player, or has no such settings."""
    build(player_class(config).Options, config.rollout.player_options, f"{SETTING}_options.")


def check_group(group: Any, config: Config) -> Group:
    """The group that the run's player returned. Raises RunStopped if it cannot be trained on."""
    fault = _group_fault(group)
    if fault is not None:
        raise RunStopped(f"{SETTING}={config.rollout.player}: {fault}")
    checked: Group = group
    return checked


def _group_fault(group: Any) -> str | None:
    if not isinstance(group, Group):
        return f"returned {type(group).__name__}; return a Group"
    if not group.rollouts:
        return "returned a group without rollouts; return one whose reward is Missing"
    for rollout in group.rollouts:
        value = rollout.reward.value
        if not rollout.futures:
            return "returned a rollout without futures; give its start as its only future"
        if isinstance(value, Missing):
            continue
        if not math.isfinite(value):
            return f"returned a reward of {value}; give a finite number, or Missing"
        if not rollout.start.turns:
            return "returned a reward without a trained turn; give turns of the policy, or Missing"
    return None
