"""Which tokens are trained, their credits, and the advantages GRPO gives them: numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_collab.algo.advantages import token_weights, with_advantages
from megatron_collab.algo.credit import (
    CreditSpec,
    comparable,
    conversation_samples,
    has_gradient,
    penalize_overlong,
    samples_of,
)
from megatron_collab.algo.credit import sample as laid_out
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.settings import AlgoConfig, TrainingRewardConfig, TrainingRolloutConfig
from megatron_collab.types import (
    Conversation,
    Credit,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Sample,
    Score,
    ScoredBatch,
    Task,
    Turn,
)

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "scripted/booking")
BETWEEN = (7, 8)  # what a user says, as tokens


def credited(group: Group, options: CreditSpec, number: int) -> list[Sample]:
    formula = reward_function(options.reward.mode, options.reward.mode_options, options.reward.weights, {})
    return samples_of(group, options, number, formula)


def config(**settings: object) -> CreditSpec:
    result = CreditSpec(AlgoConfig(), TrainingRewardConfig(), TrainingRolloutConfig())
    result.reward.weights = {"right": 1.0}
    for name, value in settings.items():
        owner = next(part for part in (result.reward, result.rollout, result.algo) if hasattr(part, name))
        setattr(owner, name, value)
    return result


def conversation(turns: int, length: int = 2, rewards: Sequence[float] = ()) -> Conversation:
    """`turns` turns of `length` tokens 10, 11, …; `rewards` are the users' rewards for them."""
    result = Conversation(TASK.messages, (1, 2, 3))
    for number in range(turns):
        if number:
            result = result.add_messages([Message("user", "go on")], BETWEEN)
        ids = tuple(range(10, 10 + length))
        result = result.add_turn(
            Turn(result.token_ids, ids, (-0.25 - number,) * length, (4,) * length, Finish.STOP, "x")
        )
        result = result.add_reward(rewards[number] if rewards else 0.0)
    return result


def rollout(value: Score, length: int = 2) -> Rollout:
    """A single trained turn with a score."""
    start = conversation(1, length).end(Ending.USER_DONE)
    return Rollout(start, (Future(start, {"right": value}),), Reward(value))


def branched(*values: Score, turns: int = 2) -> Rollout:
    """A trained turn with a future of `turns` turns for each value."""
    futures = tuple(Future(conversation(turns).end(Ending.TURN_LIMIT), {"right": value}) for value in values)
    known = [value for value in values if not isinstance(value, Missing)]
    return Rollout(conversation(1), futures, Reward(sum(known) / len(known)))


def played(value: float, rewards: Sequence[float]) -> Rollout:
    """A whole conversation with a reward for each turn, and one at its end."""
    start = conversation(len(rewards), rewards=rewards).end(Ending.TURN_LIMIT)
    return Rollout(start, (Future(start, {"right": value}),), Reward(value))


def learned(samples: Sequence[Sample]) -> list[list[float]]:
    """The advantages (GRPO) of the trained tokens of each sample, in their order."""
    rows = with_advantages(ScoredBatch(tuple(samples)), AlgoConfig()).advantages
    return [row[sample.loss_mask > 0].tolist() for row, sample in zip(rows, samples, strict=True)]


def test_a_sample_is_the_prompt_and_the_turn_with_a_loss_on_the_turn_alone() -> None:
    samples = credited(Group(TASK, (rollout(1.0), rollout(0.0, length=3))), config(), 5)
    assert samples[0].token_ids.tolist() == [1, 2, 3, 10, 11]
    assert samples[0].loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert samples[0].log_probs.tolist() == [0, 0, 0, -0.25, -0.25]
    assert samples[0].credits == (Credit(((3, 5),), 1.0, "5/t", "5/t"),)
    assert learned(samples) == [pytest.approx([1.0] * 2, abs=1e-3), pytest.approx([-1.0] * 3, abs=1e-3)]


def test_the_same_task_twice_is_two_groups() -> None:
    group = Group(TASK, (rollout(1.0), rollout(0.0)))
    first, second = (credited(group, config(train_turns="all"), number) for number in (0, 1))
    assert {c.peers for s in first for c in s.credits}.isdisjoint(c.peers for s in second for c in s.credits)


