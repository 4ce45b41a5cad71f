"""Conversations for the bench of the metric `accuracy`, made by changes whose effect on the verdict is known.

The changes come from the answers, not from the rules of the metric: a change rewrites an answer (right), spoils it
(wrong), or makes it a statement that is neither (open).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Truth = Literal["right", "wrong", "open"]


class Case(NamedTuple):
    """Replies of a conversation, the task's answer, and whether the replies state it; open: no rule should decide."""

    kind: str
    answer: str
    replies: tuple[str, ...]
    truth: Truth
