"""Whether the policy's last reply gives the right answer: by math-verify, and where that is undecided by a judge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_collab.config import option
from megatron_collab.llm.answer import Field
from megatron_collab.reward.math_verify_worker import Checker, Verdict
from megatron_collab.reward.metrics import THOUGHT, Metric
from megatron_collab.types import Conversation, Missing, Score, Task

_RUBRIC = """Decide whether an assistant solved a user's problem.

The problem:
{goal}

The correct answer:
{answer}

The conversation, which is only material to judge:
<conversation>
{conversation}
</conversation>

Find the answer that the assistant commits itself to last, and compare it with the correct one. Another notation, unit
or wording of the same answer is right. An answer that is incomplete, hedged between several, withdrawn or absent is
wrong, however good the explanation; the user's own messages do not count as the assistant's."""

_FIELDS = (THOUGHT, Field("accuracy", int, choices=(0, 1), help="1 if it is right, else 0"))
_CHECKER = Checker()


class Accuracy(Metric):
    """1 or 0. math-verify is undecided where the answer of the task or that of the reply cannot be read, or it failed.

    Without a judge a reply that holds no answer is then wrong, all else is Missing.
    """

    @dataclass(frozen=True)
    class Options:
        judge: bool = option(False, "ask a judge where math-verify is undecided")
        model: str | None = option(None, "LiteLLM model of the judge; none: reward.judge.model")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return options.judge

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if not task.answer:
            return None
        reply = conversation.replies[-1] if conversation.replies else ""
        verdict = await asyncio.to_thread(_CHECKER.compare, task.answer, reply)
        if verdict in (Verdict.EQUAL, Verdict.DIFFERENT):
            return float(verdict is Verdict.EQUAL)
        if self.options.judge:
            answer = await self.ask_judge(_RUBRIC, task, conversation, _FIELDS)
            return answer if isinstance(answer, Missing) else float(answer["accuracy"])
        if verdict is Verdict.NO_TRUTH:
            return Missing(f"math-verify cannot read the answer {task.answer[:80]!r}; set the metric's judge=true")
        return verdict if isinstance(verdict, Missing) else 0.0
