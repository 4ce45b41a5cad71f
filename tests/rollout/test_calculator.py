"""The calculator computes arithmetic and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from megatron_collab.rollout.tools import ToolError
from megatron_collab.rollout.tools.calculator import Calculator
from megatron_collab.settings.extension import NoOptions
from megatron_collab.types import Message, Task

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
