"""Functions as tools: the schema comes from the signature and the docstring, as chat templates expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_collab.config import ConfigError, require
from megatron_collab.rollout.tools import Schema, Tool, run
from megatron_collab.types import Task


class FunctionTool(Tool):
    """Base of the classes that `tool_of` makes: a function has no state, and all conversations share it."""

    function: Callable[..., Any]

    def new(self) -> FunctionTool:
        return self

    def fork(self) -> FunctionTool:
        return self

    async def call(self, task: Task, **arguments: Any) -> Any:
        return await run(self.function, **arguments)


def tool_of(function: Callable[..., Any], setting: str) -> type[Tool]:
    """The tool that calls `function`; raises ConfigError, naming `setting`, where it has no schema."""
    schema = schema_of(function, setting)
    return type(str(schema["name"]), (FunctionTool,), {"SCHEMA": schema, "function": staticmethod(function)})


def schema_of(function: Callable[..., Any], setting: str) -> Schema:
    """Its attribute SCHEMA, or one made of its type hints and its docstring, whose section `Args:` says what they are.

    SCHEMA may be wrapped as OpenAI's interface takes it: {"type": "function", "function": …}.
    """
    given = getattr(function, "SCHEMA", None)
    if given is None:
        from transformers.utils import get_json_schema  # which takes seconds to import

        try:
            given = get_json_schema(function)
        except Exception as error:  # two kinds of transformers' own, without a common base
            message = "give it type hints and a docstring with Args:, or an attribute SCHEMA"
            raise ConfigError(f"{setting}: {' '.join(str(error).split())}; {message}") from error
    schema = given.get("function", given)
    complete = {"name", "parameters"} <= schema.keys()
    require(complete, f"{setting}: its SCHEMA lacks name or parameters; give both, as OpenAI's interface takes them")
    return schema
