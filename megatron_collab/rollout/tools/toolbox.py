"""The tools of a run, and of a conversation: made at the first call, copied for the futures, closed at the end.

Tools have the names in TOOLS or are given as package.module:Class or a function; the servers in rollout.mcp_servers
bring tools of their own. SGLang parses the calls (rollout.tool_parser).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import jsonschema

from megatron_collab.config import ConfigError, RolloutConfig, build, lookup, nearest, require
from megatron_collab.inference.client import UnreadableCall
from megatron_collab.rollout.tools import Tool, ToolFailure, ToolLost, ToolResult, Toolset, run
from megatron_collab.rollout.tools.function import tool_of
from megatron_collab.rollout.tools.mcp_server import McpTools, server
from megatron_collab.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from megatron_collab.inference.assistant import Assistant

TOOLS = {"calculator": "megatron_collab.rollout.tools.calculator:Calculator"}


def find_tool(name: str) -> type[Tool]:
    """One of TOOLS, or a Tool or a function given as package.module:NAME. Raises ConfigError."""
    found = lookup(name, "rollout.tools", TOOLS, Tool, functions=True)
    tool: type[Tool] = found if isinstance(found, type) else tool_of(found, f"rollout.tools={name}")
    require(hasattr(tool, "SCHEMA"), f"rollout.tools={name}: has no SCHEMA, the function as the policy sees it")
    return tool


def make_tools(config: RolloutConfig) -> list[Toolset]:
    """Those of rollout.tools and rollout.mcp_servers, from which conversations get theirs; nothing is started yet.

    Raises ConfigError for what is refused; MCP servers are not asked yet.
    """
    kinds = {kind.SCHEMA["name"]: kind for kind in map(find_tool, config.tools)}
    require(len(kinds) == len(config.tools), f"rollout.tools={config.tools}: two tools have the same name")
    for name in config.tool_options:
        require(name in kinds, f"rollout.tool_options.{name}: not in rollout.tools{nearest(name, kinds)}")
    made: list[Toolset] = [
        kind(build(kind.Options, config.tool_options.get(name, {}), f"rollout.tool_options.{name}."))
        for name, kind in kinds.items()
    ]
    return made + [McpTools(server(name, given)) for name, given in config.mcp_servers.items()]


def schemas(toolsets: Sequence[Toolset]) -> list[dict[str, Any]]:
    """Their functions as the chat template and the parser take them.

    Raises ConfigError where two have the same name, one has no JSON schema, or an MCP server does not answer.
    """
    found = [schema for tools in toolsets for schema in tools.schemas]
    for schema in found:
        try:
            _draft(schema["parameters"]).check_schema(schema["parameters"])
        except jsonschema.SchemaError as error:
            said = f"tool {schema['name']}: its parameters are no JSON schema ({error.json_path}: {error.message})"
            raise ConfigError(f"{said}; correct them, or leave the tool out") from error
    twice = [name for name, count in Counter(schema["name"] for schema in found).items() if count > 1]
    message = "two of rollout.tools and rollout.mcp_servers have this name; choose with rollout.mcp_servers.NAME.tools"
    require(not twice, f"tool {twice and twice[0]}: {message}")
    return [{"type": "function", "function": schema} for schema in found]


class Toolbox:
    """The tools of a process. `counters` counts calls, those that were refused, timed out or failed, and reconnects."""

    def __init__(self, config: RolloutConfig, parser: Assistant) -> None:
        """Raises ConfigError for what is refused, also where an MCP server does not answer."""
        self.parser, self.timeout = parser, config.tool_timeout
        self.toolsets = make_tools(config)
        self.schemas = schemas(self.toolsets)
        self.owners = {schema["name"]: tools for tools in self.toolsets for schema in tools.schemas}
        self.parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.schemas}
        self.counters: Counter[str] = Counter()

    def open(self, task: Task, origin: ConversationTools | None = None) -> ConversationTools:
        """The tools of one more conversation about `task`; those of a future go on from `origin`, the trained turn's"""
        return ConversationTools(self, task, origin)


