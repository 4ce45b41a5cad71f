"""Thoughts: what a policy writes between `<think>` and `</think>`, for itself alone."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_BLOCK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_MARK = re.compile(r"</?think>")


def visible(text: str) -> str:
    """`text` without its thoughts.

    Templates may open the thought in the prompt, and a budget may cut it: all up to a `</think>` without its
    `<think>`, and all after a `<think>` without its `</think>`, is thought as well.
    """
    text = _BLOCK.sub("", text)
    if CLOSE in text:
        text = text.rpartition(CLOSE)[2].lstrip()
    return text.partition(OPEN)[0]


def fault(text: str, *, opened: bool = False) -> str | None:
    """Why a turn cannot be shown to a user, or None: nothing visible, thoughts unbalanced or nested.

    `opened`: the prompt ends with `<think>`.
    """
    depth = int(opened)
    for mark in _MARK.findall(text):
        depth += 1 if mark == OPEN else -1
        if depth not in (0, 1):
            return "nested <think>" if depth > 1 else "</think> without <think>"
    if depth:
        return "<think> without </think>"
    return None if visible(text).strip() else "an empty reply"
