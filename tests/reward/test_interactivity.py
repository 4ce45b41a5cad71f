from __future__ import annotations

import pytest

from megatron_collab.types import Message, Missing
from tests.reward.fakes import FakeJudge, about, play, score

TASK = about("5", "make it nicer", goal="a secret goal")
PLAYED = play(TASK, "<think>hm</think>which part?", "the end", "done")


def test_the_holistic_score_is_the_judges() -> None:
    judge = FakeJudge({"thought": "", "interactivity": 0.75})
    assert score("interactivity", TASK, PLAYED, judge, model="openai/strong") == 0.75
    (field,) = (field for field in judge.fields[0] if field.kind is float)
    assert (field.low, field.high) == (0, 1)
    assert judge.models == ["openai/strong"]
    assert all(anchor in judge.prompts[0] for anchor in ("- 1:", "- 0.5:", "- 0:"))


def test_the_parts_are_averaged() -> None:
    """(1 + 0.7 + 0.3) / 3 = 2/3."""
    judge = FakeJudge({"thought": "", "understanding": 1.0, "clarification": 0.7, "suggestion": 0.3})
    assert score("interactivity", TASK, PLAYED, judge, rubric="parts") == pytest.approx(2 / 3)
    assert [judge.prompts[0].count(anchor) for anchor in ("- 1:", "- 0.7:", "- 0.3:", "- 0:")] == [3, 3, 3, 3]
    assert all((field.low, field.high) == (0, 1) for field in judge.fields[0] if field.kind is float)


@pytest.mark.parametrize("rubric", ["holistic", "parts"])
def test_the_judge_sees_the_whole_conversation_without_thoughts_and_goal(rubric: str) -> None:
    judge = FakeJudge(Missing("down"))
    ended = PLAYED.add_messages([Message("user", "thanks")], ())
    assert score("interactivity", TASK, ended, judge, rubric=rubric) == Missing("down")
    shown = (
        "**User**: make it nicer\n**Assistant**: which part?\n**User**: the end\n**Assistant**: done\n**User**: thanks"
    )
    assert shown in judge.prompts[0]
    assert "hm" not in judge.prompts[0] and "a secret goal" not in judge.prompts[0]
