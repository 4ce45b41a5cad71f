"""Credits and advantages of turns, by hand and against float64 references written from the papers' formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_collab.algo.advantages import rewards_of, with_advantages
from megatron_collab.algo.credit import CreditSpec, conversation_samples, samples_of
from megatron_collab.algo.turn_credit import Episode, make_turn_credit
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import AlgoConfig, TrainingRewardConfig, TrainingRolloutConfig
from megatron_collab.types import (
    Conversation,
    Finish,
    Future,
    Group,
    Message,
    Reward,
    Rollout,
    Sample,
    ScoredBatch,
    Task,
    Turn,
)

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "scripted/booking")
# A group of three conversations: rewards of the turns, the tokens of the turns, what the user says between them.
REWARDS = ([0.25, 0.5, 1.0], [0.0, 0.75], [0.5, 0.0, 0.25])
LENGTHS = ([2, 1, 3], [4, 2], [1, 1, 2])
ANSWERS = (["two", "monday"], ["two"], ["six", "monday"])


def played(
    rewards: Sequence[float], lengths: Sequence[int], answers: Sequence[str], scores: Mapping[str, Sequence[float]] = {}
) -> Rollout:
    """A conversation whose last reward is the conversation's own."""
    conversation = Conversation(TASK.messages, (1, 2))
    for number, length in enumerate(lengths):
        if number:
            role = "tool" if answers[number - 1] == "tool" else "user"
            conversation = conversation.add_messages([Message(role, answers[number - 1])], (7,))
        ids = tuple(range(10, 10 + length))
        turn = Turn(conversation.token_ids, ids, (-0.5,) * length, (0,) * length, Finish.STOP, "x")
        conversation = conversation.add_turn(turn).add_reward(rewards[number] if number + 1 < len(lengths) else 0.0)
    future = Future(conversation, {}, turn_scores={name: tuple(values) for name, values in scores.items()})
    return Rollout(conversation, (future,), Reward(rewards[-1]))


GROUP = [played(*arguments) for arguments in zip(REWARDS, LENGTHS, ANSWERS, strict=True)]


def turn_advantages(
    rollouts: Sequence[Rollout],
    advantage: str,
    algo: Mapping[str, object] = {},
    values: object = None,
    **reward: object,
) -> list[list[float]]:
    """The advantage of each turn, after a check that its tokens share it."""
    settings = TrainingRewardConfig(**{"weights": {}, **reward})
    spec = CreditSpec(AlgoConfig(advantage=advantage, **algo), settings, TrainingRolloutConfig(futures=0))
    samples = samples_of(Group(TASK, tuple(rollouts)), spec, 0, lambda futures: Reward(0.0))
    batch = with_advantages(ScoredBatch(tuple(samples), values=values), spec.algo)
    return [per_turn(*pair) for pair in zip(batch.samples, batch.advantages or (), strict=True)]


def per_turn(sample: Sample, row: np.ndarray) -> list[float]:
    spans = sorted({span for credit in sample.credits for span in credit.spans})
    assert all(np.ptp(row[start:stop]) == 0 for start, stop in spans)
    return [float(row[start]) for start, _ in spans]


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def normalized(values: Sequence[float], std: bool = True) -> list[float]:
    mean = statistics.fmean(values)
    return [(value - mean) / ((statistics.pstdev(values) + 1e-6) if std else 1.0) for value in values]


@pytest.mark.parametrize("turns", ["equalized", "r2g", "em"])
@pytest.mark.parametrize("trajectory", ["sum", "r2g"])
def test_userrl_is_its_formula(turns: str, trajectory: str) -> None:
    gamma = 0.8
    scores = [returns(r, gamma)[0] if trajectory == "r2g" else statistics.fmean(r) for r in REWARDS]
    expected = []
    for advantage, rewards, lengths in zip(normalized(scores), REWARDS, LENGTHS, strict=True):
        credits = {
            "equalized": [1.0 for _ in rewards],
            "r2g": returns(rewards, gamma),
            "em": [0.5 + 0.5 * (1 - math.exp(-2 * r)) / (1 - math.exp(-2)) for r in rewards],
        }[turns]
        mean = sum(c * n for c, n in zip(credits, lengths, strict=True)) / sum(lengths)
        expected.append([advantage * credit / mean for credit in credits])
    options = {"turns": turns, "trajectory": trajectory}
    actual = turn_advantages(GROUP, "grpo", turn_credit="userrl", turn_credit_options=options, turn_gamma=gamma)
    for row, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row, reference, rtol=1e-6)


