from __future__ import annotations

import pytest

from megatron_collab.reward.metrics.bleu import character_bleu
from megatron_collab.types import Missing
from tests.reward.fakes import FakeJudge, about, play, score

CAT = about("the cat sat on a mat")


def test_the_token_level_by_hand() -> None:
    """5 of 6, 3 of 5, 2 of 4 and 1 of 3 n-grams match: 5/6 * 3/5 * 2/4 * 1/3 = 1/12; lengths are equal."""
    judge = FakeJudge({"document": "the cat sat on the mat"})
    assert score("bleu", CAT, play(CAT, "Here you go"), judge) == pytest.approx((1 / 12) ** 0.25)


def test_the_character_level_by_hand() -> None:
    """abcde, of which abcd is in abcdf: 4/5 * 3/4 * 2/3 * 1/2 = 1/5."""
    task = about("abcdf")
    judge = FakeJudge({"document": "abcde"})
    assert score("bleu", task, play(task, "x"), judge, level="character") == pytest.approx((1 / 5) ** 0.25)


@pytest.mark.parametrize(
    ("document", "reference", "expected"),
    [
        ("abcd", "abcd", 1.0),
        ("abcd", "abcdefgh", 0.36787944117144233),  # all match; half as long: exp(1 - 8/4)
        ("abcdabcd", "abcd", (4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25),  # a match counts once; longer costs no brevity
        ("abcxabc", "abcyabc", 0.0),  # no common 4-gram, and nothing is smoothed
        ("abc", "abc", 0.0),  # too short for one
        ("", "abcd", 0.0),
    ],
)
def test_character_bleu_clips_punishes_brevity_and_does_not_smooth(
    document: str, reference: str, expected: float
) -> None:
    assert character_bleu(document, reference) == pytest.approx(expected)


def test_without_extraction_the_last_reply_is_the_document() -> None:
    played = play(CAT, "shall I?", "yes", "the cat sat on a mat")
    assert score("bleu", CAT, played, extract=False) == pytest.approx(1.0)
    assert score("bleu", CAT, play(CAT), extract=False) == 0.0


def test_the_judge_is_shown_the_conversation_and_not_the_reference() -> None:
    judge = FakeJudge({"document": ""})
    assert score("bleu", CAT, play(CAT, "a draft", "fine"), judge, model="openai/strong") == 0.0
    assert "**Assistant**: a draft\n**User**: fine" in judge.prompts[0] and CAT.answer not in judge.prompts[0]
    assert judge.models == ["openai/strong"]


def test_an_outage_of_the_judge_is_missing() -> None:
    assert score("bleu", CAT, play(CAT, "x"), FakeJudge(Missing("down"))) == Missing("down")


def test_it_does_not_apply_to_a_task_without_a_reference() -> None:
    assert score("bleu", about(""), play(about(""), "x"), FakeJudge()) is None
