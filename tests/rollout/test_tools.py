from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_collab.config import RolloutConfig
from megatron_collab.config.extension import NoOptions
from megatron_collab.rollout import tools
from megatron_collab.rollout.tools import Toolbox, ToolError
from megatron_collab.rollout.tools.calculator import Calculator
from megatron_collab.types import Message, Task, ToolCall
from tests.rollout.fakes import FakePolicy

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")


def compute(expression: str) -> str:
    return asyncio.run(Calculator(NoOptions()).call(TASK, expression=expression)).content


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", "7"), ("(12 + 4) * 1.5", "24"), ("-2 ** 2", "-4"), ("1/3", "0.333333333333")],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "1/0",
        "9 ** 9 ** 9",
        "(-8) ** 0.5",
        "1 +",
        "x",
        "True + 1",
        "1" * 300,
        "1e308 * 10 ** 64 - 'a'",
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        compute(expression)


def answer(text: str) -> tuple[list[Message], Toolbox]:
    box = Toolbox(RolloutConfig(tools=["calculator"]), FakePolicy(lambda prompt, seed: ""))
    messages, _ = asyncio.run(box.answer(text, TASK))
    return messages, box


def test_a_call_is_answered_by_a_tool_message() -> None:
    assert answer('call calculator {"expression": "6*7"}')[0] == [Message("tool", "42")]
    assert answer("nothing to call")[0] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('call oracle {"expression": "1"}', "no tool oracle; there are calculator"),
        ("call calculator {}", "no argument expression"),
        ('call calculator {"expression": "1", "digits": 3}', "unknown argument digits"),
        ('call calculator {"expression": 7}', "argument expression is no string"),
        ('call calculator {"expression": "1/0"}', "cannot compute"),
    ],
)
def test_a_refused_call_tells_the_policy_why_and_is_counted(text: str, why: str) -> None:
    (message,), box = answer(text)
    assert message.role == "tool" and message.content.startswith("error: ") and why in message.content
    assert box.counters == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        ("integer", 3, True),
        ("integer", True, False),
        ("integer", 3.5, False),
        ("number", 3, True),
        ("boolean", True, True),
        ("boolean", 1, False),
        ("string", "x", True),
        ("array", [1], True),
        ("object", {}, True),
        ("object", [], False),
    ],
)
def test_arguments_have_the_types_of_the_schema(kind: str, value: Any, fits: bool) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": kind}}}
    if fits:
        tools.check_arguments({"x": value}, parameters)
    else:
        with pytest.raises(ToolError):
            tools.check_arguments({"x": value}, parameters)


def test_tools_are_told_in_openai_schema() -> None:
    (schema,) = tools.schemas(["calculator"])
    assert schema["type"] == "function" and schema["function"]["name"] == "calculator"
    assert ToolCall("calculator", {}).name == "calculator"
