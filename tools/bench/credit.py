"""How well the advantages of each credit rule agree with the true advantages of turns, in the desk world.

`python tools/bench/credit.py [--groups 300] [--replays 200] [--smoke]`: scripted policies play groups of 8 trained
turns x 3 futures in text, without a model or server: one as in the supervised conversations, one that asks more. Each
rule is settings of `experiment=desk` and gives its advantages by the package's own code. Rules for whole conversations
get the first future of each trained turn.

The reference is the advantage of the turn, Q - V: mean utility of replays that begin after it, less that of replays
that begin before it, in which the policy draws the turn anew: another guess, questions for other slots, needless ones.
Replays keep the task, thus the kind of user; a guess counts with its chance to be right. They share no random numbers
with the conversations that the rules get. States whose texts differ in wording only share their replays.

Values: Spearman's rank correlation of credit and reference over the turns of all groups, by policy and rule: over
`first` turns of the conversations, `later` turns, and `all`. A turn that a rule does not train has the credit 0; rules
that train first turns only are not measured at later ones. `_se`: standard error, by bootstrap over the groups.
`agreement`: correlation r of two references from half of the replays each. The reference from all of them correlates
with the true advantage by about sqrt(2 r / (1 + r)) (Spearman 1910, Brown 1910), the most that a rule can reach.

What rules need besides rewards: `igpo` the chance of the answer before each turn, here the scripted policy's own; the
verdict of `next_user_turn` is how many unknown slots the user's next message told; the critic of `turn_gae` is a table
of mean returns in as many other groups (`Critic`). `refuel` has no advantages: of the pair that it learns from, each
turn has its reward less the other's, to which the gradient of the loss at the sampling policy is proportional.
--smoke: 40 groups, 8 replays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from statistics import fmean

import numpy as np
from scipy.stats import spearmanr

from megatron_collab.algo.advantages import advantage_class, with_advantages
from megatron_collab.algo.credit import CreditSpec, RewardFormula, samples_of
from megatron_collab.config import Config, compose
from megatron_collab.environments import desk, desk_language, desk_user
from megatron_collab.environments.desk_behavior import DeskBehavior
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_user import DeskGoal
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.reward.metrics import Metric
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Rollout,
    Sample,
    ScoredBatch,
    Task,
    Turn,
)

POLICIES = {"supervised": DeskBehavior(), "asking": DeskBehavior(asks=0.7, asks_needlessly=0.3, asks_again=0.6)}
WHOLE, TRAIN_LATER = "rollout.futures=0", "rollout.train_turns=all"
RULES: Mapping[str, tuple[str, ...]] = {  # settings of experiment=desk
    "last": (WHOLE, "reward.turn_credit=last"),
    "equal": (WHOLE, "reward.turn_credit=equal"),
    "reward_to_go": (WHOLE, "reward.turn_credit=reward_to_go"),
    "reward_to_go_paid": (WHOLE, "reward.turn_credit=reward_to_go"),  # the questions' costs are rewards of their turns
    "userrl_r2g": (WHOLE, "reward.turn_credit=userrl", "reward.turn_gamma=0.8"),
    "userrl_em": (WHOLE, "reward.turn_credit=userrl", "reward.turn_gamma=0.8", "+reward.turn_credit_options.turns=em"),
    "gigpo": (WHOLE, "reward.turn_credit=gigpo", "reward.turn_gamma=0.95"),
    "igpo": (WHOLE, "reward.turn_credit=igpo", "reward.weights.information_gain=1"),
    "next_user_turn": (
        WHOLE,
        "reward.turn_credit=next_user_turn",
        "+reward.turn_credit_options.verdict=new_facts",
        "reward.weights.new_facts=0",
        "reward.metrics.new_facts.metric=megatron_collab.environments.desk_metrics:DeskNewFacts",
    ),
    "turn_gae": (
        WHOLE,
        "algo=ppo",
        "algo.advantage=turn_gae",
        "algo.gamma=0.99",
        "algo.gae_lambda=0.9",
        "reward.turn_credit=immediate",
    ),
    "refuel": ("rollout.futures=3", "algo=refuel"),
    "mr_1": ("rollout.futures=1",),
    "mr_3": ("rollout.futures=3",),
    "mr_3_all": ("rollout.futures=3", TRAIN_LATER),
    "mr_3_all_unscaled": ("rollout.futures=3", TRAIN_LATER, "algo.advantage=dr_grpo"),
}
PAID = "reward_to_go_paid"
TURN_METRICS = {"igpo": "information_gain", "next_user_turn": "new_facts"}  # what the rule needs of each turn
TURNS = ("first", "later", "all")
ROLLOUTS, FUTURES = 8, 3
LIMIT = MODEL.turns + 1  # of the policy's turns, as in the experiment
COST = MODEL.costs[0]
BOOTSTRAPS = 100
MESSAGES = 100  # more than a conversation has: token ids of different conversations differ


def cost_of(text: str) -> float:
    return COST * len(desk_language.slots_asked(text))


def right_of(goal: DeskGoal, messages: Sequence[Message]) -> float:
    """The chance that the policy's last message is right."""
    last = next(message.content for message in reversed(messages) if message.role == "assistant")
    return desk_user.chance_right(goal, messages, desk_language.guess(last))


