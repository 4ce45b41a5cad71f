"""How good an estimate the multiturn-aware reward (MR) is: its bias, variance and ranking, and what futures buy.

`python tools/bench/estimator.py [--smoke]`: the world "desk" at its lowest cost of a question, a minute on one core.
The policy is the behavior of the supervised conversations, or the same one asking more often, as later in training.
Its MR at each window and the value Q of each reply are exact (desk_behavior.py); futures are played in text.

1. Replies to incomplete first messages; each counts equally, however likely it is. Bias: expected MR - Q, and variance
   of MR, over the replies that ask. Rank: Spearman's correlation of MR and Q over the replies to one message. Mean MR:
   of the policy's turn. Q lost: if the reply with the highest expected MR is chosen. Question gain: by how much the
   MR of the policy's questions exceeds that of its guess, also at the next cost.
2. Variance of a prompt's gradient at equal tokens of the policy, relative to F = 1: groups of 8 trained turns, softmax
   over replies at each state, complete requests included. With RLOO it is A + B / F: if a trained turn costs t and a
   future u, F = sqrt(B t / (A u)) is best. With GRPO it is divided by the squared mean gradient.
3. Ways to need fewer futures: the variance relative to plain futures, and the share of three plain futures that is not
   needed for their variance (1 - needed / 3, needed clipped to 1 to 12).

Intervals are 95 %, by bootstrap over prompts; NAME_se in the last line is their width / 3.92. --smoke: no figures.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.stats import rankdata

from megatron_collab import statistics
from megatron_collab.environments import desk
from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_behavior import UNLIMITED, BehaviorValues, DeskBehavior, message_of
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_model import DeskState
from megatron_collab.environments.desk_optimum import Action
from megatron_collab.environments.desk_user import DeskGoal, chance_right, read_goal, reply
from megatron_collab.statistics import Estimate
from megatron_collab.types import Message

FUTURES, WINDOWS = (1, 2, 3, 6, 12), (0, 1, 2, 3)
MOST, WINDOW = FUTURES[-1], WINDOWS[-1]
TURNS, PLAIN = 8, 3  # trained turns of a group; the default of rollout.futures
EXTRA = 8  # trained turns without futures, per group, that estimate the mean of the control variate
COST = MODEL.costs[0]
SEED = 0
SFT, OFTEN = DeskBehavior(), DeskBehavior(asks=0.9, asks_again=0.8)
VALUES = {behavior: BehaviorValues(MODEL, behavior) for behavior in (SFT, OFTEN)}
USERS = MODEL.seen_users
# What the seed of a future's user depends on; `repeat` counts the earlier siblings with the same reply.
PLAIN_SEED, COMMON_SEED, SEED_BY_REPLY = "{row}/{rollout}/{future}", "{row}/{future}", "{row}/{repeat}/{future}"


@dataclass(frozen=True)
class Start:
    """A task that begins with the user's first message, and the state after it."""

    goal: DeskGoal
    messages: tuple[Message, ...]
    state: DeskState


def starts(number: int, seed: int) -> list[Start]:
    """Training tasks whose next turn is the first."""
    tasks = [task for task in desk.tasks(seed, 2 * number) if len(task.messages) == 1][:number]
    pairs = [(read_goal(task.goal), task.messages) for task in tasks]
    return [Start(goal, messages, desk.state_of(goal, messages)) for goal, messages in pairs]


def drawn_action(behavior: DeskBehavior, state: DeskState, rng: random.Random) -> Action:
    chances = behavior.chances(MODEL, state)
    return rng.choices(list(chances), list(chances.values()))[0]


def tokens(message: Message) -> int:
    """The tokens that the policy samples for a message: its words and the end of the turn."""
    return len(message.content.split()) + 1


