"""A bare clone passes its tests: files outside of the repository are read only through the fixture `dataset`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"ROOT\.parent|parents\[\d\]\.parent|PROJECT\.parent|[\"'/]shared[/\"']\s*/|\.\./shared")
# The fixture itself; the Slurm test, which needs a cluster; benches, which print where they look.
EXEMPT = {"tests/conftest.py", "tests/slurm/test_slurm.py", "tools/bench/accuracy.py", "tools/bench/sandbox.py"}


def test_a_data_set_that_is_not_there_skips_the_test(
    dataset: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "DATASETS", tmp_path)
    (tmp_path / "gsm8k").mkdir()
    assert dataset("gsm8k") == tmp_path / "gsm8k"
    with pytest.raises(pytest.skip.Exception, match=f"^{tmp_path}/humaneval: not on this machine$"):
        dataset("humaneval")


def test_nothing_else_outside_of_the_repository_is_read() -> None:
    files = [file for folder in ("tests", "tools") for file in (ROOT / folder).rglob("*.py")]
    names = {str(file.relative_to(ROOT)) for file in files if OUTSIDE.search(file.read_text())}
    assert names - {"tests/test_clone.py"} == EXEMPT


def test_what_lands_was_tried_in_a_clone(request: pytest.FixtureRequest) -> None:
    assert "\nmake test-clone\n" in (ROOT / ".ci" / "run").read_text()
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-clone:")[2].partition("\n\n")[0]
    assert "git clone" in recipe and '-m "dataset and not gpu' in recipe
    (item,) = (
        item for item in request.session.items if item.path == Path(__file__) and item.get_closest_marker("dataset")
    )
    assert item.name == "test_a_data_set_that_is_not_there_skips_the_test"