@dataclass
class Player:
    """Plays a policy about a task, and measures advantages of its turns by replays."""

    policy: DeskBehavior
    task: Task
    replays: int
    values: dict[object, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.goal = desk_user.read_goal(self.task.goal)

    def play_on(self, messages: Sequence[Message], seed: str) -> list[Message]:
        """The conversation continued to its end."""
        messages, rng = list(messages), random.Random(seed)
        while True:
            if messages[-1].role == "user":
                if desk_language.STOP in messages[-1].content:
                    return messages
                messages.append(self.policy.reply(rng, self.goal, messages))
            if desk_language.is_final(messages[-1].content) or self.turns(messages) == LIMIT:
                return messages
            messages.append(Message("user", desk_user.reply(self.goal, messages, seed)))

    def turns(self, messages: Sequence[Message]) -> int:
        """How many turns the policy has taken after the task's messages."""
        return (len(messages) - len(self.task.messages) + 1) // 2

    def answer_log_prob(self, messages: Sequence[Message]) -> float:
        """The policy's mean log-prob of a word of the task's answer, as its reply to `messages`."""
        known, state = desk_language.heard(messages).values, desk.state_of(self.goal, messages)
        chance = self.policy.chances(MODEL, state._replace(turn=len(messages) // 2))[None]
        for slot, value in self.goal.values.items():
            prior = MODEL.prior(slot)[desk_language.VALUES[slot].index(value)]
            chance *= float(known[slot] == value) if slot in known else prior
        return math.log(chance) / len(self.task.answer.split()) if chance else -math.inf

    def state(self, messages: Sequence[Message]) -> object:
        """What the return from here on depends on and the messages show: the state of a critic."""
        questions = sum(
            len(desk_language.slots_asked(message.content)) for message in messages[len(self.task.messages) :]
        )
        return desk.state_of(self.goal, messages), len(messages), self.turns(messages), questions

    def to_go(self, messages: Sequence[Message]) -> np.ndarray:
        """Utilities of replays from here on, without the cost of earlier questions: [replays]."""
        heard = desk_language.heard(messages)
        reply = messages[-1].content if messages[-1].role == "assistant" else None
        questions = sum(bool(desk_language.slots_asked(message.content)) for message in messages[:-1])
        state = reply, self.turns(messages), questions, *map(frozenset, (heard.answered.items(), heard.back))
        if state not in self.values:
            ends = [self.play_on(messages, f"{self.task.id}/{len(self.values)}/{i}") for i in range(self.replays)]
            costs = [sum(cost_of(m.content) for m in end[len(messages) :] if m.role == "assistant") for end in ends]
            self.values[state] = np.array([right_of(self.goal, end) for end in ends]) - costs
        return self.values[state]

    def advantages(self, before: Sequence[Message], reply: Message) -> tuple[float, float]:
        """The advantage of the turn `reply`, from each half of the replays."""
        gains = self.to_go([*before, reply]) - self.to_go(before) - cost_of(reply.content)
        return float(gains[::2].mean()), float(gains[1::2].mean())


@dataclass(frozen=True)
class Played:
    """A group in text: rollouts x futures; `start`: number of messages of the task."""

    player: Player
    futures: list[list[list[Message]]]

    @property
    def start(self) -> int:
        return len(self.player.task.messages)


def play_group(policy: DeskBehavior, task: Task, replays: int) -> Played:
    player, futures = Player(policy, task, replays), []
    for i in range(ROLLOUTS):
        turn = policy.reply(random.Random(f"{task.id} turn {i}"), player.goal, task.messages)
        start = [*task.messages, turn]
        futures.append([player.play_on(start, f"{task.id} future {i} {j}") for j in range(FUTURES)])
    return Played(player, futures)


def token(rollout: int, future: int, position: int, start: int) -> int:
    """The id of a message's only token; futures share those up to the trained turn."""
    return ((rollout * FUTURES + future * (position > start)) * MESSAGES) + position


def conversation(played: Played, rollout: int, future: int, stop: int | None = None) -> Conversation:
    """The future as a conversation with one token a message, up to `stop`."""
    messages, start = played.futures[rollout][future][:stop], played.start
    tokens = tuple(token(rollout, future, at, start) for at in range(len(messages)))
    turns = tuple(
        Turn(tokens[:at], tokens[at : at + 1], (0.0,), (0,), Finish.STOP, messages[at].content)
        for at in range(start, len(messages), 2)
    )
    rewards = (0.0,) * len(turns)
    return Conversation(tuple(messages), tokens, turns, rewards, None if stop else Ending.USER_DONE)


def group_of(played: Played, rule: str, futures: int, formula: RewardFormula) -> Group:
    """The group as the rule gets it; without futures each trained turn's first future is its conversation."""
    rollouts = []
    for i in range(ROLLOUTS):
        continued = [conversation(played, i, j) for j in range(max(futures, 1))]
        scored = tuple(future_of(played.player, ended, rule) for ended in continued)
        start = conversation(played, i, 0, played.start + 1) if futures else continued[0]
        if rule == PAID:
            for at, turn in enumerate(start.turns):
                start = start.add_reward(-cost_of(turn.text), at)
        rollouts.append(Rollout(start, scored, formula(scored)))
    return Group(played.player.task, tuple(rollouts))


def future_of(player: Player, played: Conversation, rule: str) -> Future:
    """The conversation with its scores, and those of turns that the rule needs."""
    scores = utility(player.goal, played, paid=rule == PAID)
    if rule not in TURN_METRICS:
        return Future(played, scores)
    before = [played.messages[:at] for at in played.turn_positions]
    played = replace(played, answer_log_probs={"": tuple(map(player.answer_log_prob, before))})
    name = TURN_METRICS[rule]
    turn_scores = asyncio.run(turn_metric(rule).score_turns(player.task, played))
    assert turn_scores is not None and not isinstance(turn_scores, Missing)
    return Future(played, scores | {name: sum(turn_scores)}, turn_scores={name: tuple(turn_scores)})


def utility(goal: DeskGoal, future: Conversation, paid: bool) -> dict[str, float]:
    """The score of desk_utility, without the costs if turns have paid them."""
    right = right_of(goal, future.messages)
    return {"desk_utility": right if paid else right - sum(cost_of(turn.text) for turn in future.turns)}


@cache
def config_of(rule: str) -> Config:
    return compose(["experiment=desk", *RULES[rule]])


class Critic:
    """Values of the states before turns: the mean of what conversations of `groups` brought from the same state on.

    That is the utility at their end, discounted by `gamma` per turn. A state that `groups` have not met has the mean
    over all their turns.
    """

    def __init__(self, groups: Sequence[Played], gamma: float) -> None:
        returns = defaultdict[object, list[float]](list)
        for played, i, j in product(groups, range(ROLLOUTS), range(FUTURES)):
            ended = conversation(played, i, j)
            reward = utility(played.player.goal, ended, paid=False)["desk_utility"]
            for following, at in enumerate(reversed(ended.turn_positions)):
                returns[played.player.state(ended.messages[:at])].append(gamma**following * reward)
        self._values = {state: fmean(values) for state, values in returns.items()}
        self._mean = fmean(value for values in returns.values() for value in values)

    def value(self, player: Player, messages: Sequence[Message]) -> float:
        return self._values.get(player.state(messages), self._mean)


def values_of(played: Played, sample: Sample, critic: Critic) -> np.ndarray:
    """The critic's values at the trained tokens of a whole conversation, float32 [S]."""
    values = np.zeros_like(sample.loss_mask)
    for index in np.flatnonzero(sample.loss_mask):
        rollout, at = divmod(int(sample.token_ids[index]), FUTURES * MESSAGES)
        values[index] = critic.value(played.player, played.futures[rollout][0][:at])
    return values


@cache
def turn_metric(rule: str) -> Metric:
    return reward_spec(config_of(rule).reward).metrics[TURN_METRICS[rule]].make(None)


def credits_of(groups: Sequence[Played], rule: str, critic_groups: Sequence[Played]) -> list[dict[int, float]]:
    """For each group the rule's advantages, by the turn's token; the groups are one batch.

    `critic_groups`: those that a critic learns from.
    """
    config = config_of(rule)
    formula, spec = reward_spec(config.reward).formula, CreditSpec(config.algo, config.reward, config.rollout)
    by_group = [
        samples_of(group_of(played, rule, config.rollout.futures, formula), spec, number, formula)
        for number, played in enumerate(groups)
    ]
    numbers = [number for number, samples in enumerate(by_group) for _ in samples]
    samples, values = tuple(sample for samples in by_group for sample in samples), None
    if advantage_class(config.algo.advantage).critic:
        critic = Critic(critic_groups, config.algo.gamma)
        values = [values_of(groups[number], sample, critic) for number, sample in zip(numbers, samples, strict=True)]
    batch = with_advantages(ScoredBatch(samples, values=values), config.algo)
    assert batch.advantages is not None
    credits: list[dict[int, float]] = [{} for _ in groups]
    for number, sample, advantages in zip(numbers, batch.samples, batch.advantages, strict=True):
        for at in np.flatnonzero(sample.loss_mask):
            credits[number][int(sample.token_ids[at])] = float(advantages[at])
    if config.algo.objective == "dpo":  # rewards of pairs
        return [{turn: 2 * (reward - fmean(pair.values())) for turn, reward in pair.items()} for pair in credits]
    return credits


@dataclass(frozen=True)
class Turns:
    """The turns that are measured, over all groups: T of them."""

    group_T: np.ndarray
    first_T: np.ndarray  # bool
    references_T2: np.ndarray  # from each half of the replays
    tokens: Sequence[int]

    def select(self, turns: str) -> np.ndarray:
        """Indices of the `turns`, one of TURNS."""
        return np.flatnonzero({"first": self.first_T, "later": ~self.first_T, "all": self.first_T | True}[turns])


def turns_of(groups: Sequence[Played]) -> Turns:
    """The turns of each trained turn's first future, with their references."""
    rows = []
    for number, played in enumerate(groups):
        for i in range(ROLLOUTS):
            messages = played.futures[i][0]
            for at in range(played.start, len(messages), 2):
                references = played.player.advantages(messages[:at], messages[at])
                rows.append((number, at == played.start, references, token(i, 0, at, played.start)))
    numbers, first, references, tokens = zip(*rows, strict=True)
    return Turns(np.array(numbers), np.array(first), np.array(references), tokens)


def correlation(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation, and its standard error by bootstrap over the groups."""
    rng, names = np.random.default_rng(0), np.unique(groups)
    members = {name: np.flatnonzero(groups == name) for name in names}
    drawn = (np.concatenate([members[name] for name in rng.choice(names, len(names))]) for _ in range(BOOTSTRAPS))
    values = [float(spearmanr(x[units], y[units]).statistic) for units in drawn]
    return float(spearmanr(x, y).statistic), float(np.std(values, ddof=1))


def measure(policy: DeskBehavior, tasks: Sequence[Task], replays: int) -> dict[str, tuple[float, float]]:
    """Correlations with their standard errors, by rule and turns."""
    groups = [play_group(policy, task, replays) for task in tasks]
    critic_groups = [play_group(policy, task, replays) for task in desk.tasks(1, len(tasks))]
    turns = turns_of(groups)
    results = {}
    for rule, settings in RULES.items():
        credits = credits_of(groups, rule, critic_groups)
        values = np.array(
            [credits[g].get(token_id, 0.0) for g, token_id in zip(turns.group_T, turns.tokens, strict=True)]
        )
        only_first = WHOLE not in settings and TRAIN_LATER not in settings
        for name in TURNS[:1] if only_first else TURNS:
            units = turns.select(name)
            reference = turns.references_T2.mean(1)[units]
            results[f"{rule}/{name}"] = correlation(values[units], reference, turns.group_T[units])
    for name in TURNS:
        units = turns.select(name)
        first_half, second_half = turns.references_T2[units].T
        results[f"agreement/{name}"] = correlation(first_half, second_half, turns.group_T[units])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="few groups and replays: shows that it runs, no figures")
    arguments = parser.parse_args()
    number, replays = (40, 8) if arguments.smoke else (arguments.groups, arguments.replays)
    tasks, values = desk.tasks(0, number), dict[str, float]()
    for policy, behavior in POLICIES.items():
        results = measure(behavior, tasks, replays)
        print(f"\n| {policy} | {' | '.join(TURNS)} |\n|---|---|---|---|")
        for row in [*RULES, "agreement"]:
            cells = [results.get(f"{row}/{name}") for name in TURNS]
            print(f"| {row} | {' | '.join(f'{cell[0]:.2f} ± {cell[1]:.2f}' if cell else '' for cell in cells)} |")
        for name, (value, error) in results.items():
            values |= {f"{policy}/{name}": round(value, 4), f"{policy}/{name}_se": round(error, 4)}
    print(json.dumps({"name": "credit", "values": values}))


if __name__ == "__main__":
    main()