def test_userrl_counts_tokens_with_a_credit() -> None:
    """The published code's scale, count_nonzero / sum over a conversation's tokens; the last turns have credit 0."""
    rewards, lengths, gamma = ([0.25, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0]), ([2, 1, 3, 2], [1, 4, 2]), 0.8
    rollouts = [played(*row) for row in zip(rewards, lengths, (["a"] * 3, ["a"] * 2), strict=True)]
    actual = turn_advantages(rollouts, "dr_grpo", turn_credit="userrl", turn_gamma=gamma)
    tokens = [np.repeat(returns(r, gamma), counts) for r, counts in zip(rewards, lengths, strict=True)]
    scores = normalized([returns(r, gamma)[0] for r in rewards], std=False)
    for row, advantage, credits, counts in zip(actual, scores, tokens, lengths, strict=True):
        expected = advantage * credits * np.count_nonzero(credits) / credits.sum()
        np.testing.assert_allclose(np.repeat(row, counts), expected, rtol=1e-6)


def test_userrl_by_hand() -> None:
    """Scores 1 and 0, so advantages 1 and -1; r2g credits of the first are 1 and 1, of the second 0: no advantage."""
    first, second = played([0.0, 1.0], [1, 1], ["a"]), played([0.0, 0.0], [1, 1], ["a"])
    rows = turn_advantages([first, second], "grpo", turn_credit="userrl")
    np.testing.assert_allclose(rows, [[1, 1], [0, 0]], atol=1e-5)
    # em: 1/2 for a reward of 0, 1 for 1; the mean 3/4 of the first conversation's tokens divides them.
    rows = turn_advantages([first, second], "grpo", turn_credit="userrl", turn_credit_options={"turns": "em"})
    np.testing.assert_allclose(rows, [[2 / 3, 4 / 3], [-1, -1]], atol=1e-5)


@pytest.mark.parametrize(
    ("turns", "rewards", "factors"),
    [
        ("r2g", [-0.3, 0.9, -0.5], [1, 1, 0]),  # of 0, 0.9, 0: returns 0.9, 0.9, 0; their plain sum is about 0
        ("r2g", [0.5, -0.8, -0.2], [1, 0, 0]),
        ("r2g", [-0.5, -400.0, 0.0], [0, 0, 0]),
        ("em", [-400.0, 0.0, 1.0], [0.75, 0.75, 1.5]),  # of 0, 0, 1: credits 1/2, 1/2, 1
        ("em", [3.0, 1.0, 1e300], [1, 1, 1]),
        ("equalized", [-400.0, 0.0, 1.0], [1, 1, 1]),
    ],
)
def test_userrls_factors_are_bounded_and_not_negative(turns: str, rewards: list[float], factors: list[float]) -> None:
    conversation = played([0.0] * 3, [2] * 3, ["a", "b"]).start
    rule = make_turn_credit(TrainingRewardConfig(turn_credit="userrl", turn_credit_options={"turns": turns}))
    ((share,),) = rule.shares([Episode(TASK, conversation, tuple(rewards))])
    np.testing.assert_allclose([share.turns[turn] for turn in range(3)], factors, atol=1e-12)
    assert share.value == sum(rewards), "the score is of the rewards as they are"


@pytest.mark.parametrize(("advantage", "std"), [("grpo", True), ("dr_grpo", False)])
def test_gigpo_is_its_formula(advantage: str, std: bool) -> None:
    gamma, omega = 0.95, 0.7
    totals = normalized([sum(rewards) for rewards in REWARDS], std)
    states = [["hi", *answers] for answers in ANSWERS]
    step_returns = [returns(rewards, gamma) for rewards in REWARDS]
    expected = []
    for total, states_of_turns, returns_of_turns in zip(totals, states, step_returns, strict=True):
        row = []
        for state, value in zip(states_of_turns, returns_of_turns, strict=True):
            at = [
                r for s, rs in zip(states, step_returns, strict=True) for n, r in zip(s, rs, strict=True) if n == state
            ]
            local = 0.0 if len(at) == 1 else normalized(at, std)[at.index(value)]
            row.append(total + omega * local)
        expected.append(row)
    options = {"turn_credit_options": {"omega": omega}, "turn_gamma": gamma}
    actual = turn_advantages(GROUP, advantage, turn_credit="gigpo", **options)
    for row, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row, reference, rtol=1e-6)


