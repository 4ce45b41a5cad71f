"""The tools of a run and of each conversation: created at the first call, copied for futures, closed at the end.

Tools are named in TOOLS, or given as package.module:Class, a function or verl's file of tools; servers in
rollout.mcp_servers add their own tools. SGLang parses the calls (rollout.tool_parser).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema

from megatron_collab.inference.client import UnreadableCall
from megatron_collab.rollout.tools import Schema, Tool, ToolFailure, ToolLost, ToolResult, Toolset, run
from megatron_collab.rollout.tools.function import tool_of
from megatron_collab.rollout.tools.mcp_server import McpTools, server
from megatron_collab.rollout.tools.of_user import UserTools
from megatron_collab.rollout.tools.verl import verl_tools
from megatron_collab.runtime.process import ends_caller
from megatron_collab.settings import ConfigError, Resolved, build, lookup, nearest, require
from megatron_collab.types import Message, Task, ToolCall

if TYPE_CHECKING:
    from megatron_collab.inference.assistant import Assistant


logger = logging.getLogger(__name__)
LONGEST_RESULT = 1 << 17  # characters of one call's result that the policy sees
TOOLS = {"calculator": "megatron_collab.rollout.tools.calculator:Calculator"}


def find_tool(name: str) -> type[Toolset]:
    """One of TOOLS, or a Toolset or a function given as package.module:NAME. Raises ConfigError."""
    target = lookup(name, "rollout.tools", TOOLS, Toolset, functions=True)
    tool: type[Toolset] = target if isinstance(target, type) else tool_of(target, f"rollout.tools={name}")
    has_schema = not issubclass(tool, Tool) or hasattr(tool, "SCHEMA")
    require(has_schema, f"rollout.tools={name}: has no SCHEMA; add one, its description for the policy")
    return tool


@dataclass(frozen=True)
class ToolSpec(Resolved):
    """The tools of a run: rollout.tools, rollout.tool_options and rollout.mcp_servers."""

    names: Sequence[str]
    options: Mapping[str, Mapping[str, Any]]
    mcp_servers: Mapping[str, Mapping[str, Any]]

    @cached_property
    def toolsets(self) -> list[Toolset]:
        """Conversations get instances made from these. Nothing is started, and MCP servers are not contacted yet."""
        classes: list[type[Toolset]] = []
        for name in self.names:
            classes += verl_tools(name) if name.endswith((".yaml", ".yml")) else [find_tool(name)]
        kinds = {kind.SCHEMA["name"] if issubclass(kind, Tool) else kind.__name__: kind for kind in classes}
        require(len(kinds) == len(classes), f"rollout.tools={self.names}: two tools have the same name")
        for name in self.options:
            require(name in kinds, f"rollout.tool_options.{name}: not in rollout.tools{nearest(name, kinds)}")
        toolsets: list[Toolset] = [
            kind(build(kind.Options, self.options.get(name, {}), f"rollout.tool_options.{name}."))
            for name, kind in kinds.items()
        ]
        return toolsets + [McpTools(server(name, settings)) for name, settings in self.mcp_servers.items()]

    def schemas(self) -> list[dict[str, Any]]:
        """The functions in the format of the chat template and the parser.

        Raises ConfigError if two have the same name, one has no valid JSON schema, or an MCP server does not answer.
        """
        tool_schemas = [schema for tools in self.toolsets for schema in tools.schemas]
        for schema in tool_schemas:
            check_schema(schema)
        duplicates = [name for name, count in Counter(schema["name"] for schema in tool_schemas).items() if count > 1]
        reason = "two of rollout.tools and rollout.mcp_servers have this name"
        out = "choose with rollout.mcp_servers.NAME.tools"
        require(not duplicates, f"tool {duplicates and duplicates[0]}: {reason}; {out}")
        return [{"type": "function", "function": schema} for schema in tool_schemas]

    @cached_property
    def user_functions(self) -> dict[str, Function]:
        """The functions for users, by name. Raises ConfigError if two have the same name, or one no valid schema."""
        functions = [Function(tools, schema) for tools in self.toolsets for schema in tools.user_schemas]
        by_name = {function.schema["name"]: function for function in functions}
        require(len(by_name) == len(functions), f"rollout.tools={self.names}: two functions for users have one name")
        for function in functions:
            check_schema(function.schema)
        return by_name

    def check_user_tools(self, names: Sequence[str], group: str) -> None:
        """Raises ConfigError if users, whose options are in `group`, are to call a function that does not exist."""
        for name in names:
            known = f"there are {', '.join(self.user_functions)}{nearest(name, self.user_functions)}"
            out = known if self.user_functions else "name a class with functions for users in rollout.tools"
            require(name in self.user_functions, f"{group}.tools: no function {name} for users; {out}")


class Function(NamedTuple):
    """A function that is called, and the tools that it belongs to."""

    tools: Toolset
    schema: Schema


def check_schema(schema: Schema) -> None:
    """Raises ConfigError unless the schema of a function has a JSON schema of its parameters."""
    try:
        _draft(schema["parameters"]).check_schema(schema["parameters"])
    except jsonschema.SchemaError as error:
        message = f"tool {schema['name']}: parameters are not a JSON schema ({error.json_path}: {error.message})"
        raise ConfigError(f"{message}; correct them, or leave the tool out") from error


class Toolbox:
    """The tools of a process. `counters`: calls, rejected, timed-out and failed calls, reconnects, cut results."""

    def __init__(self, tools: ToolSpec, timeout: float, parser: Assistant) -> None:
        """`timeout`: rollout.tool_timeout. Raises ConfigError if an MCP server does not answer."""
        self.parser, self.timeout = parser, timeout
        self.toolsets, self.schemas = tools.toolsets, tools.schemas()
        self.functions = {
            schema["name"]: Function(tools, schema) for tools in self.toolsets for schema in tools.schemas
        }
        self.user_functions = tools.user_functions
        self.counters: Counter[str] = Counter()

    def open(self, task: Task, origin: ConversationTools | None = None) -> ConversationTools:
        """The tools of a new conversation about `task`; in a future they continue from `origin`, the trained turn's."""
        return ConversationTools(self, task, origin)


