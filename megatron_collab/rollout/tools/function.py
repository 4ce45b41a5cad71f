"""Functions as tools: the schema comes from the signature and the docstring, as chat templates expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_collab.rollout.tools import Schema, Tool, run
from megatron_collab.settings import ConfigError, require
from megatron_collab.types import Task


class FunctionTool(Tool):
    """Base of the classes that `tool_of` creates; a function has no state, so all conversations share the instance."""

    function: Callable[..., Any]

    def new(self) -> FunctionTool:
        return self

    def fork(self) -> FunctionTool:
        return self

    async def call(self, task: Task, **arguments: Any) -> Any:
        return await run(self.function, **arguments)


def tool_of(function: Callable[..., Any], setting: str) -> type[Tool]:
    """The tool that calls `function`. Raises ConfigError, naming `setting`, if the function has no schema."""
    schema = schema_of(function, setting)
    return type(str(schema["name"]), (FunctionTool,), {"SCHEMA": schema, "function": staticmethod(function)})


def schema_of(function: Callable[..., Any], setting: str) -> Schema:
    """The function's attribute SCHEMA, or a schema from its type hints and the `Args:` section of its docstring.

    SCHEMA may have OpenAI's wrapper {"type": "function", "function": …}.
    """
    declared = getattr(function, "SCHEMA", None)
    if declared is None:
        from transformers.utils import get_json_schema  # takes seconds to import

        try:
            declared = get_json_schema(function)
        except Exception as error:  # transformers raises two types without a common base
            message = "give it type hints and a docstring with Args:, or an attribute SCHEMA"
            raise ConfigError(f"{setting}: {' '.join(str(error).split())}; {message}") from error
    schema = declared.get("function", declared)
    complete = {"name", "parameters"} <= schema.keys()
    require(complete, f"{setting}: its SCHEMA lacks name or parameters; give both, in OpenAI's format")
    return schema
