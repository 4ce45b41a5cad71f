"""The conversation that a call to a language model belongs to.

Two futures may send the same question at the same time and get different answers. The name of a conversation does not
depend on when and where it is played, so it identifies the calls in a recording.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Caller:
    """A conversation: its name, and how often it has sent each question (by digest)."""

    name: str
    question_counts: Counter[bytes] = field(default_factory=Counter)


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def ask_as(name: str) -> None:
    """Attribute all further calls of this asyncio task, and of tasks it starts, to the conversation `name`."""
    _CALLER.set(Caller(name))


def caller() -> Caller | None:
    """The conversation of this asyncio task; None if it has none."""
    return _CALLER.get()