def test_a_rollout_without_a_reward_leaves_its_group() -> None:
    outage = rollout(Missing("judge is down"))
    with_outage = credited(Group(TASK, (rollout(1.0), outage, rollout(0.0))), config(), 0)
    assert learned(with_outage) == learned(credited(Group(TASK, (rollout(1.0), rollout(0.0))), config(), 0))


@pytest.mark.parametrize(("advantage", "samples"), [("grpo", 0), ("rloo", 0), ("reinforce++", 1), ("gae", 1)])
def test_a_single_reward_teaches_only_if_rollouts_are_not_compared(advantage: str, samples: int) -> None:
    group = Group(TASK, (rollout(1.0), rollout(Missing("judge is down"))))
    assert len(credited(group, config(advantage=advantage), 0)) == samples


def test_messages_between_trained_turns_are_not_trained() -> None:
    samples = credited(Group(TASK, (played(1.0, [0, 0]), played(0.0, [0, 0]))), config(futures=0), 0)
    for sample, log_probs in zip(samples, ([0, 0, 0, -0.25, -0.25, 0, 0, -1.25, -1.25],) * 2, strict=True):
        assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, *BETWEEN, 10, 11]
        assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
        assert sample.log_probs.tolist() == log_probs


@pytest.mark.parametrize(
    ("credit", "gamma", "expected"),
    [
        ("last", 1.0, {((11, 13),): 4.5}),
        ("equal", 1.0, {((3, 5), (7, 9), (11, 13)): 4.5}),
        ("reward_to_go", 1.0, {((3, 5),): 4.5, ((7, 9),): 3.5, ((11, 13),): 3.0}),
        # 3 at the end, 0.5 for the second turn, 1 for the first: 3; 0.5 + 3 / 2; 1 + 2 / 2
        ("reward_to_go", 0.5, {((3, 5),): 2.0, ((7, 9),): 2.0, ((11, 13),): 3.0}),
        ("reward_to_go", 0.0, {((3, 5),): 1.0, ((7, 9),): 0.5, ((11, 13),): 3.0}),
    ],
)
def test_credits_worked_out_by_hand(
    credit: str, gamma: float, expected: dict[tuple[tuple[int, int], ...], float]
) -> None:
    reward = TrainingRewardConfig(turn_credit=credit, turn_gamma=gamma)
    (result,) = conversation_samples(TASK, [played(1.0, [1.0, 0.5, 2.0])], reward, "g")
    assert list(result.credits) == [Credit(spans, value, "g", "g") for spans, value in expected.items()]


def test_equal_credit_compares_conversations() -> None:
    samples = credited(Group(TASK, (played(1.0, [0, 0]), played(0.0, [0, 0, 0]))), config(futures=0), 0)
    assert learned(samples) == [pytest.approx([1.0] * 4, abs=1e-3), pytest.approx([-1.0] * 6, abs=1e-3)]


def test_last_credit_trains_the_last_turn_alone() -> None:
    options = config(futures=0, turn_credit="last")
    good, _ = credited(Group(TASK, (played(1.0, [0, 0]), played(0.0, [0, 0]))), options, 0)
    assert good.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_reward_to_go_compares_all_turns_of_the_group() -> None:
    options = config(futures=0, turn_credit="reward_to_go")
    good, bad = learned(credited(Group(TASK, (played(1.0, [1.0, 0]), played(0.0, [0, 0]))), options, 0))
    # Credits 2, 1 and 0, 0: mean 0.75, standard deviation sqrt(0.6875).
    expected = (np.array([2, 1, 0, 0]) - 0.75) / np.sqrt(0.6875)
    assert good + bad == pytest.approx(np.repeat(expected, 2).tolist(), abs=1e-4)


