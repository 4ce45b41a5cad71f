"""Ratings in a run's folder: what is read of them, whatever else the file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.observability import ratings
from megatron_collab.observability.ratings import RatedSide, Rating
from megatron_collab.settings import ConfigError

SIDES = (RatedSide("run", "before", "d1"), RatedSide("run", "after", "d2"))
NAMES = [side[:2] for side in SIDES]


def rating(task: str, rater: str, verdict: str, time: str = "2026-01-01") -> Rating:
    return Rating(time, rater, task, SIDES, "right", verdict)


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    written = [rating("a", "Ada", "left"), rating("b \ud800\n", "Bo\u202e", "skip")]
    for of_file in written:
        ratings.append(tmp_path, of_file)
    assert ratings.read(tmp_path) == written
    assert len((tmp_path / ratings.FILE).read_text().splitlines()) == 2


def test_lines_that_are_no_ratings_are_left_out(tmp_path: Path) -> None:
    assert ratings.read(tmp_path) == []
    ratings.append(tmp_path, rating("a", "Ada", "left"))
    line = (tmp_path / ratings.FILE).read_text()
    bad = [line.replace('"left"', "3"), line.replace('"verdict": "left"', '"verdict": "none"'), "[]\n", '{"torn": "']
    (tmp_path / ratings.FILE).write_text(line + "".join(bad))
    ratings.append(tmp_path, rating("b", "Ada", "tie"))  # after a torn line
    assert [of_file.task for of_file in ratings.read(tmp_path)] == ["a", "b"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ratings.FILE).mkdir()
    with pytest.raises(ConfigError, match=r"ratings\.jsonl: no file"):
        ratings.append(tmp_path, rating("a", "Ada", "left"))


def test_sides_in_the_other_order_are_mirrored() -> None:
    of_file = rating("a", "Ada", "left")
    assert [*ratings.between([of_file], NAMES)] == [of_file]
    (mirrored,) = ratings.between([of_file], NAMES[::-1])
    assert (mirrored.verdict, mirrored.shown_left, mirrored.sides) == ("right", "left", SIDES[::-1])
    assert [of.verdict for of in ratings.between([rating("a", "Ada", "tie")], NAMES[::-1])] == ["tie"]
    later, earlier = (rating("a", "Ada", "tie", time) for time in ("2026-01-02", "2026-01-01"))
    assert [*ratings.between([later, earlier], NAMES)] == [earlier, later]
    assert not [*ratings.between([of_file], [("run", "before"), ("other", "after")])]


def test_the_first_verdict_of_a_rater_counts() -> None:
    order = [("a", "Ada", "skip"), ("a", "Bo", "tie"), ("a", "Ada", "left"), ("a", "Ada", "right"), ("b", "Bo", "skip")]
    assert ratings.first_verdicts(rating(*of_file) for of_file in order) == {"a": {"Bo": "tie", "Ada": "left"}}


def test_a_digest_names_the_messages() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert ratings.digest(messages) == ratings.digest([{"content": "a", "role": "user"}])
    assert ratings.digest(messages) != ratings.digest([{"role": "user", "content": "b"}])
