"""Shared by tests of metrics: conversations, a judge with scripted answers, scores by a metric's name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import Metric, ScoredMetric
from megatron_collab.types import Conversation, Finish, Message, Missing, Score, Task, Turn


class FakeJudge:
    """Returns `answers` one after the other and records the questions."""

    def __init__(self, *answers: dict[str, Any] | Missing) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.fields: list[Sequence[Field]] = []
        self.models: list[str | None] = []

    async def ask(
        self, prompt: str, fields: Sequence[Field], *, model: str | None = None, **_: Any
    ) -> dict[str, Any] | Missing:
        self.prompts.append(prompt)
        self.fields.append(fields)
        self.models.append(model)
        return self.answers.pop(0)


def about(answer: str, *texts: str, goal: str = "the goal") -> Task:
    """A task whose messages `texts` are of user and assistant in turn, the user first."""
    messages = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts or ("hi",)))
    return Task("t", messages, goal, answer, "llm")


def play(task: Task, *texts: str) -> Conversation:
    """`task` continued: policy and user in turn, the policy first; a reply has one token a word and an end token."""
    conversation = Conversation(task.messages, (1,))
    for i, text in enumerate(texts):
        if i % 2:
            conversation = conversation.add_messages([Message("user", text)], (2,))
        else:
            ids = tuple(range(len(text.split()) + 1))
            turn = Turn(conversation.token_ids, ids, (-1.0,) * len(ids), (0,) * len(ids), Finish.STOP, text)
            conversation = conversation.add_turn(turn)
    return conversation


def metric(name: str, judge: Any = None, /, **settings: Any) -> Metric:
    """The metric of that name, or settings['metric']."""
    return ScoredMetric(name, settings).make(judge)


def score(name: str, task: Task, conversation: Conversation, judge: Any = None, /, **settings: Any) -> Score | None:
    return asyncio.run(metric(name, judge, **settings).score(task, conversation))
