"""Tools of the assistant and of the user that share one state, such as the user's telephone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from megatron_collab.rollout.tools import Schema, Toolset, run
from megatron_collab.rollout.tools.function import schema_of
from megatron_collab.settings import require
from megatron_collab.types import Task, ToolCall


class SharedTools(Toolset):
    """Methods as functions, over the state in one object: FUNCTIONS for the policy, USER_FUNCTIONS for the user.

    A method may be async, and returns what a tool returns. Its schema comes from its type hints and docstring, or from
    its attribute SCHEMA. A method may be in both lists.
    """

    FUNCTIONS: ClassVar[Sequence[str]] = ()
    USER_FUNCTIONS: ClassVar[Sequence[str]] = ()

    @cached_property
    def schemas(self) -> Sequence[Schema]:
        return self._schemas("FUNCTIONS")

    @cached_property
    def user_schemas(self) -> Sequence[Schema]:
        return self._schemas("USER_FUNCTIONS")

    async def answer(self, task: Task, call: ToolCall) -> Any:
        return await run(getattr(self, call.name), **call.arguments)

    def _schemas(self, attribute: str) -> list[Schema]:
        """The schemas of the methods that an attribute lists. Raises ConfigError if one is no method for calls."""
        names, prefix = getattr(self, attribute), f"tool {type(self).__name__}"
        listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        require(listed, f"{prefix}: {attribute} is {names!r}; give a list of the names of methods")
        for name in names:
            is_method = not hasattr(SharedTools, name) and callable(getattr(self, name, None))
            message = f"{prefix}: {attribute} names {name}, which is not a method of the class's own"
            require(is_method, f"{message}; define it, or leave it out")
        return [schema_of(getattr(self, name), f"{prefix}.{name}") for name in names]
