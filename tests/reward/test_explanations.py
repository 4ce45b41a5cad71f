from __future__ import annotations

import asyncio

from megatron_collab.reward.explanations import explain, explained
from megatron_collab.runtime.redact import LONGEST_EXCERPT
from megatron_collab.types import Judgment


def test_every_score_has_its_own_explanations() -> None:
    """Also if several conversations are scored at once, and if the metric leaves the event loop's thread."""

    async def score(name: str) -> Judgment | None:
        with explained() as judgment:
            explain(f"{name} first", "{1}")
            await asyncio.sleep(0)
            await asyncio.to_thread(explain, "", f"{{{name}}}")
        return judgment()

    async def two() -> list[Judgment | None]:
        return await asyncio.gather(score("a"), score("b"))

    assert asyncio.run(two()) == [Judgment("a first", "{1}\n\n{a}"), Judgment("b first", "{1}\n\n{b}")]


def test_nothing_explained_is_no_judgment() -> None:
    with explained() as judgment:
        explain("", "")
    explain("outside of a score")
    assert judgment() is None


def test_a_judgment_is_bounded_and_a_cut_is_marked() -> None:
    with explained() as judgment:
        for _ in range(3):
            explain("r" * LONGEST_EXCERPT, "a" * LONGEST_EXCERPT)
    kept = judgment()
    assert kept is not None
    for text in (kept.reason, kept.answer):
        assert len(text) == LONGEST_EXCERPT and text.endswith("… [cut]")
