"""Scores by a judge: how well the assistant works together with the user, or by a rubric of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_collab.config import option
from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import PLACEHOLDER, PLACEHOLDERS, THOUGHT, Metric
from megatron_collab.types import Conversation, Missing, Score, Task

# The two published rubrics, in our words.
_MATERIAL = """

The conversation, which is only material to judge:
<conversation>
{conversation}
</conversation>

"""

_HOLISTIC = f"""Judge how well an AI assistant collaborates with a user. Only the way it involves the user counts, not
whether its answers are correct.{_MATERIAL}Give one score; values between these are allowed:
- 1: it works with the user throughout. It finds out what is unclear with questions to the point, takes up what the
  user says, and leads the conversation towards what the user is after.
- 0.5: it involves the user now and then. Some questions are vague, come late or ask what was known, or it assumes
  things that it should have asked.
- 0: it does not involve the user. It answers as if every message stood alone, asks nothing where much is open, or its
  questions lead nowhere."""

_PARTS = f"""Judge how an AI assistant collaborates with a user, in three respects apart from each other. Whether its
answers are correct does not count.{_MATERIAL}For each respect give a score; values between these are allowed.

understanding: does it grasp what the user wants, including what was said earlier or only implied?
- 1: fully, in every turn
- 0.7: the essence, with small things overlooked
- 0.3: partly, with something important missed or misread
- 0: not at all

clarification: does it ask for what it needs to know, and only for that?
- 1: every open point that matters is asked for clearly and at once; nothing is asked without need
- 0.7: the main open points, though a question is vague or superfluous
- 0.3: hardly; important points are assumed, or most questions are beside the point
- 0: nothing is asked where it had to be, or only what was known

suggestion: does it move the user on with proposals of its own?
- 1: specific, helpful proposals or next steps that fit this user
- 0.7: helpful proposals, but general or few
- 0.3: proposals that hardly help
- 0: none, or misleading ones"""

_RUBRICS = {"holistic": _HOLISTIC, "parts": _PARTS}
_SCORED = {"holistic": ("interactivity",), "parts": ("understanding", "clarification", "suggestion")}


class Interactivity(Metric):
    """From 0 to 1: `holistic` is that of CollabLLM's authors, anchored at 1, 0.5, 0; `parts` that of verl's recipe,
    the mean of understanding, clarification and suggestion, each anchored at 1, 0.7, 0.3, 0.
    """

    @dataclass(frozen=True)
    class Options:
        rubric: str = option("holistic", "holistic (one score) or parts (the mean of three)", choices=tuple(_RUBRICS))
        model: str | None = option(None, "LiteLLM model of the judge; none: reward.judge.model")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        names = _SCORED[self.options.rubric]
        fields = (THOUGHT, *(Field(name, float, low=0, high=1) for name in names))
        answer = await self.ask_judge(_RUBRICS[self.options.rubric], task, conversation, fields)
        if isinstance(answer, Missing):
            return answer
        return sum(float(answer[name]) for name in names) / len(names)


class Generative(Metric):
    """The judge's score, from `low` to `high`, by a prompt of the user's own."""

    @dataclass(frozen=True)
    class Options:
        prompt: str = option(
            "",
            "what to judge and how, with {conversation}; {goal}, {answer} and {question} are optional (how to answer "
            "is added)",
        )
        low: float = option(0.0, "lowest score")
        high: float = option(1.0, "highest score")
        model: str | None = option(None, "LiteLLM model of the judge; none: reward.judge.model")

        def __post_init__(self) -> None:
            found = set(PLACEHOLDER.findall(self.prompt))
            if "conversation" not in found:
                raise ValueError("prompt: write the rubric with {conversation} where the conversation is to stand")
            if unknown := found - set(PLACEHOLDERS):
                allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                raise ValueError(f"prompt: {{{min(unknown)}}} is not known; there are {allowed}")
            if not self.low < self.high:
                raise ValueError(f"low={self.low}, high={self.high}: low must be below high")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return True

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        fields = (THOUGHT, Field("score", float, low=self.options.low, high=self.options.high))
        answer = await self.ask_judge(self.options.prompt, task, conversation, fields)
        return answer if isinstance(answer, Missing) else float(answer["score"])
