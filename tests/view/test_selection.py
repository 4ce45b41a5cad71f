"""What an address asks for, and the bounds on it."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from megatron_collab.observability import transcripts
from megatron_collab.observability.transcript_index import Index, Query
from megatron_collab.settings import ConfigError
from megatron_collab.view.selection import Selection, columns, places, selection
from tests.observability.test_transcripts import row


def parsed(query: str) -> Selection:
    return selection(parse_qsl(query, keep_blank_values=True))


def test_an_empty_value_is_no_condition() -> None:
    everything = Selection(Query(), sort="", descending=False, offset=0, limit=50)
    assert parsed("") == everything
    empty = "first_step=&last_step=&task=&ending=&words=+&low.a=&high.a=&sort=&descending=&offset=&limit="
    assert parsed(empty) == everything


def test_every_parameter_counts() -> None:
    query = Query(
        steps=(0, 7),
        task="a&b",
        ending="user_done",
        reward=(-math.inf, 0.5),
        scores={"right": (0.0, 1.0), "a.b": (-1.5, math.inf)},
        words="two words",
        terms={"standard_error": (0.1, math.inf), "surprise": (-math.inf, 2.0)},
    )
    text = (
        "last_step=7&task=a%26b&ending=user_done&high.reward=0.5&low.right=0&high.right=1&low.a.b=-1.5"
        "&words=two+words&low.standard_error=0.1&high.surprise=2&sort=right&descending=1&offset=100&limit=200"
    )
    assert parsed(text) == Selection(query, "right", descending=True, offset=100, limit=200)
    assert parsed("first_step=3").query.steps == (3, 2**53)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=201", "limit=201: give an integer from 0 to 200"),
        ("limit=-1", "limit=-1: give an integer"),
        ("offset=1e3", "offset=1e3: give an integer"),
        (f"first_step={'9' * 17}", "give an integer"),
        ("last_step=%D9%A3", "give an integer"),
        ("descending=2", "descending=2: give an integer from 0 to 1"),
        ("low.reward=nan", "low.reward=nan: give a number"),
        ("high.reward=inf", "high.reward=inf: give a number"),
        ("low.reward=x%0a", "low.reward=x: give a number"),
        ("nothing=1", "nothing=1: no such parameter"),
        ("low=1", "low=1: no such parameter"),
        ("task=a&task=b", "task=b: given twice"),
        (f"task={'a' * 401}", "longer than 400 characters"),
        (f"words={'a+' * 21}", "words: more than 20"),
        ("words=%3F%21", r"words=\?!: contains no word"),
        ("&".join(f"low.m{number}=0" for number in range(21)), "more than 20 columns"),
    ],
)
def test_what_is_out_of_bounds_is_named(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parsed(query)
    assert str(error.value).isprintable()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Four futures whose rewards are 0.0, 0.1, 0.2, None, with standard errors 0.3, 0.2, 0.1, None."""
    folder = tmp_path_factory.mktemp("run")
    errors = [0.3, 0.2, 0.1, None]
    rewards = [0.0, 0.1, 0.2, None]
    rows = [row("t", 0, at, reward=rewards[at], standard_error=errors[at], scores={"right": at}) for at in range(4)]
    transcripts.write_step(folder, 0, [rows])
    return Index(folder)


@pytest.mark.parametrize(
    ("query", "selected"),
    [
        ("", [0, 1, 2, 3]),
        ("high.standard_error=0.2", [1, 2]),
        ("low.standard_error=0.2", [0, 1]),
        ("low.right=1&high.right=2&low.reward=0.2", [2]),
        ("low.unknown=0", []),
        ("sort=reward&descending=1", [2, 1, 0, 3]),
        ("sort=right&descending=1", [3, 2, 1, 0]),
        ("sort=standard_error", [2, 1, 0, 3]),
        ("sort=step", [0, 1, 2, 3]),
    ],
)
def test_futures_are_filtered_and_sorted(index: Index, query: str, selected: list[int]) -> None:
    total, futures = parsed(query).of(index)
    assert (total, futures.tolist()) == (len(selected), selected)


def test_a_part_of_the_futures(index: Index) -> None:
    total, futures = parsed("sort=right&descending=1&offset=1&limit=2").of(index)
    assert (total, futures.tolist()) == (4, [2, 1])
    assert parsed("offset=9").of(index)[1].tolist() == parsed("limit=0").of(index)[1].tolist() == []


def test_columns_are_named_and_others_refused(index: Index) -> None:
    assert columns(index) == ["reward", "right", "standard_error"]
    with pytest.raises(
        ConfigError, match="sort=x: no such column; choose one of step, task, ending, advantage, reward"
    ):
        parsed("sort=x").of(index)


def test_a_run_without_errors_has_none_in_a_range(tmp_path: Path) -> None:
    transcripts.write_step(tmp_path, 0, [[row()]])
    assert parsed("low.standard_error=0").of(Index(tmp_path))[0] == 0


def test_groups_are_named_by_step_and_position() -> None:
    assert places("3.0") == [(3, 0)] and places("12.1,0.30") == [(12, 1), (0, 30)]
    many = ",".join(["1.1"] * 200)
    assert len(places(many)) == 200
    for text in ("", "3", "3.0,", "3.0;4.0", "-1.0", "3.0.1", "\u0663.0", f"{10**15}.0", f"{many},1.1", "1" * 10_000):
        with pytest.raises(ConfigError, match="give at most 200 groups as STEP") as error:
            places(text)
        assert len(str(error.value)) < 250
