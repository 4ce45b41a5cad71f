from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_collab.reward.metrics import accuracy as checkers
from megatron_collab.reward.metrics.accuracy import Checker
from megatron_collab.reward.metrics.equality import Verdict
from megatron_collab.types import Missing

pytestmark = pytest.mark.processes

HOPELESS = "9^{9^{9^{9}}}"
ENDLESS = "7 + 9^{9999999999}"  # in C code, which no signal interrupts


@pytest.fixture
def checker() -> Iterator[Checker]:
    checker = Checker()
    yield checker
    end(checker)


def end(checker: Checker) -> int:
    """The exit code of its child after the child's input is closed, as happens when the parent process ends."""
    assert checker._child is not None
    checker._child.communicate()
    return checker._child.returncode


def test_an_answer_that_takes_too_long_ends_the_child_and_no_other_score(checker: Checker) -> None:
    allowed, checker.hard_limit = checker.hard_limit, 1.0
    score = checker.compare("18", ENDLESS)
    assert isinstance(score, Missing)
    assert ENDLESS in score.why
    checker.hard_limit = allowed
    assert checker.compare("18", "9 + 9 = 18") is Verdict.EQUAL


def test_it_gives_up_before_that() -> None:
    patient = Checker(hard_limit=300.0)
    assert patient.compare("18", HOPELESS) is Verdict.UNCLEAR
    end(patient)


def test_undecided_is_distinguished_from_different(checker: Checker) -> None:
    assert checker.compare("18", "2 \\cdot 10") is Verdict.DIFFERENT
    assert checker.compare("18", "How many do you have?") is Verdict.UNCLEAR
    assert checker.compare("Paris", "18") is Verdict.NO_TRUTH


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Child processes that checkers start."""
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def record(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(checkers.subprocess, "Popen", record)
    return started


def test_a_child_that_dies_is_started_again(checker: Checker, children: list[subprocess.Popen[str]]) -> None:
    assert checker.compare("18", "18") is Verdict.EQUAL
    os.kill(children[0].pid, signal.SIGKILL)
    children[0].wait()
    assert checker.compare("18", "18") is Verdict.EQUAL
    assert len(children) == 2


def test_the_child_ends_with_its_input(checker: Checker) -> None:
    assert checker.compare("18", "19") is Verdict.DIFFERENT
    assert end(checker) == 0