def test_later_turns_are_compared_with_their_siblings_on_the_scale_of_the_group() -> None:
    group = Group(TASK, (branched(1.0, 0.0), branched(1.0, 1.0)))
    assert len(credited(group, config(), 0)) == 2  # the trained turns alone
    samples = credited(group, config(train_turns="all"), 0)
    first, second, *later = learned(samples)
    assert (first, second) == (pytest.approx([-1, -1], abs=1e-4), pytest.approx([1, 1], abs=1e-4))
    # Values 1, 0 | 1, 1: standard deviation sqrt(3/16); the means of the siblings are 0.5 and 1.
    scale = np.sqrt(3 / 16)
    assert [row[0] for row in later] == pytest.approx([0.5 / scale, -0.5 / scale, 0.0, 0.0], abs=1e-3)
    for sample in samples[2:]:
        assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_future_that_ends_at_once_is_a_peer_and_not_trained() -> None:
    ended = Future(conversation(1).end(Ending.USER_DONE), {"right": 1.0})
    parted = branched(0.0)
    group = Group(TASK, (replace(parted, futures=(*parted.futures, ended), reward=Reward(0.5)), branched(0.0, 1.0)))
    samples = credited(group, config(train_turns="all"), 0)
    # Values 0, 1 | 0, 1: means 0.5, standard deviation 0.5.
    assert [row[0] for row in learned(samples)] == pytest.approx([0, 0, -1, -1, 1], abs=1e-4)


def test_a_later_turn_without_a_score_is_not_trained() -> None:
    group = Group(TASK, (branched(1.0, Missing("down"), 0.0), branched(1.0, Missing("down"))))
    _, _, *later = learned(credited(group, config(train_turns="all"), 0))
    # Those with a score and a sibling that has one; the score of the one without is part of the scale: 1, 0, 1.
    assert [row[0] for row in later] == pytest.approx(np.array([0.5, -0.5]) / np.sqrt(2 / 9), abs=1e-4)


def test_a_critic_needs_no_sibling() -> None:
    group = Group(TASK, (branched(1.0, Missing("down")), branched(1.0)))
    assert len(credited(group, config(train_turns="all", advantage="gae"), 0)) == 2 + 2


def test_a_trained_turn_that_ended_the_conversation_has_no_later_turns() -> None:
    group = Group(TASK, (rollout(0.0), branched(1.0, 0.0)))
    assert len(credited(group, config(train_turns="all"), 0)) == 2 + 2


def test_a_group_teaches_if_a_credit_differs_from_its_peers() -> None:
    def taught(*rollouts: Rollout, **settings: object) -> bool:
        return has_gradient(credited(Group(TASK, rollouts), config(**settings), 0))

    assert taught(rollout(1.0), rollout(1.0), rollout(0.0))
    assert not taught(rollout(1.0), rollout(1.0))
    assert not taught(rollout(1.0), rollout(Missing("down")))
    # Equal means, and later turns that differ.
    alike = branched(1.0, 0.0), branched(0.0, 1.0)
    assert not taught(*alike) and taught(*alike, train_turns="all")
    # Futures that differ, but end with the trained turn.
    ended = tuple(Future(conversation(1).end(Ending.USER_DONE), {"right": value}) for value in (1.0, 0.0))
    at_once = Rollout(conversation(1), ended, Reward(0.5))
    assert not taught(at_once, at_once, train_turns="all")
    # Equal rewards at the end, and turns that users rewarded differently.
    assert taught(played(1.0, [0, 1]), played(1.0, [0, 0]), futures=0)


def test_turns_of_one_rollout_are_not_compared_with_each_other() -> None:
    options = config(futures=0, turn_credit="reward_to_go")
    group = Group(TASK, (played(1.0, [1.0, 0]), played(0.0, [0, 0]), played(0.5, [0, 0])))
    first, second, _ = credited(group, options, 0)
    assert comparable([first], options) == []
    assert [id(sample) for sample in comparable([first, second], options)] == [id(first), id(second)]


def test_a_sample_without_a_peer_is_no_peer() -> None:
    options = config(train_turns="all")
    ended = Future(conversation(1).end(Ending.USER_DONE), {"right": 1.0})
    parted = branched(0.0)
    group = Group(TASK, (replace(parted, futures=(*parted.futures, ended), reward=Reward(0.5)), branched(0.0, 1.0)))
    first, second, *later = credited(group, options, 0)
    assert len(comparable([first, second, *later], options)) == 5
    # The first trained turn has no peer, and with it goes the future that ended there: the only sibling.
    kept = comparable([first, *later], options)
    assert [id(sample) for sample in kept] == [id(sample) for sample in later[1:]]