@dataclass(frozen=True)
class Future:
    """A played future: its utility at each window, and the policy's tokens after the trained turn.

    A guess counts with its chance to be right over the draw of the goal, as in the run. `of_drawn_goal` is the utility
    at the longest window if it counts as right or wrong for the drawn goal.
    """

    utilities: tuple[float, ...]
    of_drawn_goal: float
    tokens: int


def play(behavior: DeskBehavior, goal: DeskGoal, messages: Sequence[Message], user_seed: str, seed: str) -> Future:
    """A future of `messages`, which end with the trained turn; `seed` is the policy's."""
    messages, spent, last = list(messages), 0, messages[-1].content
    questions, utilities = len(language.slots_asked(last)), list[float]()
    while not language.is_final(last):
        utilities.append(-COST * questions)
        answer = Message("user", reply(goal, messages, user_seed))
        if len(utilities) > WINDOW or language.STOP in answer.content:
            break
        messages.append(answer)
        rng = random.Random(f"{seed}/{len(messages)}")
        state = desk.state_of(goal, messages)._replace(turn=len(utilities))
        messages.append(message_of(rng, goal, messages, drawn_action(behavior, state, rng)))
        last = messages[-1].content
        spent, questions = spent + tokens(messages[-1]), questions + len(language.slots_asked(last))
    right = right_by_goal = 0.0
    if (guess := language.guess(last)) is not None:
        right, known = chance_right(goal, messages, guess), language.heard(messages).values
        right_by_goal = float(all(value == known.get(slot, goal.values[slot]) for slot, value in guess.items()))
    utilities += [right - COST * questions] * (WINDOW + 1 - len(utilities))
    return Future(tuple(utilities), right_by_goal - COST * questions, spent)


@cache
def exact(behavior: DeskBehavior, state: DeskState, window: int = UNLIMITED, cost: float = COST) -> np.ndarray:
    """Expected MR of each of the behavior's replies, [replies], over kinds of users; Q if the window is unlimited."""
    value, actions = VALUES[behavior].of_reply, behavior.chances(MODEL, state)
    return np.mean([[value(state, action, user, window).utility(cost) for user in USERS] for action in actions], 1)


def question_gain(behavior: DeskBehavior, state: DeskState, cost: float) -> float:
    """How much higher the expected MR of the behavior's questions is than that of its guess."""
    chances, mr = behavior.chances(MODEL, state), exact(behavior, state, WINDOW, cost)
    asks = np.array([chance * (action is not None) for action, chance in chances.items()])
    return float(asks @ mr / asks.sum() - mr[list(chances).index(None)])