def test_gigpo_by_hand() -> None:
    """Both conversations begin alike and go on after "two" or "six": only the first turns have a common state."""
    pair = [played([0.0, 3.0], [1, 2], ["two"]), played([0.0, 1.0], [1, 1], ["six"])]
    rows = turn_advantages(pair, "dr_grpo", turn_credit="gigpo", turn_gamma=0.5)
    # A_E = 3 - 2 and 1 - 2; the first turns' returns are 1.5 and 0.5, 1/2 from their mean; the second turns are alone.
    assert rows == [[1.5, 1.0], [-1.5, -1.0]]
    pair = [played([0.0, 3.0], [1, 2], ["two"]), played([0.0, 1.0], [1, 1], ["two"])]
    assert turn_advantages(pair, "dr_grpo", turn_credit="gigpo") == [[2.0, 2.0], [-2.0, -2.0]]
    longer = replace(
        pair[1], start=replace(pair[1].start, messages=(Message("user", "ho"), *pair[1].start.messages[1:]))
    )
    history = {"turn_credit": "gigpo", "turn_credit_options": {"state": "history"}}
    assert turn_advantages([pair[0], longer], "dr_grpo", **history) == [[1.0, 1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(("advantage", "std"), [("grpo", True), ("dr_grpo", False)])
def test_igpo_is_its_formula(advantage: str, std: bool) -> None:
    gamma, compared = 0.9, iter(normalized([r for rewards in REWARDS for r in rewards], std))
    expected = [returns([next(compared) for _ in rewards], gamma) for rewards in REWARDS]
    actual = turn_advantages(GROUP, advantage, turn_credit="igpo", turn_gamma=gamma)
    for row, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(row, reference, rtol=1e-6)


def test_igpo_by_hand() -> None:
    """Gains of 0.5 and -0.25 of the first turns, outcomes 1 and 0; gains of the last turns are 0."""
    gains = [{"gain": [0.5, 0.0]}, {"gain": [-0.25, 0.0]}]
    pair = [played([0.0, 1.5], [1, 2], ["two"], gains[0]), played([0.0, -0.25], [1, 1], ["two"], gains[1])]
    pair = [
        replace(p, reward=replace(p.reward, parts={"gain": sum(g["gain"])})) for p, g in zip(pair, gains, strict=True)
    ]
    rows = turn_advantages(pair, "dr_grpo", turn_credit="igpo", turn_gamma=0.5, weights={"gain": 1.0})
    # The mean of 0.5, 1, -0.25 and 0 is 0.3125.
    assert rows == [[0.1875 + 0.6875 / 2, 0.6875], [-0.5625 - 0.3125 / 2, -0.3125]]


def test_the_users_next_turn_by_hand() -> None:
    """The first conversation calls a tool before it replies; both replies to "hi" are compared, with their calls."""
    first = played([0.0, 0.0, 2.0], [1, 2, 1], ["tool", "fine"], {"verdict": [0.0, 0.9, 0.5]})
    second = played([0.0, 1.0], [1, 1], ["no"], {"verdict": [0.1, 0.7]})
    options = {"turn_credit_options": {"verdict": "verdict", "weight": 0.5}}
    rows = turn_advantages([first, second], "dr_grpo", turn_credit="next_user_turn", **options)
    # A = 1/2 and -1/2; segments 1: 0.9 and 0.1, segments 2: 0.5 and 0.7.
    np.testing.assert_allclose(rows[0], [0.5 + 0.5 * 0.4, 0.5 + 0.5 * 0.4, 0.5 - 0.5 * 0.1], rtol=1e-6)
    np.testing.assert_allclose(rows[1], [-0.5 - 0.5 * 0.4, -0.5 + 0.5 * 0.1], rtol=1e-6)


def test_scores_of_turns_are_rewards_of_their_turns() -> None:
    """Their sum stays the reward, also if it is clamped: the rest comes at the end."""
    rollout = played([0.25, 2.0], [1, 1], ["a"], {"polite": [1.0, -0.5], "shown": [9.0, 9.0]})
    rollout = replace(rollout, reward=Reward(2.0, parts={"polite": 0.75, "right": 1.25}))
    settings = TrainingRewardConfig(weights={"polite": 2.0, "right": 1.0, "shown": 0.0}, turn_credit="immediate")
    (sample,) = conversation_samples(TASK, [rollout], settings, "g")
    assert [credit.value for credit in sample.credits] == [0.25 + 2.0, -1.0 + 2.0 - 2.0 + 1.0]


def test_turn_ppo_by_hand() -> None:
    """Two turns of 2 and 1 tokens with rewards 1 and 2, gamma 0.5, lambda 0.5; V at the first tokens is 1 and 3."""
    (sample,) = conversation_samples(
        TASK, [played([1.0, 2.0], [2, 1], ["a"])], TrainingRewardConfig(turn_credit="immediate"), "g"
    )
    values = np.zeros(len(sample.loss_mask), np.float32)
    values[sample.loss_mask > 0] = [1.0, 50.0, 3.0]
    algo = AlgoConfig(advantage="turn_gae", gamma=0.5, gae_lambda=0.5)
    batch = with_advantages(ScoredBatch((sample,), values=[values]), algo)
    # d_2 = 2 - 3, d_1 = 1 + 3 / 2 - 1; A_2 = -1, A_1 = 1.5 - 1 / 4. Returns A + V.
    assert batch.returns is not None and batch.advantages is not None
    assert batch.returns[0][sample.loss_mask > 0].tolist() == [2.25, 2.25, 2.0]
    raw = np.array([1.25, 1.25, -1.0])
    np.testing.assert_allclose(batch.advantages[0][sample.loss_mask > 0], normalized(raw.tolist()), rtol=1e-6)


@pytest.mark.parametrize(("forced", "expected"), [(2, [0, 1, 6]), (1, [0, 3, 4]), (0, [2, 4])])
def test_the_reward_of_a_turn_without_trained_tokens_comes_after_the_token_before(
    forced: int, expected: list[float]
) -> None:
    """Turns of 2, 1 and 1 tokens with rewards 1, 2 and 4; the tokens of turn `forced` are."""
    rollout = played([1.0, 2.0, 4.0], [2, 1, 1], ["a", "b"])
    turns = list(rollout.start.turns)
    turns[forced] = replace(turns[forced], forced=(0, len(turns[forced].token_ids)))
    rollout = replace(rollout, start=replace(rollout.start, turns=tuple(turns)))
    (sample,) = conversation_samples(TASK, [rollout], TrainingRewardConfig(turn_credit="immediate"), "g")
    assert rewards_of(sample).tolist() == expected


@pytest.mark.parametrize("seed", range(3))
def test_turn_ppo_is_its_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gamma, lam = 0.99, 0.9
    values = []
    samples = conversation_samples(TASK, GROUP, TrainingRewardConfig(turn_credit="immediate"), "g")
    for sample in samples:
        values.append(np.where(sample.loss_mask > 0, rng.normal(size=len(sample.loss_mask)), 0).astype(np.float32))
    raw: list[list[float]] = []
    for sample, rewards, row in zip(samples, REWARDS, values, strict=True):
        starts = [credit.spans[0][0] for credit in sample.credits]
        v = [float(row[start]) for start in starts] + [0.0]
        deltas = [r + gamma * v[h + 1] - v[h] for h, r in enumerate(rewards)]
        raw.append(
            [sum((gamma * lam) ** (k - h) * deltas[k] for k in range(h, len(deltas))) for h in range(len(deltas))]
        )
    flat = [
        a
        for row, lengths in zip(raw, LENGTHS, strict=True)
        for a, n in zip(row, lengths, strict=True)
        for _ in range(n)
    ]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    algo = {"gamma": gamma, "gae_lambda": lam}
    actual = turn_advantages(GROUP, "turn_gae", algo, values, turn_credit="immediate")
    for row, reference in zip(actual, raw, strict=True):
        np.testing.assert_allclose(row, [(a - mean) / (std + 1e-6) for a in reference], rtol=2e-5)


OUTSIDE = """
from megatron_collab.algo.turn_credit import Share, TurnCredit
class Rule(TurnCredit):
    def shares(self, episodes):
        return {}
"""


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("[]", "gave shares of 0 of 2 conversations; give a list for each"),
        ("[[Share(1.0, {2: 1.0})] for e in episodes]", "gave shares of the turns [2] of 2; give turns of each"),
        ("[[] for e in episodes]", "gave shares of the turns [] of 2; give turns of each conversation"),
        ("[[Share(float('nan'), {0: 1.0})] for e in episodes]", "gave numbers that are not finite"),
        ("None", "gave None; give a list of shares for each conversation"),
        ("[None, None]", "gave None for a conversation; give a list of Share(number, {turn: number}, label)"),
        ("[[None] for e in episodes]", "gave [None] for a conversation; give a list of Share("),
        ("[[Share(1.0, [0])] for e in episodes]", "gave [Share(value=1.0, turns=[0], peers='')] for a conversation"),
        ("[[Share('x', {0: 1.0})] for e in episodes]", "gave [Share(value='x', turns={0: 1.0}, peers='')] for a conv"),
        ("[[Share(1.0, {0: None})] for e in episodes]", "gave [Share(value=1.0, turns={0: None}, peers='')] for a"),
        ("[[Share(1.0, {0.5: 1.0})] for e in episodes]", "gave [Share(value=1.0, turns={0.5: 1.0}, peers='')] for a"),
        ("[[Share(1.0, {0: 1.0}, None)] for e in episodes]", "gave [Share(value=1.0, turns={0: 1.0}, peers=None)] for"),
    ],
)
def test_a_rule_from_outside_that_is_wrong_stops_the_run(tmp_path: object, shares: str, message: str) -> None:
    file = f"{tmp_path}/rule.py"
    with open(file, "w") as stream:
        stream.write(OUTSIDE.format(shares))
    pair = [played([0.0, value], [1, 1], ["a"]) for value in (1.0, 2.0)]
    with pytest.raises(RunStopped) as stopped:
        conversation_samples(TASK, pair, TrainingRewardConfig(turn_credit=f"{file}:Rule"), "g")
    assert str(stopped.value).startswith(f"reward.turn_credit={file}:Rule: {message}")


