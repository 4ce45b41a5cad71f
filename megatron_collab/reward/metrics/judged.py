"""Metrics scored by a judge: how well the assistant works with the user, or a custom rubric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import PLACEHOLDER, PLACEHOLDERS, THOUGHT, Metric, judges_prompt, prompt
from megatron_collab.settings import SUFFIX, option
from megatron_collab.types import Conversation, Missing, Score, Task

# The two published rubrics, reworded: prompts/interactivity_*.j2.
_SCORED = {"holistic": ("interactivity",), "parts": ("understanding", "clarification", "suggestion")}


def check_rubric(file: str | None, task: Task) -> None:
    """Raises ValueError if the template in `file` cannot be rendered for this task; the built-in ones always can."""
    if file:
        prompt(judges_prompt(file), task, Conversation(task.messages, ()), ())


class Interactivity(Metric):
    """Score from 0 to 1. `holistic` is the rubric of CollabLLM's authors, anchored at 1, 0.5, 0. `parts` is that of
    verl's recipe: the mean of understanding, clarification and suggestion, each anchored at 1, 0.7, 0.3, 0.
    """

    @dataclass(frozen=True)
    class Options:
        rubric: str = option("holistic", "holistic (one score) or parts (the mean of three)", choices=tuple(_SCORED))
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        panel: list[str] = option([], "LiteLLM models that judge beside it; the score is the mean")
        prompt: str | None = option(None, "FILE.j2: a prompt for the scores of `rubric`; null: the built-in one")

        def __post_init__(self) -> None:
            if self.prompt:
                judges_prompt(self.prompt)

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        check_rubric(options.prompt, task)

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        names = _SCORED[self.options.rubric]
        fields = (THOUGHT, *(Field(name, float, low=0, high=1) for name in names))
        rubric = judges_prompt(self.options.prompt, f"interactivity_{self.options.rubric}")
        answer = await self.ask_judge(rubric, task, conversation, fields)
        if isinstance(answer, Missing):
            return answer
        return sum(float(answer[name]) for name in names) / len(names)


class Generative(Metric):
    """The judge's score, from `low` to `high`, for a custom prompt; with `turns` of each reply by itself.

    A turn that calls a tool scores 0: it is judged with the reply that follows.
    """

    @dataclass(frozen=True)
    class Options:
        prompt: str = option(
            "",
            "what to judge and how: FILE.j2, or text with {conversation} and, optionally, {goal}, {answer}, "
            "{question} (the answer format is added)",
        )
        low: float = option(0.0, "lowest score")
        high: float = option(1.0, "highest score")
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        panel: list[str] = option([], "LiteLLM models that judge beside it; the score is the mean")
        turns: str | None = option(
            None,
            "judge each reply: the conversation up to it, or up to the user's reaction to it; null: the whole once",
            choices=("reply", "reaction"),
        )

        def __post_init__(self) -> None:
            if not self.low < self.high:
                raise ValueError(f"low={self.low}, high={self.high}: low must be below high")
            if self.prompt.endswith(SUFFIX):
                judges_prompt(self.prompt)
                return
            placeholders = set(PLACEHOLDER.findall(self.prompt))
            if "conversation" not in placeholders:
                raise ValueError("prompt: lacks {conversation}; put it where the conversation goes")
            if unknown := placeholders - set(PLACEHOLDERS):
                allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                raise ValueError(f"prompt: unknown placeholder {{{min(unknown)}}}; use {allowed}")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        check_rubric(options.prompt if options.prompt.endswith(SUFFIX) else None, task)

    @classmethod
    def scores_turns(cls, options: Any) -> bool:
        return options.turns is not None

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float] | Missing | None:
        scores = []
        for position in conversation.turn_positions:
            if conversation.is_tool_call(position):
                scores.append(0.0)
                continue
            end = position + (2 if self.options.turns == "reaction" else 1)
            score = await self._judged(task, replace(conversation, messages=conversation.messages[:end]))
            if isinstance(score, Missing):
                return score
            scores.append(score)
        return scores

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        return await self._judged(task, conversation)

    async def _judged(self, task: Task, conversation: Conversation) -> Score:
        fields = (THOUGHT, Field("score", float, low=self.options.low, high=self.options.high))
        text = self.options.prompt
        rubric = judges_prompt(text) if text.endswith(SUFFIX) else text
        answer = await self.ask_judge(rubric, task, conversation, fields)
        return answer if isinstance(answer, Missing) else float(answer["score"])