def rank_correlation(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Spearman's, of values [..., replies] and a reference [replies]; 0 if either is constant."""
    a, b = (rankdata(side.round(9), axis=-1) - (side.shape[-1] + 1) / 2 for side in (values, reference))
    scale = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.divide(a @ b, scale, np.zeros(scale.shape), where=scale > 0)


def measure_replies(behavior: DeskBehavior, rows: Sequence[Start]) -> dict[str, np.ndarray]:
    """Variance and rank correlation of MR from played futures, [rows, WINDOWS, FUTURES]."""
    figures: dict[str, list[np.ndarray]] = {"variance": [], "rank": []}
    for row, start in enumerate(rows):
        actions = list(behavior.chances(MODEL, start.state))
        asks = np.array([action is not None for action in actions])
        utilities = np.zeros((len(actions), MOST, len(WINDOWS)))
        for index, action in enumerate(actions):
            name = f"{SEED}/replies/{row}/{index}"
            trained = [*start.messages, message_of(random.Random(name), start.goal, start.messages, action)]
            names = [f"{name}/{future}" for future in range(MOST if action else 1)]  # a guess has a single future
            utilities[index] = [play(behavior, start.goal, trained, name, name).utilities for name in names]
        mr = np.stack([utilities[:, :count].mean(1).T for count in FUTURES], 1)  # [WINDOWS, FUTURES, replies]
        expected = np.array([exact(behavior, start.state, window) for window in WINDOWS])[:, None]
        figures["variance"].append(((mr - expected)[..., asks] ** 2).mean(-1))
        figures["rank"].append(rank_correlation(mr, exact(behavior, start.state)))
    return {figure: np.array(values) for figure, values in figures.items()}


@dataclass(frozen=True)
class Groups:
    """Groups of R prompts with n trained turns of K futures.

    The index of each trained turn's reply and its tokens [R, n]; the rewards and tokens of its futures [R, n, K].
    `drawn_rewards`: rewards if the goal is not integrated out.
    """

    actions: np.ndarray
    tokens: np.ndarray
    rewards: np.ndarray
    drawn_rewards: np.ndarray
    future_tokens: np.ndarray


def play_groups(
    behavior: DeskBehavior, rows: Sequence[Start], user_seed: str = PLAIN_SEED, draws_kind: bool = False
) -> Groups:
    """Plays `MOST` futures of each of `TURNS` trained turns a prompt.

    With `draws_kind` the kind of user is drawn for each future, and is the same for all siblings.
    """
    shape = len(rows), TURNS, MOST
    actions, spent = np.zeros(shape[:2], int), np.zeros(shape[:2])
    figures = np.zeros((*shape, 3))  # of futures: reward, reward by the drawn goal, tokens
    for row, start in enumerate(rows):
        choices = list(behavior.chances(MODEL, start.state))
        for i in range(TURNS):
            rng = random.Random(f"{SEED}/groups/{row}/{i}")
            action = drawn_action(behavior, start.state, rng)
            trained = message_of(rng, start.goal, start.messages, action)
            actions[row, i], spent[row, i] = choices.index(action), tokens(trained)
            repeat = int((actions[row, :i] == actions[row, i]).sum())
            for f in range(1 if action is None else MOST):
                goal, place = start.goal, {"row": row, "rollout": i, "future": f, "repeat": repeat}
                if draws_kind:
                    goal = replace(goal, user=random.Random(f"kind {row}/{f}").choice(USERS))
                seeds = [f"{SEED}/{form.format_map(place)}" for form in (user_seed, PLAIN_SEED)]
                future = play(behavior, goal, [*start.messages, trained], *seeds)
                at = (row, i) if action is None else (row, i, f)  # the futures of a guess agree
                figures[at] = future.utilities[-1], future.of_drawn_goal, future.tokens
    return Groups(actions, spent, *np.moveaxis(figures, -1, 0))


class Policy:
    """The behavior at the states of `rows` as a softmax: a logit for each state and reply, P in all."""

    def __init__(self, behavior: DeskBehavior, rows: Sequence[Start]) -> None:
        self.states = [start.state for start in rows]
        self.replies = {state: behavior.chances(MODEL, state) for state in dict.fromkeys(self.states)}
        ends = np.cumsum([len(replies) for replies in self.replies.values()]).tolist()
        self.first, self.size = dict(zip(self.replies, [0, *ends], strict=False)), ends[-1]
        q = {state: exact(behavior, state) for state in self.replies}
        self.gradient = self.expected([q[state] for state in self.states]).mean(0)  # exact, [P]

    def expected(self, q: Sequence[np.ndarray]) -> np.ndarray:
        """The gradient of the expected q at each row's state, [R, P]: pi(a) (q(a) - mean)."""
        gradients = np.zeros((len(q), self.size))
        for gradient, state, values in zip(gradients, self.states, q, strict=True):
            chances, first = np.array(list(self.replies[state].values())), self.first[state]
            gradient[first : first + len(values)] = chances * (values - chances @ values)
        return gradients

    def sampled(self, actions: np.ndarray, advantages: np.ndarray) -> np.ndarray:
        """sum_i A_i grad log pi(a_i) / n, [R, K, P], for actions [R, n] and advantages [R, n, K].

        The advantages of a group sum to 0, so the softmax's normalizer drops out.
        """
        gradients = np.zeros((len(actions), self.size, advantages.shape[-1]))
        parameters = actions + np.array([[self.first[state]] for state in self.states])
        np.add.at(gradients, (np.arange(len(actions))[:, None], parameters), advantages / actions.shape[1])
        return gradients.swapaxes(1, 2)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """algo.advantage=rloo of rewards [R, n, K], for each K."""
    n = rewards.shape[1]
    return (rewards - rewards.mean(1, keepdims=True)) * n / (n - 1)


def grpo(rewards: np.ndarray) -> np.ndarray:
    """algo.advantage=grpo of rewards [R, n, K], for each K."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)


@dataclass(frozen=True)
class Variance:
    """Variance of a prompt's gradient with F futures: fixed + by_future / F. Both are [R], to be averaged."""

    fixed: np.ndarray
    by_future: np.ndarray

    def at(self, futures: float) -> np.ndarray:
        return self.fixed + self.by_future / futures


def variance(gradients: np.ndarray) -> Variance:
    """Of gradients [R, K, P] that are linear in the rewards of K futures, independent given the prompt."""
    rows, k, _ = gradients.shape
    means = gradients.mean(1)
    by_future = ((gradients - means[:, None]) ** 2).sum((1, 2)) / (k - 1)
    total = ((means - means.mean(0)) ** 2).sum(-1) * rows / (rows - 1)
    return Variance(total - by_future / k, by_future)


def subtracting_q(policy: Policy, q: Sequence[np.ndarray], played: Groups, extra: np.ndarray | None) -> np.ndarray:
    """Gradients [R, K, P] of rewards - q, plus the gradient of q, which holds the values of all replies of each row.

    The latter is exact if `extra` is None. Otherwise it is estimated from all trained turns, of which those in `extra`
    [R, m] have no futures. Unbiased for any q that does not depend on the group's rewards.
    """

    def of(actions: np.ndarray) -> np.ndarray:
        return np.array([values[row] for values, row in zip(q, actions, strict=True)])[..., None]

    gradients = policy.sampled(played.actions, rloo(played.rewards - of(played.actions)))
    if extra is None:
        return gradients + policy.expected(q)[:, None]
    turns = np.concatenate([played.actions, extra], 1)
    return gradients + policy.sampled(turns, rloo(of(turns)))


def ratio(first: np.ndarray, second: np.ndarray) -> Estimate:
    return statistics.ratio(first.tolist(), second.tolist())


def bootstrapped(statistic: Callable[[np.ndarray], np.ndarray], size: int) -> Estimate:
    """The statistic of all prompts, with its interval; it gets indices of prompts, [draws, size]."""
    return Estimate(float(statistic(np.arange(size)[None])[0]), *statistics.bootstrap([size], statistic))


def saved(other: Variance, base: Variance, share: float = 1.0) -> Estimate:
    """1 - needed / PLAIN, for the futures that `other` needs to reach the variance of PLAIN futures of `base`.

    `share`: of trained turns that get so many futures; the others get one.
    """

    def statistic(rows: np.ndarray) -> np.ndarray:
        target = base.at(PLAIN)[rows].mean(-1) - other.fixed[rows].mean(-1)
        number = np.divide(other.by_future[rows].mean(-1), target, np.full(target.shape, np.inf), where=target > 0)
        return 1 - (share * np.clip(number, 1, MOST) + 1 - share) / PLAIN

    return bootstrapped(statistic, len(base.fixed))


def relative_noise(policy: Policy, played: Groups, futures: int, factor: float) -> Estimate:
    """Variance over squared mean of GRPO's gradient, relative to F = 1, times `factor`.

    GRPO's scale depends on the rewards, so the mean is measured: along the exact gradient.
    """

    def moments(count: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = played.rewards.reshape(*played.rewards.shape[:2], -1, count).mean(-1)
        gradients = policy.sampled(played.actions, grpo(blocks))
        return ((gradients - gradients.mean((0, 1))) ** 2).sum(-1).mean(-1), (gradients @ policy.gradient).mean(-1)

    (spread, along), (spread_1, along_1) = moments(futures), moments(1)

    def statistic(rows: np.ndarray) -> np.ndarray:
        scale = along_1[rows].mean(-1) / along[rows].mean(-1)
        return factor * spread[rows].mean(-1) / spread_1[rows].mean(-1) * scale**2

    return bootstrapped(statistic, len(along))


class Report:
    """Prints tables, and keeps values for the last line."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def keep(self, name: str, estimate: Estimate) -> str:
        """The estimate as text; its value and standard error are kept."""
        error = 0.0 if math.isnan(estimate.low) else (estimate.high - estimate.low) / 3.92
        self.values |= {name: round(estimate.value, 4), f"{name}_se": round(error, 4)}
        return estimate.text()

    def table(self, title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
        print(f"\n{title}\n")
        for row in (head, ["---"] * len(head), *rows):
            print(f"| {' | '.join(map(str, row))} |")


def report_replies(report: Report, behavior: DeskBehavior, rows: Sequence[Start], end: str) -> None:
    """Tables 1 of a behavior; the names of its values end with `end`."""
    rows, lines = [start for start in rows if start.state != DeskState(0, 0)], []
    for window in (*WINDOWS, UNLIMITED):
        figures = []
        for state in (start.state for start in rows):
            mr, q, replies = exact(behavior, state, window), exact(behavior, state), behavior.chances(MODEL, state)
            asks = [action is not None for action in replies]
            figures.append(((mr - q)[asks].mean(), list(replies.values()) @ mr, q.max() - q[mr.argmax()]))
        name = f"{'' if window == UNLIMITED else f'_w{window}'}{end}"
        numbers = dict(zip(("bias", "value", "lost"), np.mean(figures, 0).round(4).tolist(), strict=True))
        report.values |= {f"{figure}{name}": number for figure, number in numbers.items()}
        lines.append(["no limit" if window == UNLIMITED else window, *numbers.values()])
    report.table(f"Exact{end}, {len(rows)} first messages", ["w", "bias", "mean MR", "Q lost"], lines)
    gains = {cost: np.mean([question_gain(behavior, start.state, cost) for start in rows]) for cost in MODEL.costs[:-1]}
    report.values |= {f"question_gain_{cost:.2f}{end}": round(float(gain), 4) for cost, gain in gains.items()}
    rows_of_gains = [[f"{cost:.2f}", f"{gain:.3f}"] for cost, gain in gains.items()]
    report.table(f"MR of a question less that of a guess{end}", ["cost of a question", "gain"], rows_of_gains)
    for figure, values in measure_replies(behavior, rows).items():
        cells: list[list[object]] = [[window] for window in WINDOWS]
        for (w, f), _ in np.ndenumerate(values[0]):
            estimate = ratio(values[:, w, f], np.ones(len(rows)))
            cells[w].append(report.keep(f"{figure}_w{WINDOWS[w]}_f{FUTURES[f]}{end}", estimate))
        report.table(f"{figure}{end}", ["w", *(f"F = {count}" for count in FUTURES)], cells)


def report_tokens(report: Report, policy: Policy, played: Groups, end: str) -> None:
    """Table 2; the names of its values end with `end`."""
    base = variance(policy.sampled(played.actions, rloo(played.rewards)))
    turn, future, lines = float(played.tokens.mean()), float(played.future_tokens.mean()), []
    for count in FUTURES:
        factor = (turn + count * future) / (turn + future)
        estimates = ratio(base.at(count) * factor, base.at(1)), relative_noise(policy, played, count, factor)
        names = f"variance_ratio_f{count}{end}", f"grpo_ratio_f{count}{end}"
        lines.append([count, *map(report.keep, names, estimates)])
    noise = ratio(base.by_future, base.fixed)
    ends = (math.sqrt(max(value, 0.0) * turn / future) for value in (noise.value, noise.low, noise.high))
    texts = report.keep(f"by_future_over_fixed{end}", noise), report.keep(f"best_futures{end}", Estimate(*ends))
    costs = f"{turn:.1f} tokens a turn, {future:.1f} a future; B / A {texts[0]}; best F {texts[1]}"
    report.table(f"Variance of the gradient at equal tokens{end}: {costs}", ["F", "RLOO", "GRPO"], lines)


def report_fewer(report: Report, policy: Policy, played: Groups, rows: Sequence[Start]) -> None:
    """Table 3, of SFT."""
    turn, future = float(played.tokens.mean()), float(played.future_tokens.mean())
    rng, lines = random.Random(f"{SEED}/extra"), list[list[str]]()
    chances = [list(policy.replies[state].values()) for state in policy.states]
    extra = np.array([rng.choices(range(len(row)), row, k=EXTRA) for row in chances])
    undecided = float((np.ptp(played.rewards, -1) + played.future_tokens.sum(-1) > 0).mean())  # share of trained turns

    def plain(source: Groups) -> Variance:
        return variance(policy.sampled(source.actions, rloo(source.rewards)))

    def minus_q(source: Groups, turns: np.ndarray | None) -> Variance:
        q = [exact(SFT, state, WINDOW) for state in policy.states]
        return variance(subtracting_q(policy, q, source, turns))

    base, more = plain(played), EXTRA / TURNS * turn
    drawn = plain(replace(played, rewards=played.drawn_rewards))
    common, different = (play_groups(SFT, rows, form) for form in (COMMON_SEED, SEED_BY_REPLY))
    kinds = play_groups(SFT, rows, draws_kind=True)

    def add_row(text: str, name: str, way: Variance, share: float = 1, added: float = 0, than: Variance = base) -> None:
        equal_tokens = ratio(way.at(1) * (turn + added + future) / (turn + future), than.at(1))
        estimates = ratio(way.at(PLAIN), than.at(PLAIN)), equal_tokens, saved(way, than, share)
        names = f"variance_{name}", f"tokens_{name}", f"futures_saved_{name}"
        lines.append([text, *map(report.keep, names, estimates)])

    add_row("(a) one future for a turn that decides the outcome", "decided", base, undecided)
    add_row("(b) siblings share the user's seed", "user_seed", plain(common))
    add_row("(b) only siblings with different replies share it", "user_seed_different", plain(different))
    add_row("(c) Q subtracted, its mean exact", "q", minus_q(played, None))
    add_row(f"(c) Q subtracted, its mean over {EXTRA} more turns", "q_turns", minus_q(played, extra), 1, more)
    add_row("(d) goal integrated out, compared with drawn", "goal", base, than=drawn)
    add_row("(d) another kind of user for each future", "kind", plain(kinds))
    add_row("(a), (b) of different replies, (c) with more turns", "all", minus_q(different, extra), undecided, more)
    head = ["", f"variance, F = {PLAIN}", "variance at equal tokens, F = 1", "futures saved"]
    report.table("Fewer futures, relative to plain ones", head, lines)
    report.values["futures_saved"] = report.values["futures_saved_all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few prompts: shows that it runs, no figures")
    replied, grouped, later = (12, 24, 12) if parser.parse_args().smoke else (800, 3000, 1500)
    report = Report()
    for behavior, end in ((SFT, ""), (OFTEN, "_often")):
        report_replies(report, behavior, starts(replied, SEED), end)
    rows = starts(grouped, SEED + 1)
    for behavior, chosen, end in ((SFT, rows, ""), (OFTEN, rows[:later], "_often")):
        policy, played = Policy(behavior, chosen), play_groups(behavior, chosen)
        report_tokens(report, policy, played, end)
        if behavior == SFT:
            report_fewer(report, policy, played, chosen)
    print(json.dumps({"name": "estimator", "values": report.values}))


if __name__ == "__main__":
    main()
