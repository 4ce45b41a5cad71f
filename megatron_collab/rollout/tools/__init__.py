"""Tools that the policy may call between its user's turns: what they are made from, and what they raise.

Answers go into the token stream, but are not trained.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Real
from threading import Thread
from typing import Any, ClassVar

from megatron_collab.config import Extension
from megatron_collab.types import Task, ToolCall

HUNG = 256  # calls that have timed out and go on in their threads; beyond them no call of the kind is begun
_hung: set[Thread] = set()

Schema = Mapping[str, Any]  # a function in OpenAI's schema: {"name": …, "description": …, "parameters": JSON schema}


class ToolError(ValueError):
    """A call that the tool refuses; the policy reads why and may try again."""


class ToolFailure(RuntimeError):
    """The tool does not work, whatever it is asked; the conversation ends without a score."""


class ToolLost(ToolFailure):
    """What the tool needs is lost, as a connection: the call has not happened, and after `restore` is tried again."""


@dataclass(frozen=True)
class ToolResult:
    """The answer of a tool, and the reward of the turn that called it, which is finite; TypeError for anything else."""

    content: str
    reward: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"a ToolResult has a text, and not {self.content!r}")
        if not isinstance(self.reward, Real) or not math.isfinite(self.reward):
            raise TypeError(f"a ToolResult has a finite number as reward, and not {self.reward!r}")


class Toolset(Extension):
    """Functions that the policy may call, and the state that they share in one conversation.

    A conversation has an instance of its own from its first call to its end. `start`, `answer`, `fork` and `close` may
    be async; those that are not are called in a thread, and delay no other conversation. A ValueError (ToolError is
    one) refuses a call, and the policy reads it; whatever else is raised ends the conversation with an error.
    """

    @property
    def schemas(self) -> Sequence[Schema]:
        """The functions as the policy sees them."""
        raise NotImplementedError

    def new(self) -> Toolset:
        """An instance for another conversation."""
        return type(self)(self.options)

    def check_task(self, task: Task) -> None:
        """Raises ValueError, with the way out, for a task that these functions cannot read; asked before a run."""

    def start(self, task: Task) -> Any:
        """Called before the first call; where it fails, the next call starts another instance."""

    def answer(self, task: Task, call: ToolCall) -> Any:
        """The answer to a call of one of the functions, whose arguments fit its schema: ToolResult, or a JSON value."""
        raise NotImplementedError

    async def restore(self, seconds: float) -> bool:
        """Called before each call, outside its time: make good what was lost, as a connection; whether anything was.

        `seconds`: what each step of it may take, which is rollout.tool_timeout.
        """
        return False

    def fork(self) -> Any:
        """The instance of a future, which goes on from the state that the trained turn has left; a deep copy.

        Where the state cannot be copied, as what a server holds: give another copy of it, or repeat the calls so far.
        """
        return copy.deepcopy(self)

    def close(self) -> Any:
        """Called once at the end of the conversation, whatever the ending."""


class Tool(Toolset):
    """Base of the tools with one function.

    `SCHEMA`: the function as the policy sees it; `Options`: a frozen dataclass of the tool's own settings, set as
    rollout.tool_options.NAME.SETTING.
    """

    SCHEMA: ClassVar[Schema]

    @property
    def schemas(self) -> Sequence[Schema]:
        return [self.SCHEMA]

    async def answer(self, task: Task, call: ToolCall) -> Any:
        return await run(self.call, task, **call.arguments)

    def call(self, task: Task, **arguments: Any) -> Any:
        """The answer to one call; may be async. Raises ToolError."""
        raise NotImplementedError


async def run(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What the function returns: one that is async is awaited, another is called in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **keywords)
    found = await _in_thread(partial(function, *args, **keywords))
    return await found if inspect.isawaitable(found) else found


async def _in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns in a thread of its own. ToolFailure where HUNG others have not returned in time.

    A thread cannot be ended. One that hangs must neither delay other calls nor the end of the process.
    """
    _hung.difference_update([thread for thread in _hung if not thread.is_alive()])
    if len(_hung) >= HUNG:
        message = f"{HUNG} calls of tools have timed out and still hang in their threads"
        raise ToolFailure(f"{message}; give the tools time limits of their own, below rollout.tool_timeout")
    outcome = Future[Any]()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=work, name="tool", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        _hung.add(thread)
        raise