class ConversationTools(AbstractAsyncContextManager["ConversationTools"]):
    """What one conversation has called of a Toolbox; leaving the context closes it."""

    def __init__(self, box: Toolbox, task: Task, origin: ConversationTools | None) -> None:
        self.box, self.task, self._origin = box, task, origin
        self._made: dict[Toolset, Toolset] = {}  # by those of the box
        self._open: list[Toolset] = []  # those to close, also where their start failed

    def fork(self) -> ConversationTools:
        """Those of a future, which goes on from here; its copies are made when it calls them."""
        return self.box.open(self.task, self)

    async def __aexit__(self, *_: object) -> None:
        for tools in self._open:
            try:
                async with asyncio.timeout(self.box.timeout):
                    await run(tools.close)
            except Exception as error:  # of a tool from anywhere: the conversation is over, and keeps its score
                self.box.counters["tool_failures"] += 1
                print(f"tools: {type(tools).__name__} does not close: {type(error).__name__}: {error}", flush=True)

    async def answer(self, text: str) -> tuple[list[Message], float]:
        """The tools' messages for the calls in `text`, if any, and the reward of these calls.

        Calls that cannot be read are refused. Raises ToolFailure; EngineError where there is no parser.
        """
        try:
            calls = await self.box.parser.tool_calls(text, self.box.schemas)
        except UnreadableCall:
            self.box.counters.update(["tool_calls", "tool_errors"])
            return [Message("tool", "error: the call cannot be read")], 0.0
        results = [await self._call(call) for call in calls]
        return [_message(result) for result in results], sum(result.reward for result in results)

    async def _call(self, call: ToolCall) -> ToolResult:
        counters = self.box.counters
        counters["tool_calls"] += 1
        try:
            check_call(call, self.box.parameters)
            async with asyncio.timeout(self.box.timeout):
                tools = await self._own(self.box.owners[call.name])
            try:
                return await self._answer(tools, call)
            except ToolLost:  # it may be back
                return await self._answer(tools, call)
        except TimeoutError:
            counters["tool_timeouts"] += 1
            return ToolResult(f"error: {call.name} timed out")
        except ValueError as error:
            counters["tool_errors"] += 1
            return ToolResult(f"error: {error}")
        except Exception as error:  # of a tool from anywhere
            counters["tool_failures"] += 1
            raise ToolFailure(f"tool {call.name}: {type(error).__name__}: {' '.join(str(error).split())}") from error

    async def _answer(self, tools: Toolset, call: ToolCall) -> ToolResult:
        if await tools.restore(self.box.timeout):
            self.box.counters["tool_reconnects"] += 1
        async with asyncio.timeout(self.box.timeout):
            return _result(await run(tools.answer, self.task, call))

    async def _own(self, tools: Toolset) -> Toolset:
        """This conversation's instance of `tools`; where one does not start, the next call gets another."""
        if tools not in self._made:
            if self._origin and tools in self._origin._made:
                own = await run(self._origin._made[tools].fork)
                self._open.append(own)
            else:
                own = tools.new()
                self._open.append(own)
                await run(own.start, self.task)
            self._made[tools] = own
        return self._made[tools]


def check_call(call: ToolCall, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError where there is no such tool, or the arguments do not fit the JSON schema in `parameters`."""
    if call.name not in parameters:
        raise ValueError(f"no tool {call.name}; there are {', '.join(parameters)}")
    schema = parameters[call.name]
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in call.arguments:
            raise ValueError(f"no argument {name}")
    for name, value in call.arguments.items():
        if name not in known:
            raise ValueError(f"unknown argument {name}; there are {', '.join(known)}")
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        wanted = known[name] if isinstance(known[name], Mapping) else {}  # true: anything
        check = _draft(schema)({**wanted, **definitions})
        fault = jsonschema.exceptions.best_match(check.iter_errors(value))
        if fault and not (value is None and wanted.get("nullable")):  # as transformers says that it may be null
            raise ValueError(f"argument {name}: {fault.message}")


def _draft(schema: Mapping[str, Any]) -> Any:
    """The validator of the version of JSON schema that `schema` names, or of that of MCP."""
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


def _message(result: ToolResult) -> Message:
    """What the policy reads; no tokenizer takes half a surrogate pair, which the arguments of a call may bring."""
    return Message("tool", result.content.encode(errors="replace").decode())


def _result(found: Any) -> ToolResult:
    """What a tool has returned: a ToolResult, or a JSON value as a text."""
    if isinstance(found, ToolResult):
        return found
    return ToolResult(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
