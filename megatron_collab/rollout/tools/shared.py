"""Tools of the assistant and of the user that share one state, such as the user's telephone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from megatron_collab.rollout.tools import Schema, Toolset, run
from megatron_collab.rollout.tools.function import schema_of
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
        return self._schemas(self.FUNCTIONS)

    @cached_property
    def user_schemas(self) -> Sequence[Schema]:
        return self._schemas(self.USER_FUNCTIONS)

    async def answer(self, task: Task, call: ToolCall) -> Any:
        return await run(getattr(self, call.name), **call.arguments)

    def _schemas(self, names: Sequence[str]) -> list[Schema]:
        return [schema_of(getattr(self, name), f"tool {type(self).__name__}.{name}") for name in names]
