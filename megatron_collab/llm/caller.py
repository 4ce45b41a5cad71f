"""Who asks: the conversation that a call of a language model is made for.

Two futures may ask the same at the same time and get different answers. The name of a conversation is the same whenever
and wherever it is played, so it tells their calls apart where these are recorded.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Caller:
    """A conversation by its name, and by the digest of a question how often it was asked."""

    name: str
    asked: Counter[bytes] = field(default_factory=Counter)


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def ask_as(name: str) -> None:
    """From now on the calls of this asyncio task, and of those that it starts, are of the conversation `name`."""
    _CALLER.set(Caller(name))


def caller() -> Caller | None:
    """The conversation that this asyncio task belongs to, if it does."""
    return _CALLER.get()
