"""Tools that the policy may call between its user's turns, by the names in TOOLS or as package.module:Class.

Calls are parsed by SGLang's own parsers (rollout.tool_parser). Answers go into the token stream, but are not trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.config import Extension, RolloutConfig, build, lookup, nearest, require
from megatron_collab.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from megatron_collab.inference.assistant import Assistant

# JSON's types in Python's
_TYPES: dict[str, Any] = dict(string=str, number=int | float, integer=int, boolean=bool, array=list, object=dict)
TOOLS = {"calculator": f"{__name__}.calculator:Calculator"}


class ToolError(ValueError):
    """A call that the tool refuses; the policy reads why and may try again."""


@dataclass(frozen=True)
class ToolResult:
    """The answer of a tool, and the reward of the turn that called it."""

    content: str
    reward: float = 0.0


class Tool(Extension):
    """Base of the tools.

    `SCHEMA`: the function in OpenAI's tool schema, {"name": …, "description": …, "parameters": JSON schema}; `Options`:
    a frozen dataclass of the tool's own settings, set as rollout.tool_options.NAME.SETTING.
    """

    SCHEMA: ClassVar[Mapping[str, Any]]

    async def call(self, task: Task, **arguments: Any) -> ToolResult:
        """The answer to one call; the arguments fit the schema. Raises ToolError."""
        raise NotImplementedError


def find_tool(name: str) -> type[Tool]:
    """One of TOOLS, or package.module:Class. Raises ConfigError."""
    tool = lookup(name, "rollout.tools", TOOLS, Tool)
    require(hasattr(tool, "SCHEMA"), f"rollout.tools={name}: has no SCHEMA, the function as the policy sees it")
    return tool


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """The tools of rollout.tools as the chat template and the parser take them."""
    return [{"type": "function", "function": find_tool(name).SCHEMA} for name in names]


def make_tools(config: RolloutConfig) -> dict[str, Tool]:
    """The tools of rollout.tools by the names that the policy calls them by. Raises ConfigError for what is refused."""
    kinds = {find_tool(name).SCHEMA["name"]: find_tool(name) for name in config.tools}
    require(len(kinds) == len(config.tools), f"rollout.tools={config.tools}: two tools have the same name")
    for name in config.tool_options:
        require(name in kinds, f"rollout.tool_options.{name}: not in rollout.tools{nearest(name, kinds)}")
    return {
        name: kind(build(kind.Options, config.tool_options.get(name, {}), f"rollout.tool_options.{name}."))
        for name, kind in kinds.items()
    }


class Toolbox:
    """The tools of a run. `counters` counts calls, and refused ones."""

    def __init__(self, config: RolloutConfig, parser: Assistant) -> None:
        self.parser = parser
        self.schemas = schemas(config.tools)
        self.counters: Counter[str] = Counter()
        self._tools = make_tools(config)

    async def answer(self, text: str, task: Task) -> tuple[list[Message], float]:
        """The tools' messages for the calls in `text`, if any, and the reward of these calls."""
        results = [await self._call(call, task) for call in await self.parser.tool_calls(text, self.schemas)]
        return [Message("tool", result.content) for result in results], sum(result.reward for result in results)

    async def _call(self, call: ToolCall, task: Task) -> ToolResult:
        self.counters["tool_calls"] += 1
        try:
            if call.name not in self._tools:
                raise ToolError(f"no tool {call.name}; there are {', '.join(self._tools)}")
            parameters = self._tools[call.name].SCHEMA["parameters"]
            check_arguments(call.arguments, parameters)
            return await self._tools[call.name].call(task, **call.arguments)
        except ToolError as error:
            self.counters["tool_errors"] += 1
            return ToolResult(f"error: {error}")


def check_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Raise ToolError where `arguments` do not fit the names and the JSON types of `parameters`."""
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"no argument {name}")
    for name, value in arguments.items():
        if name not in parameters["properties"]:
            raise ToolError(f"unknown argument {name}; there are {', '.join(parameters['properties'])}")
        kind = parameters["properties"][name].get("type")
        fits = isinstance(value, _TYPES.get(kind, object)) and isinstance(value, bool) == (kind == "boolean")
        if kind in _TYPES and not fits:
            raise ToolError(f"argument {name} is no {kind}")
