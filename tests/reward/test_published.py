"""The published rewards as conf/reward sets them, on a few conversations, against values worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_collab.config import Config, ConfigError, RewardConfig, compose
from megatron_collab.launch import validate
from megatron_collab.llm.answer import Field
from megatron_collab.reward import metrics
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.types import Conversation, Future, Message, Score, Task
from tests.reward.fakes import play

SYSTEM = Message("system", "Help the user over several turns.")
SAID = (Message("user", "how many apples?"), Message("assistant", "<think>well</think>in which box?"))
TASK = Task("t", (SYSTEM, *SAID, Message("user", "mine")), "How many apples are in the box?", "18", "llm")
ASKED = "how many per row?"

# Of the same trained turn: one ends with an answer that math-verify finds wrong and the judge right, one the other way
# round, and one with 40,000 words and as many tokens.
FUTURES = [
    play(TASK, ASKED, "six", r"three rows: eighteen, and not \boxed{19}"),
    play(TASK, ASKED, "six", "it may be 17, it may be 18"),
    play(TASK, ASKED, "six", " ".join(["word"] * 40_000)),
]
JUDGED: list[dict[str, float]] = [
    {"accuracy": 1, "interactivity": 1, "understanding": 1, "clarification": 0.7, "suggestion": 0.4},
    {"accuracy": 0, "interactivity": 0.5, "understanding": 0.3, "clarification": 0.3, "suggestion": 0},
    {"accuracy": 1, "interactivity": 0, "understanding": 0, "clarification": 0, "suggestion": 0},
]


def preset(name: str) -> Config:
    return compose([f"reward={name}", "run.dir=r", "model.path=m", "data.train=t", "reward.judge.model=openai/j"])


class Judge:
    """Knows what it thinks of one conversation, whatever it is asked."""

    def __init__(self, verdict: dict[str, float]) -> None:
        self.verdict = verdict

    async def ask(self, prompt: str, fields: Sequence[Field], **_: Any) -> dict[str, Any]:
        assert "**User**: six" in prompt
        return {field.name: self.verdict.get(field.name, "because") for field in fields}


def scored(reward: RewardConfig, conversation: Conversation, verdict: dict[str, float]) -> dict[str, Score]:
    """The scores of the reward's own metrics."""

    async def score() -> dict[str, Score]:
        kinds = {name: metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights}
        judge: Any = Judge(verdict)
        found = {name: await kind(options, judge).score(TASK, conversation) for name, (kind, options) in kinds.items()}
        return {name: value for name, value in found.items() if value is not None}

    return asyncio.run(score())


# By preset, token_amount of each future, and the parts of the reward.
#
# verl: words of both sides from the trained turn on: 4 of it, `six`, and 6, 8 or 40,000 of the last reply. Their mean,
#   times -1e-4, is -1.33, which is cut to -1. Interactivity is the mean of three: 0.7, 0.2 and 0.
# collabllm: thousands of cl100k tokens of all assistant messages as they are: 11 of the task's with its thought, 5 of
#   the trained turn, and 12, 11 or 40,000. -0.5 times their mean is not cut.
# paper: cl100k tokens of what the user reads and writes, so without the thought (7 less) and with 6 of the user's: each
#   future costs -min(5e-4 * tokens, 1): 0.0135, 0.013 and 1.
GOLDEN: dict[str, tuple[list[float], dict[str, float]]] = {
    "verl": ([11, 13, 40_005], {"accuracy": 2 / 3, "interactivity": 0.9 / 3, "token_amount": -1}),
    "collabllm": (
        [0.028, 0.027, 40.016],
        {"accuracy": 2 / 3, "interactivity": 1.5 / 3, "token_amount": -0.5 * 40.071 / 3},
    ),
    "paper": ([27, 26, 40_015], {"accuracy": 2 / 3, "interactivity": 1.5 / 3, "token_amount": -1.0265 / 3}),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_published_reward(name: str) -> None:
    reward, (tokens, parts) = preset(name).reward, GOLDEN[name]
    scores = [scored(reward, *each) for each in zip(FUTURES, JUDGED, strict=True)]
    assert [score["accuracy"] for score in scores] == [1, 0, 1], "as the judge says"
    assert [score["token_amount"] for score in scores] == pytest.approx(tokens)
    result = reward_function(reward)([Future(each, found) for each, found in zip(FUTURES, scores, strict=True)])
    assert result.parts == pytest.approx(parts) and result.value == pytest.approx(sum(parts.values()))


def test_the_recipe_alone_penalises_a_malformed_turn() -> None:
    assert {name: preset(name).reward.malformed for name in GOLDEN} == {"verl": -1, "collabllm": None, "paper": None}
    assert compose(["experiment=collabllm_math"]).reward.metrics == preset("verl").reward.metrics


@pytest.mark.parametrize("name", GOLDEN)
def test_without_a_judge_one_line_says_what_is_missing(name: str) -> None:
    config = preset(name)
    config.reward.judge.model = None
    with pytest.raises(ConfigError, match=r"^reward\.weights\.accuracy: needs a judge; set reward\.judge\.model to a "):
        validate.check_settings(config)