class ConversationTools(AbstractAsyncContextManager["ConversationTools"]):
    """The tool instances of one conversation; leaving the context closes them."""

    def __init__(self, box: Toolbox, task: Task, origin: ConversationTools | None) -> None:
        self.box, self.task, self._origin = box, task, origin
        self._instances: dict[Toolset, Toolset] = {}  # by the toolset in the box
        self._open: list[Toolset] = []  # instances to close, including ones whose start failed

    def fork(self) -> ConversationTools:
        """The tools of a future, which continue from this state; they are copied when first called."""
        return self.box.open(self.task, self)

    def for_user(self, names: Sequence[str], most: int) -> UserTools:
        """The functions of these `names` for the user of the conversation; `most`: rounds of calls in a message."""
        functions = {name: self.box.user_functions[name] for name in names}
        schemas = [{"type": "function", "function": function.schema} for function in functions.values()]
        return UserTools(schemas, partial(self._call, functions=functions, prefix="user_"), most)

    async def __aexit__(self, *_: object) -> None:
        for tools in self._open:
            try:
                async with asyncio.timeout(self.box.timeout):
                    await run(tools.close)
            except BaseException as error:  # a custom tool may raise anything; the conversation keeps its score
                if ends_caller(error):
                    raise
                self.box.counters["tool_failures"] += 1
                logger.warning(f"tools: closing {type(tools).__name__} failed: {type(error).__name__}: {error}")

    async def answer(self, text: str) -> tuple[list[Message], float]:
        """The tools' messages for the calls in `text`, if any, and the sum of the calls' rewards.

        Unreadable calls are answered with an error message. Raises ToolFailure, or EngineError if no parser is
        available.
        """
        try:
            calls = await self.box.parser.tool_calls(text, self.box.schemas)
        except UnreadableCall:
            self.box.counters.update(["tool_calls", "tool_errors"])
            return [Message("tool", "error: the call cannot be read")], 0.0
        results = [await self._call(call, self.box.functions) for call in calls]
        if cut := sum(len(result.content) > LONGEST_RESULT for result in results):
            self.box.counters["tool_cut"] += cut
        return [_message(result) for result in results], sum(result.reward for result in results)

    async def _call(self, call: ToolCall, functions: Mapping[str, Function], prefix: str = "") -> ToolResult:
        """The result of calling one of `functions`; `prefix`: of the names of the counters."""
        counters = self.box.counters
        counters[f"{prefix}tool_calls"] += 1
        try:
            check_call(call, {name: function.schema["parameters"] for name, function in functions.items()})
            async with asyncio.timeout(self.box.timeout):
                tools = await self._instance(functions[call.name].tools)
            try:
                return await self._answer(tools, call)
            except ToolLost:  # the connection may be restored
                return await self._answer(tools, call)
        except TimeoutError:
            counters[f"{prefix}tool_timeouts"] += 1
            return ToolResult(f"error: {call.name} timed out")
        except ValueError as error:
            counters[f"{prefix}tool_errors"] += 1
            return ToolResult(f"error: {error}")
        except BaseException as error:  # a custom tool may raise anything
            if ends_caller(error):
                raise
            counters[f"{prefix}tool_failures"] += 1
            raise ToolFailure(f"tool {call.name}: {type(error).__name__}: {' '.join(str(error).split())}") from error

    async def _answer(self, tools: Toolset, call: ToolCall) -> ToolResult:
        if await tools.restore(self.box.timeout):
            self.box.counters["tool_reconnects"] += 1
        async with asyncio.timeout(self.box.timeout):
            return _result(await run(tools.answer, self.task, call))

    async def _instance(self, tools: Toolset) -> Toolset:
        """This conversation's instance of `tools`; if one fails to start, the next call creates another."""
        if tools not in self._instances:
            if (parent := self._parent_instance(tools)) is not None:
                instance = await run(parent.fork)
                self._open.append(instance)
            else:
                instance = tools.new()
                self._open.append(instance)
                await run(instance.start, self.task)
            self._instances[tools] = instance
        return self._instances[tools]

    def _parent_instance(self, tools: Toolset) -> Toolset | None:
        """The last instance of `tools` before this conversation began: of its origin, or of the origin's, and so on."""
        origin = self._origin
        while origin is not None and tools not in origin._instances:
            origin = origin._origin
        return origin._instances[tools] if origin else None


def check_call(call: ToolCall, parameters: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError if there is no such tool, or the arguments do not fit the JSON schema in `parameters`."""
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
        argument_schema = known[name] if isinstance(known[name], Mapping) else {}  # `true` allows anything
        check = _draft(schema)({**argument_schema, **definitions})
        violation = jsonschema.exceptions.best_match(check.iter_errors(value))
        if violation and not (value is None and argument_schema.get("nullable")):  # as transformers marks them
            raise ValueError(f"argument {name}: {violation.message}")


def _draft(schema: Mapping[str, Any]) -> Any:
    """The validator for the JSON schema draft that `schema` names, by default MCP's draft."""
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


def _message(result: ToolResult) -> Message:
    """The tool message for the policy, which says so if the result is cut.

    Lone surrogates, which arguments may contain, are replaced for the tokenizer.
    """
    content, length = result.content[:LONGEST_RESULT], len(result.content)
    note = f"\n[cut: {LONGEST_RESULT} of {length} characters]" if length > LONGEST_RESULT else ""
    return Message("tool", content.encode(errors="replace").decode() + note)


def _result(value: Any) -> ToolResult:
    """The return value of a tool as a ToolResult; a JSON value becomes text."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