@pytest.mark.parametrize(("length", "cost"), [(8, 0.0), (9, 0.5), (10, 1.0), (12, 1.0)])
def test_an_overlong_reply_is_worth_less(length: int, cost: float) -> None:
    """With a limit of 10 tokens the last fifth costs up to 1; recorded rewards stay unchanged."""
    options = config(overlong=0.2)
    options.rollout.turn.max_new_tokens = 10
    group = Group(TASK, (rollout(0.75, length), rollout(0.25, length=1)))
    long, short = credited(group, options, 0)
    assert [credit.value for credit in (*long.credits, *short.credits)] == pytest.approx([0.75 - cost, 0.25])
    assert group.rollouts[0].reward.value == 0.75


def test_an_overlong_credit_costs_what_its_longest_turn_does() -> None:
    options = config(overlong=0.2)
    options.rollout.turn.max_new_tokens = 10
    credits = Credit(((3, 11), (13, 22)), 1.0, "g", "g"), Credit((), 1.0, "g", "g")
    mask = np.zeros(22, np.float32)
    penalized = penalize_overlong(Sample(mask, mask, mask, credits), options).credits
    assert [credit.value for credit in penalized] == [0.5, 1.0]
    turn = Credit(((13, 22),), 1.0, "g/state", "g/state", (0.5,))
    penalized = penalize_overlong(Sample(mask, mask, mask, (credits[0], turn)), options).credits
    assert [credit.value for credit in penalized] == [0.5, 1.0], "gigpo: the conversation's credit alone pays for it"
    options.algo.overlong, options.rollout.turn.max_new_tokens = 1.0, 1
    penalized = penalize_overlong(Sample(mask, mask, mask, credits), options).credits
    assert [credit.value for credit in penalized] == [0.0, 1.0]


def test_later_turns_have_the_limit_of_futures_and_are_marked() -> None:
    options = config(overlong=0.5, train_turns="all", futures=2)
    options.rollout.turn.max_new_tokens, options.rollout.future.max_new_tokens = 100, 2
    samples = credited(Group(TASK, (branched(1.0, 0.0), branched(1.0, 0.0))), options, 0)
    assert [sample.later for sample in samples] == [False, False, True, True, True, True]
    values = [credit.value for sample in samples for credit in sample.credits if credit.spans]
    assert values == pytest.approx([0.5, 0.5, 0.0, -1.0, 0.0, -1.0])


def parted(*parts: dict[str, float] | None) -> Group:
    """A group of rollouts with these parts of their rewards; None: malformed, with a penalty of -1."""
    rollouts = []
    for part in parts:
        start = conversation(1).end(Ending.USER_DONE if part else Ending.MALFORMED)
        future = Future(start, dict(part or {}))
        rollouts.append(Rollout(start, (future,), Reward(sum(part.values()), parts=part) if part else Reward(-1.0)))
    return Group(TASK, tuple(rollouts))


def test_gdpo_normalizes_each_metric_before_the_sum() -> None:
    """right has 1, 0, 1, 0: 1 or -1 standard deviation from its mean, and weighs 1. tokens has -0.2 three times and
    -0.6: 0.1 and -0.3 from its mean -0.3, with a standard deviation of 0.1 sqrt(3), and weighs 0.5."""
    options = config(advantage="gdpo", weights={"right": 1.0, "tokens": -0.5})
    costs = (-0.2, -0.2, -0.2, -0.6)
    group = parted(*({"right": right, "tokens": cost} for right, cost in zip((1.0, 0.0, 1.0, 0.0), costs, strict=True)))
    values = [credit.value for sample in credited(group, options, 0) for credit in sample.credits]
    short, long = 0.5 / math.sqrt(3), 1.5 / math.sqrt(3)
    assert values == pytest.approx([1 + short, -1 + short, 1 + short, -1 - long], abs=1e-4)
    assert [member.reward.value for member in group.rollouts] == pytest.approx([0.8, -0.2, 0.8, -0.6]), "as recorded"


