"""Several rewards of the same futures, with malformed turns, token counts and missing scores."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.reward.comparison import agreement, group_rewards, merge_metrics, rescore
from megatron_collab.reward.workers import RewardWorker
from megatron_collab.settings import LlmConfig, RewardConfig
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Missing, Reward, Rollout, Score, Turn
from tests.reward.fakes import about

TASK = about("18")
COUNTS = {"token_amount": {"count": "words"}}


def rollout(
    *replies: str, finish: Finish = Finish.STOP, ending: Ending = Ending.TURN_LIMIT, tokens: float = 7
) -> Rollout:
    """A rollout as read from a transcript: one future, without token ids."""
    played = Conversation(TASK.messages, ())
    for text in replies:
        played = played.add_turn(Turn((), (), (), (), finish, text))
    played = played.end(ending, "the user hung" if ending is Ending.ERROR else "")
    return Rollout(played, (Future(played, {"token_amount": tokens}),), Reward(0.5))


def values(reward: RewardConfig, *rollouts: Rollout, run_reward: RewardConfig | None = None) -> list[Score]:
    """The rewards of a group, scored again; `run_reward`: the reward settings of the run."""
    group, formula = Group(TASK, rollouts), reward_spec(reward)
    shared = merge_metrics({"one": formula})
    worker = RewardWorker(replace(formula, metrics=shared.metrics), LlmConfig(), Path("unused"))
    done: list[int] = []
    scores = asyncio.run(rescore(worker, [group], reward_spec(run_reward or reward).metrics, done.append))
    scores_by_future = {future: shared.scores_of("one", metric_scores) for future, metric_scores in scores.items()}
    return [outcome.value for outcome in group_rewards(group, scores_by_future, formula)]


def test_metrics_with_the_same_settings_are_one() -> None:
    words = RewardConfig(weights={"asks": 1.0, "token_amount": -0.1}, metrics=COUNTS)
    renamed = RewardConfig(weights={"short": -1.0}, metrics={"short": {"metric": "token_amount", "count": "words"}})
    rewards = {"words": words, "renamed": renamed, "tokens": RewardConfig(weights={"token_amount": -0.1})}
    shared = merge_metrics({name: reward_spec(reward) for name, reward in rewards.items()})
    assert list(shared.metrics) == ["asks", "token_amount", "tokens/token_amount"]
    assert shared.names["renamed"] == {"short": "token_amount"}
    scores: dict[str, Score] = {"asks": 1.0, "token_amount": 4.0, "tokens/token_amount": 9.0}
    assert shared.scores_of("tokens", scores) == {"token_amount": 9.0}
    assert shared.scores_of("renamed", scores) == {"short": 4.0}


def test_tokens_of_the_policy_are_those_that_the_run_has_recorded() -> None:
    tokens, words = (
        RewardConfig(weights={"token_amount": 1.0}),
        RewardConfig(weights={"token_amount": 1.0}, metrics=COUNTS),
    )
    assert values(tokens, rollout("a b c")) == [7.0]
    assert values(words, rollout("a b c"), run_reward=tokens) == [3.0]
    (missing,) = values(tokens, rollout("a b c"), run_reward=words)
    assert isinstance(missing, Missing) and "no token ids" in missing.why


@pytest.mark.parametrize(
    ("bad", "malformed"),
    [
        (rollout("so it is", finish=Finish.LENGTH), True),
        (rollout("<think>never ends"), True),
        (rollout("<think>ends</think>so"), False),
        (rollout("a reply", ""), False),  # not the trained turn
    ],
)
def test_a_turn_that_was_played_on_gets_the_penalty_of_a_reward_that_has_one(bad: Rollout, malformed: bool) -> None:
    played_on = RewardConfig(weights={"token_amount": 1.0}, metrics=COUNTS, malformed=None)
    strict = RewardConfig(weights={"token_amount": 1.0}, metrics=COUNTS, malformed=-1.0)
    assert (values(strict, bad) == [-1.0]) is malformed
    assert values(played_on, bad) != [-1.0]


def test_a_turn_that_was_not_played_on_has_no_reward_where_it_would_be() -> None:
    ended = rollout("", ending=Ending.MALFORMED)
    reward = RewardConfig(weights={"token_amount": -1.0}, metrics=COUNTS, malformed=-1.0)
    assert values(reward, ended, rollout("a b c")) == [-1.0, -3.0]
    reward.malformed_worst = True
    assert values(reward, ended, rollout("a b c")) == [-3.0, -3.0]
    reward.malformed, reward.malformed_worst = None, False
    missing, other = values(reward, ended, rollout("a b c"))
    assert isinstance(missing, Missing) and "ended at the malformed turn" in missing.why and other == -3.0


def test_half_a_conversation_has_no_score() -> None:
    reward = RewardConfig(weights={"token_amount": 1.0}, metrics=COUNTS)
    assert values(reward, rollout("a", ending=Ending.ERROR)) == [Missing("token_amount: the user hung")]


def test_agreement_is_over_pairs_of_a_task_that_both_tell_apart() -> None:
    first = [[Reward(1.0), Reward(0.0), Reward(2.0)], [Reward(0.0), Reward(Missing("down"))]]
    second = [[Reward(5.0), Reward(4.0), Reward(4.5)], [Reward(0.0), Reward(1.0)]]
    assert agreement(first, first) == 1.0
    assert agreement(first, second) == pytest.approx(2 / 3)
    assert math.isnan(agreement([[Reward(1.0)]], [[Reward(1.0)]]))
