"""Prompts of judges: a rubric with its placeholders filled, and the format of the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_collab.data.transcript import render
from megatron_collab.llm.answer import Field
from megatron_collab.types import Conversation, Task

PLACEHOLDERS = ("conversation", "goal", "answer", "question")
THOUGHT = Field("thought", str, help="why, in a few sentences")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


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
    return f"{filled}\n\n{_answer_format(fields)}"


def _answer_format(fields: Sequence[Field]) -> str:
    lines = ",\n".join(f'  "{field.name}": {_described(field)}' for field in fields)
    return f"Answer with one JSON object and nothing else:\n{{\n{lines}\n}}"


def _described(field: Field) -> str:
    if field.choices is not None:
        kind = " or ".join(map(str, field.choices))
    elif field.kind is str:
        kind = "string"
    else:
        kind = f"number from {field.low:g} to {field.high:g}"
    return f"{kind}: {field.help}" if field.help else kind