@pytest.mark.parametrize(
    ("base", "method", "message"),
    [
        ("Compared", "compare(self, values, peers, scale):\n        return values[:1]", "compare must give a number"),
        ("Compared", "compare(self, values, peers, scale):\n        return None", "compare must give a number"),
        ("Compared", "compare(self, values, peers, scale):\n        return ['x'] * 2", "compare must give a number"),
        ("Advantage", "estimate(self, samples, costs, values):\n        return costs", "estimate must give"),
        ("Advantage", "estimate(self, samples, costs, values):\n        return Estimates(None)", "must give a number"),
        (
            "Advantage",
            "estimate(self, samples, costs, values):\n        return Estimates([[[1.0], [1.0, 2.0]]] * 2)",
            "must give a number",
        ),
        (
            "Advantage",
            "estimate(self, samples, costs, values):\n        return Estimates([costs[0] + math.nan, costs[1]])",
            "gave numbers that are not finite",
        ),
    ],
)
def test_an_estimator_from_outside_that_is_wrong_stops_the_run(
    tmp_path: object, base: str, method: str, message: str
) -> None:
    file = f"{tmp_path}/estimator.py"
    with open(file, "w") as stream:
        stream.write(
            f"import math\nfrom megatron_collab.algo.advantages import *\nclass Mine({base}):\n    def {method}\n"
        )
    pair = [played([0.0, value], [1, 1], ["a"]) for value in (1.0, 2.0)]
    with pytest.raises(RunStopped) as stopped:
        turn_advantages(pair, f"{file}:Mine")
    assert str(stopped.value).startswith(f"algo.advantage={file}:Mine: {message}")


def test_a_turn_without_a_share_is_not_trained(tmp_path: object) -> None:
    file = f"{tmp_path}/middle.py"
    with open(file, "w") as stream:
        stream.write(OUTSIDE.format("[[Share(1.0, {0: 1.0}), Share(2.0, {2: 0.5})] for e in episodes]"))
    (sample,) = conversation_samples(TASK, GROUP[:1], TrainingRewardConfig(turn_credit=f"{file}:Rule"), "g")
    assert sample.turns == (0, 2) and [credit.spans for credit in sample.credits] == [((2, 4),), ((7, 10),)]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert [credit.weights for credit in sample.credits] == [(), (0.5,)]
