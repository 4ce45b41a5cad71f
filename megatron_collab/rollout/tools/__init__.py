"""Base classes and errors of the tools that the policy, or the user, may call before it writes.

Answers of tools are part of the token stream but are not trained.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, ClassVar

from megatron_collab.runtime.side_loop import in_thread
from megatron_collab.settings import Extension
from megatron_collab.types import Task, ToolCall

Schema = Mapping[str, Any]  # a function in OpenAI's format: {"name": …, "description": …, "parameters": JSON schema}


class ToolError(ValueError):
    """A call that the tool rejects; the policy sees the reason and may try again."""


class ToolFailure(RuntimeError):
    """The tool is broken for all calls; the conversation ends without a score."""


class ToolLost(ToolFailure):
    """The tool lost a resource, e.g. a connection: the call was not made, and is retried after `restore`."""


@dataclass(frozen=True)
class ToolResult:
    """The answer of a tool and a finite reward for the turn that called it. Raises TypeError for other values."""

    content: str
    reward: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"a ToolResult needs a string as content, not {self.content!r}")
        if not isinstance(self.reward, Real) or not math.isfinite(self.reward):
            raise TypeError(f"a ToolResult needs a finite number as reward, not {self.reward!r}")


class Toolset(Extension):
    """Functions that the policy may call, and the state that they share in one conversation.

    Each conversation has its own instance from its first call to its end. `start`, `answer`, `fork` and `close` may be
    async; otherwise they are called in a thread, so they block no other conversation. A ValueError (e.g. ToolError)
    rejects a call, and the policy sees its text; any other exception ends the conversation with an error.
    """

    @property
    def schemas(self) -> Sequence[Schema]:
        """The schemas of the functions, shown to the policy."""
        raise NotImplementedError

    @property
    def user_schemas(self) -> Sequence[Schema]:
        """The schemas of the functions for users, of which user.tools names those that a user may call."""
        return ()

    def new(self) -> Toolset:
        """A new instance for another conversation."""
        return type(self)(self.options)

    def check_task(self, task: Task) -> None:
        """Raises ValueError, saying how to fix it, if these functions cannot read the task; called before a run."""

    def check_copies(self) -> None:
        """Raises ConfigError if instances cannot be copied for futures; called before a run with futures."""

    def start(self, task: Task) -> Any:
        """Called before the first call; if it fails, the next call starts another instance."""

    def answer(self, task: Task, call: ToolCall) -> Any:
        """Answer a call of one of the functions, with a ToolResult or a JSON value; the arguments fit its schema."""
        raise NotImplementedError

    async def restore(self, seconds: float) -> bool:
        """Restore lost resources, e.g. a connection; returns whether any was lost. Called before each call.

        Its time does not count towards the call's. `seconds` is rollout.tool_timeout, the limit of each step in it.
        """
        return False

    def fork(self) -> Any:
        """The instance for a future, which continues from the state after the trained turn; a deep copy by default.

        If the state cannot be copied, e.g. because a server holds it, restore it differently or repeat the calls.
        """
        return copy.deepcopy(self)

    def close(self) -> Any:
        """Called once at the end of the conversation, for every ending."""


class Tool(Toolset):
    """Base class of tools with one function.

    `SCHEMA`: the schema of the function, shown to the policy; `Options`: a frozen dataclass of the tool's settings, set
    as rollout.tool_options.NAME.SETTING.
    """

    SCHEMA: ClassVar[Schema]

    @property
    def schemas(self) -> Sequence[Schema]:
        return [self.SCHEMA]

    async def answer(self, task: Task, call: ToolCall) -> Any:
        return await run(self.call, task, **call.arguments)

    def call(self, task: Task, **arguments: Any) -> Any:
        """Answer one call; may be async. Raises ToolError."""
        raise NotImplementedError


async def run(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The function's result: an async function is awaited, any other is called in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **keywords)
    result = await in_thread(partial(function, *args, **keywords))
    return await result if inspect.isawaitable(result) else result
