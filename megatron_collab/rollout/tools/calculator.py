"""The calculator."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from megatron_collab.rollout.tools import Tool, ToolError, ToolResult
from megatron_collab.types import Task

_LONGEST = 200  # characters
_LARGEST_POWER = 64

_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator(Tool):
    """Arithmetic on decimal numbers."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Computes an arithmetic expression of numbers, + - * / ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (12 + 4) * 1.5"}},
            "required": ["expression"],
        },
    }

    async def call(self, task: Task, **arguments: Any) -> ToolResult:
        expression = arguments["expression"]
        if len(expression) > _LONGEST:
            raise ToolError(f"the expression is longer than {_LONGEST} characters")
        try:
            value = _value(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ArithmeticError) as error:
            raise ToolError(f"cannot compute {expression!r}: {error}") from error
        return ToolResult(f"{value:.12g}")


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left_node, op=op, right=right_node) if type(op) in _OPERATORS:
            base, other = _value(left_node), _value(right_node)
            if isinstance(op, ast.Pow) and abs(other) > _LARGEST_POWER:
                raise ToolError(f"the exponent {other:g} is too large")
            value = _OPERATORS[type(op)](base, other)
            if isinstance(value, complex):
                raise ToolError("the result is no real number")
            return value
    raise ToolError(f"only numbers and + - * / ** ( ) are understood, not {ast.unparse(node)!r}")
