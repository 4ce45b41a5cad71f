"""Tools that the policy may call between its user's turns: a file each, named as in rollout.tools.

The file NAME.py defines

    SCHEMA: the function in OpenAI's tool schema: {"name": NAME, "description": …, "parameters": JSON schema}
    async def call(task: Task, **arguments) -> ToolResult

Calls are read from the policy's text by SGLang's own parsers (rollout.tool_parser). What a tool answers goes into the
token stream, where it is not trained.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from megatron_collab.types import Message, Task, ToolCall


class ToolError(ValueError):
    """A call that the tool refuses; the policy reads why and may try again."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers, and what the call is worth to the turn that made it."""

    content: str
    reward: float = 0.0


class ToolParser(Protocol):
    """What finds the calls in a text: the engine."""

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]: ...


def known() -> list[str]:
    """The names of all tools, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ModuleType:
    """The tool of that name."""
    return importlib.import_module(f"{__name__}.{name}")


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """What the chat template and the parser are told about the tools."""
    return [{"type": "function", "function": find(name).SCHEMA} for name in names]


class Toolbox:
    """The tools of a run. `counters` counts calls, and those that were refused."""

    def __init__(self, names: Sequence[str], parser: ToolParser) -> None:
        self.parser = parser
        self.schemas = schemas(names)
        self.counters: Counter[str] = Counter()
        self._tools = {name: find(name) for name in names}

    async def answer(self, text: str, task: Task) -> tuple[list[Message], float]:
        """The tools' messages for the calls in `text`, none where there are none, and what the calls are worth."""
        if not self._tools:
            return [], 0.0
        results = [await self._call(call, task) for call in await self.parser.tool_calls(text, self.schemas)]
        return [Message("tool", result.content) for result in results], sum(result.reward for result in results)

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        taken, self.counters = dict(self.counters), Counter()
        return taken

    async def _call(self, call: ToolCall, task: Task) -> ToolResult:
        self.counters["tool_calls"] += 1
        try:
            if call.name not in self._tools:
                raise ToolError(f"no tool {call.name}; there are {', '.join(self._tools)}")
            parameters = self._tools[call.name].SCHEMA["parameters"]
            check(call.arguments, parameters)
            return await self._tools[call.name].call(task, **call.arguments)
        except ToolError as error:
            self.counters["tool_errors"] += 1
            return ToolResult(f"error: {error}")


def check(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Raise ToolError where `arguments` do not fit the names and the JSON types of `parameters`."""
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"no argument {name}")
    for name, value in arguments.items():
        if name not in parameters["properties"]:
            raise ToolError(f"unknown argument {name}; there are {', '.join(parameters['properties'])}")
        kind = parameters["properties"][name].get("type")
        if kind in _JSON_TYPES and (
            not isinstance(value, _JSON_TYPES[kind]) or isinstance(value, bool) != (kind == "boolean")
        ):
            raise ToolError(f"argument {name} is no {kind}")


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
