"""Metrics of whole conversations: one module each, named as in reward.weights. Adding one is adding a file.

A metric module defines

    async def score(task: Task, conversation: Conversation, trained_turn: int) -> Score | None

`conversation` is everything that was said, the policy's last reply included, and
`conversation.turns[trained_turn]` is the turn that the reward is for. None: the metric does not apply to this
task. Missing(why): it applies, but no score could be had.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable

from megatron_collab.types import Conversation, Score, Task

Metric = Callable[[Task, Conversation, int], Awaitable[Score | None]]


def known() -> list[str]:
    """The names of all metrics, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Metric:
    """The metric of that name."""
    return importlib.import_module(f"{__name__}.{name}").score
