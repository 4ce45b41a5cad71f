"""A score by a judge with a prompt of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_collab.config import option
from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.rubrics import PLACEHOLDERS, THOUGHT, placeholders, prompt
from megatron_collab.types import Conversation, Missing, Score, Task


@dataclass(frozen=True)
class GenerativeOptions:
    prompt: str = option(
        "",
        "what to judge and how, with {conversation}; {goal}, {answer} and {question} are optional (how to answer is "
        "added)",
    )
    low: float = option(0.0, "lowest score")
    high: float = option(1.0, "highest score")
    model: str | None = option(None, "LiteLLM model of the judge; none: reward.judge.model")

    def __post_init__(self) -> None:
        found = placeholders(self.prompt)
        if "conversation" not in found:
            raise ValueError("prompt: write the rubric with {conversation} where the conversation is to stand")
        if unknown := found - set(PLACEHOLDERS):
            allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"prompt: {{{min(unknown)}}} is not known; there are {allowed}")
        if not self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: low must be below high")


class Generative(Metric):
    """The judge's score, from `low` to `high`."""

    Options = GenerativeOptions
    seconds = 3.0

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        fields = (THOUGHT, Field("score", float, low=self.options.low, high=self.options.high))
        asked = prompt(self.options.prompt, task, conversation, fields)
        answer = await self.judge.ask(asked, fields, model=self.options.model)
        return answer if isinstance(answer, Missing) else float(answer["score"])
