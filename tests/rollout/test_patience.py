"""How long a group may take: worked out by hand from the settings."""

from __future__ import annotations

from megatron_collab.config import Config
from megatron_collab.rollout.patience import group_seconds
from tests.helpers import configured


def settings(**more: object) -> Config:
    config = configured(
        Config(),
        {
            "train.rollouts_per_prompt": 4,
            "rollout.futures": 3,
            "rollout.deadline": 100.0,
            "reward.timeout": 10.0,
            "reward.concurrency": 12,
            "reward.weights": {"token_amount": 1.0},
        },
    )
    return configured(config, {name.replace("__", "."): value for name, value in more.items()})


def test_a_turn_its_futures_and_their_scores_twice() -> None:
    assert group_seconds(settings(), 1) == 2 * (100 + 100 + 10 + 20)
    assert group_seconds(settings(), 2) == 2 * (100 + 100 + 20 + 20), "half of the 24 scores wait for a place"
    assert group_seconds(settings(reward__workers=2), 2) == 2 * (100 + 100 + 10 + 20)
    assert group_seconds(settings(rollout__futures=0), 6) == 2 * (100 + 100 + 20 + 20), "24 whole conversations"


def test_judges_have_their_deadline_and_wait_for_the_limiter() -> None:
    judged = settings(reward__weights={"accuracy": 1.0}, reward__metrics={"accuracy": {"judge": True}})
    judged.reward.judge.deadline = 50.0
    assert group_seconds(judged, 1) == 2 * (100 + 100 + 50 + 20)
    judged.llm.max_concurrent = 4
    assert group_seconds(judged, 1) == 2 * (100 + 100 + 3 * 50 + 20)
    judged.llm.requests_per_minute = 60
    judged.reward.judge.attempts, judged.user.attempts, judged.rollout.max_user_turns = 6, 3, 2
    assert group_seconds(judged, 1) == 2 * (100 + 100 + 150 + 20 + 12 * (6 + 2 * 3)), "a call a second"
