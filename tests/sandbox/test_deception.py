"""Deceptive programs never pass, correct ones always do, and tests that cannot be judged separately are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_collab.reward.metrics.pass_rate import PassRate
from megatron_collab.types import Conversation, Finish, Message, Missing, Score, Task, Turn
from tests.helpers import in_turn
from tests.sandbox.attacks import ATTACKS, FORMS, RIGHT
from tests.sandbox.honest import HONEST

pytestmark = pytest.mark.processes


def score(pairs: list[tuple[str, Mapping[str, Any]]], **options: Any) -> list[Score | None]:
    """Score of code against the tests in the metadata of its task."""

    async def scores() -> list[Score | None]:
        metric = PassRate(PassRate.Options(**options), judge=None)  # type: ignore[arg-type]  # it asks no judge
        return await asyncio.gather(*(metric.score(*played(*pair)) for pair in pairs))

    return asyncio.run(scores())


def played(code: str, metadata: Mapping[str, Any]) -> tuple[Task, Conversation]:
    task = Task("t", (Message("user", "hi"),), "goal", "", "llm", metadata)
    turn = Turn((1,), (2,), (-1.0,), (0,), Finish.STOP, f"```python\n{code}```")
    return task, Conversation(task.messages, (1,)).add_turn(turn)


KINDS = (
    "builtins",
    "frame",
    "__eq__",
    "sys.modules",
    "atexit",
    "signal",
    "TestCase",
    "import hook",
    "wire",
    "mock",
    "StopIteration",
    "asyncio.CancelledError",
    "by a path",
    "missing by",
)
FIRST = {next(name for name, code in ATTACKS.items() if kind in f"{name} {code}") for kind in KINDS}


@pytest.mark.parametrize(
    ("form", "step"), [("check", 9), *(pytest.param(form, 1, marks=pytest.mark.slow) for form in FORMS)]
)
def test_no_attack_earns_anything(form: str, step: int) -> None:
    """The first attack of each kind, and every `step`-th."""
    attacks = {name: code for i, (name, code) in enumerate(ATTACKS.items()) if name in FIRST or i % step == 0}
    earned = score([(code, FORMS[form]) for code in attacks.values()], cpu_seconds=1)
    assert {name: earned for name, earned in zip(attacks, earned, strict=True) if earned != 0.0} == {}
    assert score([(RIGHT, FORMS[form])]) == [1.0]


def test_there_are_many_attacks() -> None:
    assert len(ATTACKS) >= 170


@pytest.mark.parametrize("name", HONEST)
def test_a_right_program_passes(name: str) -> None:
    assert score([HONEST[name]]) == [1.0]


# Tests, and why they cannot be judged separately.
CASES = [
    ("import pickle\nassert pickle.loads(f(1)) == 1", "unpickle"),
    ("import pandas as pd\nassert pd.read_pickle(f(1)) is None", "unpickle"),
    ("assert eval(f('1')) == 1", "run text as code"),
    ("import inspect\nassert inspect.getsource(f)", "look into the candidate's code"),
    ("assert f.__code__.co_argcount == 1", "look into the candidate's code"),
    ("import no_such_module\nassert f(1) == 1", "no_such_module, which is not installed"),
    ("import logging\nassert f(logging.getLogger('x'))", "pass the candidate a logging.Logger"),
    ("class Mine(f):\n    pass", "derive a class from the candidate's f"),
    (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertLogs(): f(1)",
        "state",
    ),
    ("import matplotlib.pyplot as plt\nf(1)\nassert plt.gcf()", "state"),
    ("assert f(1) ==", "do not parse"),
    ("import sympy\nassert sympy.sympify(f('1')) == 1", "run text as code"),
    ("import yaml\nassert yaml.load(f('1'), Loader=yaml.Loader) == 1", "unpickle"),
    (
        "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test(self): f()",
        "count",
    ),
    ("# later\n", "run nothing"),
    ("N = 3\ndef check(candidate):\n    assert candidate(1) == 1\n", "run nothing"),
    ("def test_it(x):\n    assert f(x) == x\n", "need pytest to run test_it"),
    ("class TestIt:\n    def test(self):\n        assert f(1) == 1\nx = f(1)", "need pytest to run TestIt"),
    ("import unittest\nclass T(unittest.TestCase):\n    async def test(self): f(1)", "never run the body of test"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        yield f(1)", "never run the body"),
]
CODES = ("def f(x):\n    return x\n", "import os\nos._exit(0)", "no code")


@pytest.mark.parametrize(("case", "code"), in_turn(CASES, CODES))
def test_tests_that_cannot_be_judged_separately_are_missing(case: tuple[str, str], code: str) -> None:
    tests, why = case
    if "logging" in tests and code != CODES[0]:
        assert score([(code, {"tests": tests})]) == [0.0]  # it never came to that call
        return
    (missing,) = score([(code, {"tests": tests})])
    assert isinstance(missing, Missing), missing
    assert why in missing.why


def test_a_prompt_that_does_not_run_is_missing() -> None:
    (missing,) = score(
        [("def f(x):\n    return x\n", {"prompt": "import no_such_module\n", "tests": "assert f(1) == 1"})]
    )
    assert isinstance(missing, Missing)
    assert "No module named 'no_such_module'" in missing.why


def test_helpers_of_the_prompt_are_the_tasks_own() -> None:
    """Like `poly` in HumanEval/32: the reply may redefine it, and the tests do not use that definition."""
    task = {"prompt": 'def helper(x):\n    return x - 3\n\ndef f():\n    """A root."""\n', "entry_point": "f"}
    task["test"] = "def check(candidate):\n    assert helper(candidate()) == 0\n"
    lie = "def helper(x):\n    return 0\ndef f():\n    return 5\n"
    assert score([("def f():\n    return 3\n", task), (lie, task)]) == [1.0, 0.0]


def test_modules_that_only_the_reply_imports_are_the_real_ones() -> None:
    tests = {
        "tests": "assert np.allclose(f(2), 4) and isclose(f(0.1), 0.2) and math.sqrt(f(2)) == 2",
        "entry_point": "f",
    }
    lie = "class np:\n    allclose = lambda *a: True\nclass math:\n    sqrt = lambda x: 2\nisclose = lambda *a: True\n"
    lie += "def f(x):\n    return 0\n"
    right = "import math\nfrom math import isclose\nimport numpy as np\ndef f(x):\n    return 2 * x\n"
    assert score([(right, tests), (lie, tests)]) == [1.0, 0.0]


def test_a_name_that_one_test_assigns_is_the_candidates_in_another() -> None:
    tests = "def one():\n    half = 3\n    return half\ndef two():\n    return half(4)\n"
    tests += "assert (one(), two(), f(1)) == (3, 2, 1)\n"
    code = "def half(x):\n    return x // 2\ndef f(x):\n    return x\n"
    assert score([(code, {"tests": tests, "entry_point": "f"})]) == [1.0]