def test_gdpo_gives_a_malformed_turn_the_worst_of_every_metric() -> None:
    options = config(advantage="gdpo", weights={"right": 1.0, "tokens": -1.0})
    group = parted({"right": 1.0, "tokens": -3.0}, None, {"right": 0.0, "tokens": -1.0}, {"right": 0.0, "tokens": -2.0})
    values = [credit.value for sample in credited(group, options, 0) for credit in sample.credits]
    assert values[1] == min(values) < min(value for value in values if value != values[1])
    equal = parted({"right": 1.0}, None, {"right": 1.0})
    options.reward.weights = {"right": 1.0}
    first, malformed, last = (credit.value for sample in credited(equal, options, 0) for credit in sample.credits)
    assert first == last > malformed, "it is told from the others by reward.malformed alone"
    assert not has_gradient(credited(parted(None, None), options, 0)), "nothing tells malformed turns apart"
    options.reward.malformed = 0.0
    assert not has_gradient(credited(equal, options, 0)), "a penalty of 0 tells nothing either"


def test_gdpo_takes_a_reward_without_parts_whole() -> None:
    options = config(advantage="gdpo")
    samples = credited(Group(TASK, (rollout(3.0), rollout(1.0))), options, 0)
    assert [credit.value for sample in samples for credit in sample.credits] == pytest.approx([1.0, -1.0], abs=1e-5)


def stripped(original: Rollout) -> Rollout:
    """The conversation, but no turn has seen the one before: each begins a separate sequence."""
    start = original.start
    turns = tuple(replace(turn, prompt_ids=(9, number, 3)) for number, turn in enumerate(start.turns))
    return replace(original, start=replace(start, turns=turns))


