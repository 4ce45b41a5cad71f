"""verl's tools: classes with create, execute, calc_reward and release in verl's file of tools, which need no edit."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_collab.rollout.tools import Tool, ToolFailure, ToolResult
from megatron_collab.runtime import files, verl
from megatron_collab.runtime.side_loop import SideLoop
from megatron_collab.settings import ConfigError, option, require
from megatron_collab.settings.documents import bounded, parse_yaml
from megatron_collab.types import Task

_METHODS = ("create", "execute", "calc_reward", "release")
_LONGEST_FILE = 1 << 20  # bytes
_FORM = "verl's file of tools has a list `tools`, each with class_name, config and tool_schema"


class VerlTool(Tool):
    """Base of the classes that `verl_tools` creates: a tool of verl, with an object of its own in each conversation.

    `make` constructs the object.
    """

    make: ClassVar[Any]

    @dataclass(frozen=True)
    class Options:
        calc_reward: bool = option(False, "what calc_reward rises by with a call is a reward of its turn")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._loop: SideLoop | None = None
        self._tool: Any = None  # until it is created
        self._id, self._score = str(uuid4()), 0.0
        self._arguments: Mapping[str, Any] = {}  # of the task, by method as verl names them

    def check_copies(self) -> None:
        out = "create in `create` what cannot be copied, or set rollout.futures=0"
        label = f"tool {self.SCHEMA['name']}: futures need a copy of its object; {out}"
        verl.attempt(label, lambda: copy.deepcopy(type(self).make()))

    async def start(self, task: Task) -> None:
        self._loop = SideLoop.acquire()
        tool = await self._loop.run(type(self).make)
        tools = verl.without_nulls(task.metadata.get("tools_kwargs"))
        self._arguments = verl.without_nulls(tools.get(self.SCHEMA["name"]))
        arguments = {"ground_truth": task.answer, **verl.without_nulls(self._arguments.get("create_kwargs"))}
        created = await verl.call(self._loop, tool.create, self._id, create_kwargs=arguments, **arguments)
        instance = created[0] if isinstance(created, tuple) else created
        self._id = instance if isinstance(instance, str) else self._id
        self._tool = tool

    async def call(self, task: Task, **arguments: Any) -> ToolResult:
        parameter = inspect.signature(self._tool.execute).parameters.get("parameters")
        is_text = parameter is not None and parameter.annotation in (str, "str")  # older interfaces
        parameters = json.dumps(arguments) if is_text else arguments
        result = await self._call("execute", parameters)
        if not isinstance(result, tuple | list) or len(result) < 2:
            raise ToolFailure(f"execute returned {type(result).__name__}, not (response, reward, data)")
        reward = float(result[1] or 0.0)
        if self.options.calc_reward:
            score = float(await self._call("calc_reward"))
            reward, self._score = reward + score - self._score, score
        return ToolResult(_text(result[0]), reward)

    async def fork(self) -> VerlTool:
        assert self._loop
        future = type(self)(self.options)
        future._id, future._score, future._arguments = self._id, self._score, self._arguments
        future._tool = await self._loop.run(copy.deepcopy, self._tool)
        self._loop.users += 1
        future._loop = self._loop
        return future

    async def close(self) -> None:
        try:
            if self._tool is not None:
                await self._call("release")
        finally:
            if self._loop:
                self._loop.release()

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._loop
        keywords = verl.without_nulls(self._arguments.get(f"{method}_kwargs"))
        return await verl.call(self._loop, getattr(self._tool, method), self._id, *args, **keywords)


def verl_tools(file: str) -> list[type[VerlTool]]:
    """The tools in verl's file of tools. Raises ConfigError if one cannot be used."""
    setting = f"rollout.tools={file}"
    return [_tool(entry, f"{setting}, entry {at}") for at, entry in enumerate(_entries(file, setting), 1)]


def _entries(file: str, setting: str) -> list[Any]:
    path = Path(file)
    require(path.is_file(), f"{setting}: no such file")
    try:
        content = parse_yaml(files.read_text(path, _LONGEST_FILE))
        if isinstance(content, dict):  # OmegaConf would read a text as YAML again
            content = bounded(OmegaConf.to_container(OmegaConf.create(content), resolve=True))
            if len(str(content)) > _LONGEST_FILE:
                raise ValueError(f"${{…}} in it make more than {_LONGEST_FILE} characters")
    except (OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(f"{setting}: cannot be read ({' '.join(str(error).split())}); {_FORM}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    require(isinstance(entries, list) and bool(entries), f"{setting}: {_FORM}")
    assert isinstance(entries, list)
    return entries


def _tool(entry: Any, setting: str) -> type[VerlTool]:
    require(isinstance(entry, dict) and isinstance(entry.get("class_name"), str), f"{setting}: {_FORM}")
    name, config, schema = entry["class_name"], entry.get("config") or {}, entry.get("tool_schema")
    require(config.get("type", "native") == "native", f"{setting}: type {config.get('type')}; use rollout.mcp_servers")
    kind = verl.load(name, setting, _METHODS)

    def make() -> Any:
        from verl.tools.schemas import OpenAIFunctionToolSchema

        return kind(copy.deepcopy(config), schema and OpenAIFunctionToolSchema.model_validate(schema))

    tool = verl.attempt(f"{setting}={name}: cannot be constructed with its config", make)
    function = (schema or _plain(tool.get_openai_tool_schema())).get("function", {})
    require({"name", "parameters"} <= function.keys(), f"{setting}={name}: its tool_schema lacks name or parameters")
    return type(kind.__name__, (VerlTool,), {"SCHEMA": function, "make": staticmethod(make)})


def _plain(schema: Any) -> dict[str, Any]:
    return dict(schema if isinstance(schema, Mapping) else schema.model_dump(exclude_unset=True, exclude_none=True))


def _text(response: Any) -> str:
    """The text of a response: a ToolResponse, its fields as a dict, or a text. Raises TypeError for other contents."""
    if not isinstance(response, dict):
        response = vars(response) if hasattr(response, "text") else {"text": response}
    if response.get("image") or response.get("video"):
        raise TypeError("execute returned an image or a video; the policy reads texts")
    return str(response.get("text") or "")
