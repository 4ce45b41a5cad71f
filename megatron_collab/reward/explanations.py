"""Why a metric gave its score: what its judge answered while it scored, or what the metric says itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

from megatron_collab.runtime.redact import excerpt
from megatron_collab.types import Judgment

_MOST_VERSIONS = 8  # of a score: a metric may ask its judge several times
_COLLECTED: ContextVar[list[Judgment] | None] = ContextVar("explanations", default=None)


def explain(reason: str, answer: str = "", version: str = "") -> None:
    """Add a reason to the score that this asyncio task is about to give.

    `answer`: the judge's answer that states it; `version`: of the model that answered.
    """
    collected = _COLLECTED.get()
    if collected is not None:  # else the metric is called without a run, as in a test
        collected.append(Judgment(reason, answer, (version,) if version else ()))


async def gather_in_order[Answer](calls: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """The results of calls that run at once; what they explain is in the order of the calls, not of their ends."""
    collected, parts = _COLLECTED.get(), [list[Judgment]() for _ in calls]

    async def collect(call: Awaitable[Answer], part: list[Judgment]) -> Answer:
        _COLLECTED.set(part)  # of this task only: gather gives each its own context
        return await call

    try:
        return await asyncio.gather(*map(collect, calls, parts))
    finally:
        if collected is not None:
            collected.extend(chain.from_iterable(parts))


@contextmanager
def explained() -> Iterator[Callable[[], Judgment | None]]:
    """Collect what is explained within; the function that it yields returns all of it, in order, or None.

    Reasons and answers are excerpts, of at most LONGEST_EXCERPT characters.
    """
    collected = list[Judgment]()
    token = _COLLECTED.set(collected)
    try:
        yield lambda: _joined(collected)
    finally:
        _COLLECTED.reset(token)


def _joined(judgments: list[Judgment]) -> Judgment | None:
    reasons = [judgment.reason for judgment in judgments if judgment.reason]
    answers = [judgment.answer for judgment in judgments if judgment.answer]
    versions = sorted({version for judgment in judgments for version in judgment.versions})
    if not reasons and not answers and not versions:
        return None
    return Judgment(excerpt("\n\n".join(reasons)), excerpt("\n\n".join(answers)), tuple(versions[:_MOST_VERSIONS]))
