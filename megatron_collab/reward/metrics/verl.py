"""Metrics that are verl's reward functions: compute_score of verl, or of CollabLLM's metrics, which need no edit."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from megatron_collab.reward.metrics import Metric
from megatron_collab.runtime import verl
from megatron_collab.runtime.side_loop import SideLoop
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Score, Task

_FORMS = ("solution_str", "messages")


class VerlMetric(Metric):
    """verl's `function`, compute_score, without an edit; in the form of its parameter solution_str or messages.

    solution_str is what the policy wrote, thoughts included, from the trained turn on; messages is the conversation.
    """

    @dataclass(frozen=True)
    class Options:
        function: str = option("", "the function: package.module:NAME or ./file.py:NAME")
        arguments: dict[str, Any] = option({}, "further arguments of the function")

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        parameters = inspect.signature(_function(options)).parameters
        if any(form in parameters for form in _FORMS):
            return None
        return f"function={options.function}: takes neither solution_str nor messages; give one that scores one answer"

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        prompt = [message.as_dict() for message in task.messages]
        arguments = {
            "data_source": task.metadata.get("data_source", ""),
            "solution_str": "\n".join(turn.text for turn in conversation.turns) or "\n".join(conversation.replies),
            "messages": [_Message(message.as_dict()) for message in conversation.messages],
            "ground_truth": task.answer,
            "extra_info": {
                "interaction_kwargs": {"single_turn_prompt": task.goal},
                **task.metadata,
                "prompt": prompt,
                "num_turns": conversation.message_count,
                "rollout_reward_scores": {"user_turn_rewards": [*conversation.turn_rewards]},
            },
            **self.options.arguments,
        }
        function = _function(self.options)
        form = next(form for form in reversed(_FORMS) if form in inspect.signature(function).parameters)
        unused = {*_FORMS} - {form}
        loop = SideLoop.acquire()
        try:
            keywords = {name: value for name, value in arguments.items() if name not in unused}
            result = await verl.call(loop, function, **keywords)
        finally:
            loop.release()
        return float(result["score"] if isinstance(result, dict) else result)


class _Message(dict[str, Any]):
    """A message whose role and content are also attributes, as in CollabLLM's metrics."""

    __getattr__ = dict.__getitem__


def _function(options: Any) -> Any:
    return verl.load(options.function, "function")
