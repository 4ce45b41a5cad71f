"""Lanes of tests: which cases stay in `make test`, which tests a part of the others has, which run on one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import part, shares_fixtures, sharing
from tests.helpers import in_turn, selected

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fast_cases", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [("abcde", "xyz"), ("abcdefgh", "xy"), ("abc", "xyz")])
def test_some_case_of_every_row_and_column_is_fast(rows: str, columns: str, fast_cases: int) -> None:
    cases = in_turn(rows, columns, fast_cases)
    assert [case.values for case in cases] == [(row, column) for row in rows for column in columns]
    fast = [case.values for case in cases if not case.marks]
    assert {row for row, _ in fast} == set(rows) and {column for _, column in fast} == set(columns)
    assert len(fast) == len(rows) * fast_cases


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    return selected(request, "layout", "stage")


@pytest.mark.parametrize("stage", ["rl", "sft"])
@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_a_fixture_measures_the_cases_of_selected_tests(
    request: pytest.FixtureRequest, measured: list[tuple[str, ...]], layout: str, stage: str
) -> None:
    cases = {item.name for item in request.session.items if item.path == request.path and "[" in item.name}
    assert (layout, stage) in measured
    assert all(f"{request.function.__name__}[{layout}-{stage}]" in cases for layout, stage in measured)


def test_parts_are_disjoint_and_have_all_tests_and_no_module_fixture_twice(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    thirds = [part(items, number, 3) for number in (1, 2, 3)]
    assert sorted(map(id, items)) == sorted(id(item) for third in thirds for item in third)
    files = [file for third in thirds for file in {item.path for item in third if shares_fixtures(item)}]
    assert request.path in files and len(files) == len(set(files))


@pytest.mark.parametrize("fixture", ["servers", "supervised"])
def test_tests_that_share_a_fixture_of_the_session_run_on_one_worker(
    request: pytest.FixtureRequest, fixture: str
) -> None:
    made_here = ROOT / "tests" / "inference" / "test_served.py"
    takes = {item.path for item in request.session.items if fixture in getattr(item, "fixturenames", ())}
    assert {sharing(str(file.relative_to(ROOT))) for file in takes - {made_here}} <= {fixture}


def test_what_shares_nothing_runs_where_a_worker_is_free() -> None:
    assert sharing("tests/inference/test_pool.py") == "servers"
    assert sharing("tests/talk/test_page.py") == "supervised"
    assert sharing("tests/rehearsal/test_engine.py") == "engine"
    assert sharing("tests/test_lanes.py") == "tests/test_lanes.py"
