"""LLM judge: a language model that scores by a rubric; an outage gives Missing, never a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_collab.config import EndpointConfig
from megatron_collab.data.transcript import render
from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.types import Conversation, Missing, Task

if TYPE_CHECKING:  # LiteLLM takes a second to import, and checking the settings needs none of it
    from megatron_collab.llm.client import LlmClient

PLACEHOLDERS = ("conversation", "goal", "answer", "question")
THOUGHT = Field("thought", str, help="why, in a few sentences")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


class Judge:
    """Asks the model of `reward.judge`, or another model at the same endpoint."""

    def __init__(self, client: LlmClient, endpoint: EndpointConfig) -> None:
        self.client = client
        self.endpoint = endpoint

    async def ask(self, prompt: str, fields: Sequence[Field], *, model: str | None = None) -> dict[str, Any] | Missing:
        """The values of `fields` that the judge answers to `prompt`, Missing where it gives no usable answer.

        Each prompt is asked for once and cached. `model` replaces that of the endpoint. Raises BudgetSpent.
        """
        endpoint = replace(self.endpoint, model=model or self.endpoint.model)
        try:
            return await self.client.ask(endpoint, [{"role": "user", "content": prompt}], fields, sample="0")
        except LlmError as error:
            return Missing(str(error))


def placeholders(rubric: str) -> set[str]:
    """The names that stand in `{…}`; the braces of a JSON object are none."""
    return set(_PLACEHOLDER.findall(rubric))


def prompt(rubric: str, task: Task, conversation: Conversation, fields: Sequence[Field]) -> str:
    """`rubric` with its PLACEHOLDERS filled, followed by how to answer with `fields`.

    {conversation} is the whole conversation with tools, {goal} what the user wants, {answer} the task's answer,
    {question} the message that the task ends with. Placeholders within the values are not filled.
    """
    values = {
        "conversation": render(conversation.messages, tools=True),
        "goal": task.goal,
        "answer": task.answer,
        "question": task.messages[-1].content,
    }
    filled = _PLACEHOLDER.sub(lambda found: values[found[1]], rubric)
    lines = ",\n".join(f'  "{field.name}": {_described(field)}' for field in fields)
    return f"{filled}\n\nAnswer with one JSON object and nothing else:\n{{\n{lines}\n}}"


def _described(field: Field) -> str:
    if field.choices is not None:
        kind = " or ".join(map(str, field.choices))
    elif field.kind is str:
        kind = "string"
    else:
        kind = f"number from {field.low:g} to {field.high:g}"
    return f"{kind}: {field.help}" if field.help else kind