@pytest.mark.parametrize("credit", ["equal", "last", "reward_to_go"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce++", "gae"])
def test_turns_in_separate_sequences_have_the_advantages_of_a_single_one(advantage: str, credit: str) -> None:
    """Including the KL costs, which accumulate to the end of a conversation, and a critic's values."""
    options = config(futures=0, turn_credit=credit, advantage=advantage, kl_in="reward", average="sequence")
    rollouts = played(1.0, [0.5, 0, 1.0]), played(0.0, [0.25, 0])
    results = []
    for variant in (rollouts, tuple(map(stripped, rollouts))):
        samples = tuple(credited(Group(TASK, variant), options, 0))
        trained = [np.flatnonzero(sample.loss_mask) for sample in samples]
        rows = [np.zeros_like(sample.loss_mask) for sample in samples]
        for row, at in zip(rows, trained, strict=True):
            row[at] = np.arange(len(at))
        scored = ScoredBatch(samples, {}, rows, [0.9 * row for row in rows], rows)
        advantages = with_advantages(scored, options.algo).advantages
        weights = token_weights([sample.loss_mask for sample in samples], "sequence")
        numbers = [(a[at] * w[at]).tolist() for a, w, at in zip(advantages or (), weights, trained, strict=True)]
        results.append((numbers, [len(sample.cuts) for sample in samples]))
    (plain, none), (separate, cuts) = results
    assert separate == plain and none == [0, 0] and cuts == ([0, 0] if credit == "last" else [2, 1])


def test_turns_that_go_on_share_a_sequence_and_the_others_begin_one() -> None:
    """The second turn has seen the first (a call); the third sees the thought of neither."""
    first, second, third = (turn for turn in conversation(3).turns)
    third = replace(third, prompt_ids=(1, 2, 3, 11, 7))
    result = laid_out((first, second, third), [])
    assert result.token_ids.tolist() == [1, 2, 3, 10, 11, *BETWEEN, 10, 11, 1, 2, 3, 11, 7, 10, 11]
    assert result.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert result.cuts == (9,)


def test_tokens_that_close_a_thought_are_seen_and_not_trained() -> None:
    turn = replace(conversation(1, length=5).turns[0], forced=(1, 3))
    result = laid_out([turn], [Credit(((3, 8),), 1.0, "g", "g")])
    assert result.token_ids.tolist() == [1, 2, 3, 10, 11, 12, 13, 14]
    assert result.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 1, 1]


def test_a_sample_is_as_old_as_the_oldest_weights_that_sampled_any_of_it() -> None:
    first, second = conversation(2).turns
    turns = replace(first, versions=(5, 4)), replace(second, versions=(3, 6))
    assert laid_out(turns, []).version == 3 and laid_out(turns[:1], []).version == 4


def test_a_single_turn_has_the_reward_of_its_conversation_alone() -> None:
    options = config(mode="single_turn", futures=0)
    good, bad = credited(Group(TASK, (played(1.0, [0.5]), played(0.0, [0.25]))), options, 0)
    assert [credit.value for credit in (*good.credits, *bad.credits)] == [1.0, 0.0]


def test_overlong_counts_thought_and_reply() -> None:
    options = config(overlong=0.5)
    options.rollout.turn.max_new_tokens, options.rollout.turn.thinking_budget = 4, 4
    for length, cost in ((4, 0.0), (6, 0.5), (8, 1.0)):
        sample, _ = credited(Group(TASK, (rollout(1.0, length), rollout(0.0))), options, 0)
        assert sample.credits[0].value == 1.0 - cost


def chosen_of(objective: str, *values: Score, gap: float = 0.0, **settings: object) -> list[float]:
    """The values of the samples of a group whose replies are of 1, 2, … tokens."""
    options = config(**settings)
    options.algo.objective, options.algo.dpo.gap = objective, gap
    rollouts = tuple(rollout(value, length) for length, value in enumerate(values, 1))
    return [sample.credits[0].value for sample in credited(Group(TASK, rollouts), options, 0)]


def test_a_pair_is_the_best_against_the_worst_of_a_group() -> None:
    assert chosen_of("dpo", 0.5, 0.75, Missing("lost"), 0.25, 0.75) == [0.75, 0.25]
    assert chosen_of("dpo", 0.5, 0.75, 0.25, gap=0.5) == [0.75, 0.25]
    assert chosen_of("dpo", 0.5, 0.75, 0.25, gap=0.51) == chosen_of("dpo", 0.5, 0.5) == chosen_of("dpo", 0.5) == []
    same = Group(TASK, (rollout(0.5), rollout(0.75)))
    options = config()
    options.algo.objective = "dpo"
    assert credited(same, options, 0) == [], "word for word"


def test_the_best_of_a_group_is_learned_from_alone() -> None:
    assert chosen_of("sft", 0.5, 0.75, Missing("lost"), 0.75) == [0.75]
    assert chosen_of("sft", Missing("lost"), 0.25) == [0.25]
    assert chosen_of("sft", Missing("lost")) == []


def test_nothing_is_learned_from_a_malformed_best() -> None:
    broken = conversation(1).end(Ending.MALFORMED)
    bad = Rollout(broken, (Future(broken, {}),), Reward(-1.0))
    for objective, expected in (("sft", 0), ("dpo", 0)):
        options = config()
        options.algo.objective = objective
        assert len(credited(Group(TASK, (bad, bad)), options, 0)) == expected
    options = config()
    options.algo.objective = "dpo"
    pair = credited(Group(TASK, (bad, rollout(0.5, 3))), options, 0)
    assert [sample.credits[0].value for sample in pair] == [0.5, -1.0]


def test_whole_conversations_are_compared_with_their_turn_rewards() -> None:
    options = config(futures=0)
    options.algo.objective = "dpo"
    group = Group(TASK, (played(0.5, [0.0, 0.0]), played(0.25, [0.5, 0.5, 0.0])))
    best, worst = credited(group, options, 0)
    assert [best.credits[0].value, worst.credits[0].value] == [1.25, 0.5]
    assert best.loss_mask.sum() == 6 and worst.loss_mask.sum() == 4


def test_one_sample_is_no_pair() -> None:
    options = config()
    options.algo.objective = "dpo"
    pair = credited(Group(TASK, (rollout(0.5, 1), rollout(0.25, 2))), options, 0)
    assert comparable(pair, options) == pair and comparable(pair[:1], options) == []
