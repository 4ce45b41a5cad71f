"""Interface of players: how a group is played, from a task to rollouts with futures, scores and rewards.

A PlaySpec has the settings of a player, and its class; a Player is given it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.data.assistants import CandidateAssistant, candidate_assistants
from megatron_collab.data.chat_template import PromptSpec
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.tools.toolbox import Toolbox, ToolSpec
from megatron_collab.rollout.users import UserDirectory
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import Extension, LlmConfig, Resolved, RolloutConfig, SamplingConfig, build, lookup
from megatron_collab.settings.schema import PLAYERS, AssistantConfig
from megatron_collab.types import Group, Missing, Task

if TYPE_CHECKING:  # settings are checked without LiteLLM and Ray, which take seconds
    from megatron_collab.inference.assistant import Assistant, Renderer
    from megatron_collab.reward.workers import RewardClient
    from megatron_collab.rollout.users import Users

SETTING = "rollout.player"


class Player(Extension, ABC):
    """Base of the players that rollout.player may name as package.module:Class.

    Every conversation worker has a player for training and another for each set of data.eval, whose settings are in
    its `spec`. A player plays many groups at once, so it keeps nothing of a group in its attributes:

    policy      samples a turn: `await policy.generate(prompt_ids, …)` returns a Turn (inference/assistant.py)
    renderer    token ids of prompts: `first` of the task's messages, `next` of further ones
    users       `users.make(task, name)` creates the user of a conversation; each needs another name
    rewards     `await rewards.future(task, conversation)` returns the Future: the ended conversation with the score of
                every metric that applies to the task, and why; `score` returns only the scores
    reward      that of the run: `reward.formula(futures)`, the function of reward.mode, returns a Reward
    tools       `async with tools.open(task)` gives the tools of a conversation, whose `fork` continues them in a future
    spec        the settings, as a PlaySpec; `rollout` (limits and sampling) and `reward` are parts of it
    options     rollout.player_options as an instance of the class's Options
    counters    counts by name, recorded as count/NAME
    """

    # Parts of a conversation that are played one after the other, each of up to rollout.deadline. If no group ends in
    # the time that this allows, the run counts as hung.
    phases: ClassVar[int] = 2

    def __init__(
        self, policy: Assistant, renderer: Renderer, users: Users, rewards: RewardClient, spec: PlaySpec
    ) -> None:
        super().__init__(spec.player_options)
        self.policy, self.renderer, self.users, self.rewards = policy, renderer, users, rewards
        self.spec, self.rollout, self.reward = spec, spec.rollout, spec.reward
        self.tools = Toolbox(spec.tools, spec.rollout.tool_timeout, policy)
        self.counters: Counter[str] = Counter()
        self.candidate_players: Mapping[str, Player] = {}  # by assistant name

    @abstractmethod
    async def play(self, task: Task, stream: str) -> Group:
        """Play `spec.rollouts` rollouts of `task`, whose rewards are compared with each other.

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


@dataclass(frozen=True)
class PlaySpec(Resolved):
    """How the groups of training are played and rewarded; `for_set` gives how those of a set of data.eval are.

    `rollouts`: of a task. `player`: its name or class path, with `player_settings`. `rollout`: limits and sampling of
    conversations. `llm`: limits of the calls of all language models. `assistant`: the language model in place of the
    policy, if any. `assistants`: by name, the models that play the rollouts in turn, None for the policy or
    `assistant`. `proactive_prompt`: system message of the first `proactive_share` of the rollouts. `experts_of`: turns
    whose experts are recorded, as in rollout.train_turns. `teacher_context`: what a teacher is told of the tasks, as in
    algo.teacher.context.
    """

    run_dir: Path
    seed: int
    rollouts: int
    player: str
    player_settings: Mapping[str, Any]
    rollout: RolloutConfig
    prompt: PromptSpec
    reward: RewardSpec
    users: UserDirectory
    tools: ToolSpec
    llm: LlmConfig
    assistants: Mapping[str, AssistantConfig | None]
    assistant: AssistantConfig | None = None
    proactive_share: float = 0.0
    proactive_prompt: str = ""
    experts_of: str | None = None
    teacher_context: str | None = None

    @cached_property
    def player_class(self) -> type[Player]:
        kind: type[Player] = lookup(self.player, SETTING, PLAYERS, Player)
        return kind

    @cached_property
    def player_options(self) -> Any:
        return build(self.player_class.Options, self.player_settings, f"{SETTING}_options.")

    @property
    def candidates(self) -> list[CandidateAssistant]:
        """The assistant of each rollout, by number."""
        return candidate_assistants(list(self.assistants), self.rollouts, self.proactive_share)

    def later_turns(self, messages: int = 1) -> int:
        """The most turns of a conversation after its first one; its task has `messages` of user and assistant."""
        rollout = self.rollout
        if self.reward.mode == "single_turn":
            return 0
        later = min(rollout.max_user_turns, rollout.max_assistant_turns - 1)
        return min(later, max(0, (rollout.max_messages - messages - 1) // 2)) if rollout.max_messages else later

    def judge_calls(self, messages: int = 1) -> int:
        """The most calls of judges for the scores of a conversation; a metric that scores turns asks for each."""
        turns = 1 + self.later_turns(messages)
        metrics = self.reward.metrics.values()
        return sum(metric.judge_calls * (turns if metric.scores_turns else 1) for metric in metrics)

    def for_set(self, eval_set: EvaluationSet) -> PlaySpec:
        """How the conversations of a set are played: each is one rollout with one future.

        Conversations that end early in training, by a malformed turn or reward.mode=single_turn, are played on as a
        user would see them.
        """
        rollout = replace(
            self.rollout,
            futures=1,
            turn=_sampling(self.rollout.turn, eval_set),
            future=_sampling(self.rollout.future, eval_set),
            max_user_turns=eval_set.max_user_turns or self.rollout.max_user_turns,
            max_assistant_turns=eval_set.max_assistant_turns or self.rollout.max_assistant_turns,
            max_messages=eval_set.max_messages or self.rollout.max_messages,
        )
        reward, users = self.reward.played_on(), self.users.for_set(eval_set.user)
        samples = eval_set.samples
        of_training: dict[str, Any] = {"experts_of": None, "teacher_context": None}
        return replace(self, rollouts=samples, rollout=rollout, reward=reward, users=users, **of_training)


def _sampling(sampling: SamplingConfig, eval_set: EvaluationSet) -> SamplingConfig:
    temperature = sampling.temperature if eval_set.temperature is None else eval_set.temperature
    return replace(sampling, temperature=temperature, max_new_tokens=eval_set.max_new_tokens or sampling.max_new_tokens)


def check_group(group: Any, player: str) -> Group:
    """The group that rollout.player=`player` returned. Raises RunStopped if it cannot be trained on."""
    fault = _group_fault(group)
    if fault is not None:
        raise RunStopped(f"{SETTING}={player}: {fault}")
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
