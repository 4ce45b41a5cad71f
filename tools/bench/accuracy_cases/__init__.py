"""Conversations for the bench of the metric `accuracy`, made by changes whose effect on the verdict is known.

The changes come from the answers, not from the rules of the metric: a change rewrites an answer (right), spoils it
(wrong), or makes it a statement that is neither (open).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

Truth = Literal["right", "wrong", "open"]


class Case(NamedTuple):
    """Replies of a conversation, the task's answer, and whether the replies state it; open: no rule should decide."""

    kind: str
    answer: str
    replies: tuple[str, ...]
    truth: Truth


class Gold(NamedTuple):
    """An answer and changes of it."""

    answer: str
    right: Sequence[str]
    wrong: Sequence[str]
    open: Sequence[str] = ()


def whole(draw: random.Random) -> int:
    return draw.choice([number for number in range(-9, 10) if abs(number) > 1])


def pair(draw: random.Random) -> tuple[int, int]:
    """Two numbers whose size differs."""
    a, b = draw.sample(range(2, 12), 2)
    return a * draw.choice((1, -1)), b * draw.choice((1, -1))


def signed_sum(*terms: tuple[int, str]) -> str:
    """A sum of terms with coefficients other than 0."""
    text = "".join(f"{'+' if k > 0 else '-'}{'' if abs(k) == 1 and name else abs(k)}{name}" for k, name in terms)
    return text.removeprefix("+")
