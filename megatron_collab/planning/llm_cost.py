"""Language-model calls of a plan and their cost: an upper bound from the settings, and a forecast from a pilot.

The bounds assume that every conversation, message and answer has its maximum length. They exclude repeated calls
(malformed answers, refused user messages) and rounds of tool calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_collab.config import Config, PlayConfig
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.llm.endpoint import served_by_run, token_budget
from megatron_collab.llm.price import Prices, tokens_at_most
from megatron_collab.llm.recording import Call, Usage
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.settings import EndpointConfig, UserConfig
from megatron_collab.types import Task

ROLES = ("assistant", "user", "judge")
INSTRUCTIONS = 1024  # assumed prompt tokens besides task and conversation; the built-in prompts have a third of it


@dataclass(frozen=True)
class RoleCalls:
    """The number of calls of a role, and the total number of conversation messages in their prompts."""

    calls: int = 0
    messages_read: int = 0

    def __add__(self, other: RoleCalls) -> RoleCalls:
        return RoleCalls(self.calls + other.calls, self.messages_read + other.messages_read)

    def __mul__(self, times: int) -> RoleCalls:
        return RoleCalls(self.calls * times, self.messages_read * times)


@dataclass(frozen=True)
class Calls:
    """Upper bounds of the replies of the assistant, messages of users and judgments."""

    assistant: RoleCalls = RoleCalls()
    user: RoleCalls = RoleCalls()
    judge: RoleCalls = RoleCalls()

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.assistant + other.assistant, self.user + other.user, self.judge + other.judge)

    def __mul__(self, times: int) -> Calls:
        return Calls(self.assistant * times, self.user * times, self.judge * times)

    def __str__(self) -> str:
        counts = f"{self.assistant.calls} replies, {self.user.calls} user messages, {self.judge.calls} judgments"
        return f"at most {counts}"


_OPENING = Calls(user=RoleCalls(1))


def group_calls(play: PlaySpec, messages: int = 1) -> Calls:
    """Calls of a group; its task has `messages` of user and assistant."""
    later, trained = play.later_turns(messages), play.rollouts
    played = trained * (1 if play.reward.mode == "single_turn" else max(1, play.rollout.futures))
    messages_before_answer = messages + 1  # messages that the user's first answer reads
    return Calls(
        RoleCalls(trained, trained * messages)
        + RoleCalls(later, sum(messages_before_answer + 2 * turn + 1 for turn in range(later))) * played,
        RoleCalls(later, sum(messages_before_answer + 2 * turn for turn in range(later))) * played,
        RoleCalls(1, messages_before_answer + 2 * later) * played * play.judge_calls(messages),
    )


def building_calls(play: PlaySpec, tasks: int) -> Calls:
    """Calls to build a conversation for each of `tasks` tasks, each opened by its user; needs rollout.max_messages."""
    turns = (group_calls(play, 1 + 2 * turn) for turn in range((play.rollout.max_messages or 0) // 2))
    return sum(turns, _OPENING) * tasks


def evaluation_calls(play: PlaySpec, eval_set: EvaluationSet, tasks: int) -> Calls:
    """Calls to evaluate `tasks` tasks of a set of data.eval, each opened by its user."""
    return (group_calls(play.for_set(eval_set)) + _OPENING) * tasks


def training_calls(config: Config, play: PlaySpec | None, steps: int) -> Calls:
    """Calls of `steps` steps, with all groups that algo.dynamic_sampling may replace; without evaluations."""
    groups = steps * config.train.prompts_per_step * (1 + config.algo.dynamic_sampling)
    return (group_calls(play) + _OPENING) * groups if play else Calls()


@dataclass(frozen=True)
class Cost:
    """USD of the models with a known price, and the models without one."""

    usd: float = 0.0
    unpriced: tuple[str, ...] = ()

    def __str__(self) -> str:
        unknown = f", plus calls of {', '.join(self.unpriced)}, whose price is unknown" if self.unpriced else ""
        return f"{self.usd:.4g} USD{unknown}"


Models = Mapping[str, Sequence[EndpointConfig]]  # paid models by role; empty if nothing is paid for


def cost_bound(calls: Calls, models: Models, config: PlayConfig, task_tokens: float) -> Cost:
    """Upper bound of the cost of `calls`, priced at the most expensive model of each role.

    `task_tokens`: mean tokens of a task, see `task_tokens`.
    """
    prices = Prices(config.llm.prices)
    replies = [config.rollout.turn.max_new_tokens, config.rollout.future.max_new_tokens]
    replies += map(token_budget, models.get("assistant", ()))
    user_budgets = map(token_budget, models.get("user", ()))
    message_tokens = (max(replies) + max(user_budgets, default=UserConfig.max_tokens or 0)) / 2  # they alternate
    usd, unpriced = 0.0, dict[str, None]()
    for role in ROLES:
        role_calls: RoleCalls = getattr(calls, role)
        prompts = math.ceil(role_calls.calls * (INSTRUCTIONS + task_tokens) + role_calls.messages_read * message_tokens)
        dearest = 0.0
        for endpoint in models.get(role, ()) if role_calls.calls else ():
            model = str(endpoint.model)
            answers = role_calls.calls * token_budget(endpoint)
            price = 0.0 if served_by_run(model) else prices.at_most(model, prompts, answers)
            dearest = max(dearest, price or 0.0)
            unpriced.update(dict.fromkeys([model] if price is None else []))
        usd += dearest
    return Cost(usd, tuple(unpriced))


def task_tokens(tasks: Sequence[Task]) -> float:
    """Mean tokens (an upper estimate) that a task adds to a prompt: goal, answer, messages."""
    texts = ((task.goal, task.answer, *(message.content for message in task.messages)) for task in tasks)
    return float(np.mean([tokens_at_most(*parts) for parts in texts])) if tasks else 0.0


@dataclass(frozen=True)
class Means:
    """Means per call of a role in a pilot of `calls` calls: prompt tokens, and USD (None if some price is unknown)."""

    calls: int
    prompt_tokens: float
    usd: float | None


def role_of(call: Call) -> str | None:
    """The role of a recorded call, derived from the form of its question; None for a reward model.

    A custom user that requests text without an answer schema counts as an assistant.
    """
    if "schema" not in call.question:
        return None
    if call.question["schema"] is None:
        return "assistant"
    return "user" if call.question["sample"] is None else "judge"


def role_means(recorded: Iterable[Call]) -> dict[str, Means]:
    """Means of a recorded pilot (llm.record) by role; cached answers are included at no cost."""
    by_role: dict[str, list[Usage]] = defaultdict(list)
    for call in recorded:
        if role := role_of(call):
            by_role[role].append(call.taken)
    return {role: _means(by_role[role]) for role in ROLES if role in by_role}


def _means(usages: Sequence[Usage]) -> Means:
    count, prompt_tokens = len(usages), sum(usage.prompt_tokens for usage in usages)
    prices = [usage.usd for usage in usages if usage.usd is not None]
    return Means(count, prompt_tokens / count, sum(prices) / count if len(prices) == count else None)


def forecast(calls: Calls, pilot: Mapping[str, Means], pilot_calls: Calls) -> Cost:
    """Forecast the cost of a plan of at most `calls`, from a pilot's means and its upper bound `pilot_calls`.

    Assumes that conversations end as early as in the pilot: the same share of the possible calls is made.
    """
    usd, unpriced = 0.0, list[str]()
    for role in ROLES:
        planned, possible = getattr(calls, role).calls, getattr(pilot_calls, role).calls
        means = pilot.get(role)
        if means is None or not (planned and possible):
            continue
        if means.usd is None:
            unpriced.append(f"the {role}")
            continue
        usd += planned * means.calls / possible * means.usd
    return Cost(usd, tuple(unpriced))
