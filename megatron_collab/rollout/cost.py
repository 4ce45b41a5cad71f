"""What a plan asks of language models and what that costs: at most, by settings alone, and by the means of a pilot.

Bounds hold where every conversation, message and answer is as long as it may be. Calls that are asked again (broken
answers, refused messages of users) and rounds of tool calls come on top.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_collab.config import Config, EndpointConfig, UserConfig
from megatron_collab.data.evaluation import EvaluationSet, settings_of
from megatron_collab.llm.endpoint import of_run, token_budget
from megatron_collab.llm.price import Prices, tokens_at_most
from megatron_collab.llm.recording import Call
from megatron_collab.reward import metrics
from megatron_collab.types import Task

ROLES = ("assistant", "user", "judge")
INSTRUCTIONS = 1024  # tokens that a prompt is taken to have beside task and conversation; ours have a third of them


@dataclass(frozen=True)
class RoleCalls:
    """How often a role is asked, and how many messages of conversations all these calls read together."""

    calls: int = 0
    heard: int = 0

    def __add__(self, other: RoleCalls) -> RoleCalls:
        return RoleCalls(self.calls + other.calls, self.heard + other.heard)

    def __mul__(self, times: int) -> RoleCalls:
        return RoleCalls(self.calls * times, self.heard * times)


@dataclass(frozen=True)
class Calls:
    """Replies of the assistant, messages of users, judgements: at most so many."""

    assistant: RoleCalls = RoleCalls()
    user: RoleCalls = RoleCalls()
    judge: RoleCalls = RoleCalls()

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.assistant + other.assistant, self.user + other.user, self.judge + other.judge)

    def __mul__(self, times: int) -> Calls:
        return Calls(self.assistant * times, self.user * times, self.judge * times)

    def __str__(self) -> str:
        asked = f"{self.assistant.calls} replies, {self.user.calls} messages of users, {self.judge.calls} judgements"
        return f"at most {asked}"


_OPENING = Calls(user=RoleCalls(1))


def of_group(config: Config, said: int = 1) -> Calls:
    """A group of train.rollouts_per_prompt rollouts, whose task has `said` messages of user and assistant."""
    rollout = config.rollout
    later = min(rollout.max_user_turns, rollout.max_assistant_turns - 1)
    if rollout.max_messages:
        later = min(later, max(0, (rollout.max_messages - said - 1) // 2))
    trained = config.train.rollouts_per_prompt
    played = trained * max(1, rollout.futures)
    if config.reward.mode == "single_turn":
        later, played = 0, trained
    kinds = [metrics.split(name, config.reward.metrics.get(name, {})) for name in config.reward.weights]
    judged = sum(kind.judged(options) for kind, options in kinds)
    first = said + 1  # messages that the user's first answer reads
    return Calls(
        RoleCalls(trained, trained * said)
        + RoleCalls(later, sum(first + 2 * turn + 1 for turn in range(later))) * played,
        RoleCalls(later, sum(first + 2 * turn for turn in range(later))) * played,
        RoleCalls(1, first + 2 * later) * played * judged,
    )


def of_turns(config: Config) -> list[Calls]:
    """The groups of a conversation that is built, turn by turn; rollout.max_messages is set."""
    return [of_group(config, 1 + 2 * turn) for turn in range((config.rollout.max_messages or 0) // 2)]


def of_building(config: Config, tasks: int) -> Calls:
    """As many conversations that are built turn by turn, each opened by its user."""
    return sum(of_turns(config), _OPENING) * tasks


def of_evaluation(config: Config, one: EvaluationSet, tasks: int) -> Calls:
    """An evaluation of so many tasks of a set of data.eval, each opened by its user."""
    return (of_group(settings_of(config, one)) + _OPENING) * tasks


def of_training(config: Config, steps: int) -> Calls:
    """So many steps, with all the groups that algo.dynamic_sampling may replace; without their evaluations."""
    if config.train.stage != "rl":
        return Calls()
    return (of_group(config) + _OPENING) * (steps * config.train.prompts_per_step * (1 + config.algo.dynamic_sampling))


@dataclass(frozen=True)
class Cost:
    """USD of the models that have a price, those that have none, and what `usd` may be off by."""

    usd: float = 0.0
    unpriced: tuple[str, ...] = ()
    error: float = 0.0

    def __str__(self) -> str:
        within = f" ± {self.error:.2g}" if self.error else ""
        without = f", and what {', '.join(self.unpriced)} costs, whose price is not known" if self.unpriced else ""
        return f"{self.usd:.4g}{within} USD{without}"


Models = Mapping[str, Sequence[EndpointConfig]]  # that may be asked, by role; none where nothing is paid for


def at_most(calls: Calls, models: Models, config: Config, task_tokens: float) -> Cost:
    """What `calls` about tasks of so many tokens cost at most, each of the dearest model of its role."""
    prices = Prices(config.llm.prices)
    replies = [config.rollout.turn.max_new_tokens, config.rollout.future.max_new_tokens]
    replies += map(token_budget, models.get("assistant", ()))
    said = map(token_budget, models.get("user", ()))
    message = (max(replies) + max(said, default=UserConfig.max_tokens or 0)) / 2  # user and assistant take turns
    usd, unpriced = 0.0, dict[str, None]()
    for role in ROLES:
        asked: RoleCalls = getattr(calls, role)
        prompts = math.ceil(asked.calls * (INSTRUCTIONS + task_tokens) + asked.heard * message)
        dearest = 0.0
        for endpoint in models.get(role, ()) if asked.calls else ():
            model = str(endpoint.model)
            found = 0.0 if of_run(model) else prices.at_most(model, prompts, asked.calls * token_budget(endpoint))
            dearest = max(dearest, found or 0.0)
            unpriced.update(dict.fromkeys([model] if found is None else []))
        usd += dearest
    return Cost(usd, tuple(unpriced))


def task_tokens(tasks: Sequence[Task]) -> float:
    """Mean tokens, an upper estimate, of what tasks give to a prompt: goal, answer, messages."""
    texts = ((task.goal, task.answer, *(message.content for message in task.messages)) for task in tasks)
    return float(np.mean([tokens_at_most(*each) for each in texts])) if tasks else 0.0


@dataclass(frozen=True)
class Means:
    """What a call of a role took in a pilot of `calls`: tokens, seconds, USD (None: of some it is not known).

    `error`: the standard error of the USD, over the groups of the pilot, whose calls are not independent.
    """

    calls: int
    prompt_tokens: float
    answer_tokens: float
    seconds: float
    usd: float | None
    error: float


def role_of(call: Call) -> str | None:
    """Who was asked, by the form of a recorded question; None for the model of a reward model.

    A user of one's own that asks for text without a form counts as an assistant.
    """
    if "schema" not in call.question:
        return None
    if call.question["schema"] is None:
        return "assistant"
    return "user" if call.question["sample"] is None else "judge"


def measured(recorded: Iterable[Call]) -> dict[str, Means]:
    """By role the means of a recorded pilot (llm.record); cached answers count, and cost nothing."""
    by_role: dict[str, dict[str, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for call in recorded:
        if role := role_of(call):
            by_role[role][call.name.partition("/")[0]].append(call)
    return {role: _means(list(by_role[role].values())) for role in ROLES if role in by_role}


def _means(groups: Sequence[Sequence[Call]]) -> Means:
    taken = [call.taken for group in groups for call in group]
    usd = None if any(one.usd is None for one in taken) else sum(one.usd or 0.0 for one in taken) / len(taken)
    error = 0.0
    if usd is not None and len(groups) > 1:  # of a ratio of two sums over the groups (Cochran 1977, section 2.11)
        off = [sum(call.taken.usd or 0.0 for call in group) - usd * len(group) for group in groups]
        error = float(np.std(off, ddof=1)) * math.sqrt(len(groups)) / len(taken)
    sums = ("prompt_tokens", "answer_tokens", "seconds")
    prompt, answer, seconds = (sum(getattr(one, name) for one in taken) / len(taken) for name in sums)
    return Means(len(taken), prompt, answer, seconds, usd, error)


def forecast(calls: Calls, pilot: Mapping[str, Means], of_pilot: Calls) -> Cost:
    """What a plan of at most `calls` costs, by a pilot that might have made `of_pilot` and has measured `pilot`.

    Conversations end as early as in the pilot: of the calls that there may be at most, the same share is made. `error`
    is one standard error.
    """
    usd, variance, unpriced = 0.0, 0.0, list[str]()
    for role in ROLES:
        asked, might = getattr(calls, role).calls, getattr(of_pilot, role).calls
        means = pilot.get(role)
        if means is None or not (asked and might):
            continue
        expected = asked * means.calls / might
        if means.usd is None:
            unpriced.append(f"the {role}")
            continue
        usd += expected * means.usd
        variance += (expected * means.error) ** 2
    return Cost(usd, tuple(unpriced), math.sqrt(variance))


def still_to_play(ended: Sequence[int], playing: Sequence[int], weights: Sequence[float]) -> float:
    """The weight of the turns that conversations which are built still need, with half of those that are being played.

    `ended`: the turns of each that has ended, of which there are some; `playing`: those that each other one has behind
    it; `weights`: of a turn by its number, what it costs in relation to others. That a conversation goes on after a
    turn is as likely as it was so far (Kaplan and Meier 1958); where none got as far, as likely as after the others.
    """
    most = len(weights)
    stops = np.bincount(ended, minlength=most + 1)[1:]  # by the number of its turns, how often a conversation ended
    got = np.array([sum(turns > turn for turns in (*ended, *playing)) for turn in range(most)])  # past this turn
    goes_on = np.where(got > 0, 1 - stops / np.maximum(got, 1), 1 - stops.sum() / max(1, got.sum()))
    left = [0.0] * (most + 1)  # of a conversation from this turn on
    for turn in reversed(range(most)):
        left[turn] = weights[turn] + goes_on[turn] * left[turn + 1]
    return float(sum(left[turns] - weights[turns] / 2 for turns in playing))
