from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_collab import sandbox
from megatron_collab.reward import metrics
from megatron_collab.reward.metrics.code_blocks import extract, merged
from megatron_collab.reward.metrics.pass_rate import PassRate
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.sandbox import SandboxError
from megatron_collab.types import Conversation, Finish, Message, Missing, Score, Task, Turn
from tests.reward.fakes import FakeJudge

TWICE = {"test": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "twice"}
CODE = "def twice(x):\n    return 2 * x\n"


def reply(code: str, language: str = "python") -> str:
    return f"Sure, here it is:\n\n```{language}\n{code}```\n\nDoes this help? It's `O(1)`."


def metric(**options: Any) -> PassRate:
    return PassRate(PassRate.Options(**options), judge=None)  # type: ignore[arg-type]  # it asks no judge


def played(metadata: Mapping[str, Any], *replies: str) -> tuple[Task, Conversation]:
    task = Task("t", (Message("user", "hi"),), "goal", "", "llm", metadata)
    conversation = Conversation(task.messages, ())
    for number, text in enumerate(replies):
        if number:
            conversation = conversation.add_messages([Message("user", "go on")], ())
        conversation = conversation.add_turn(Turn((), (), (), (), Finish.STOP, text))
    return task, conversation


def score(metadata: Mapping[str, Any], *texts: str | Sequence[str]) -> list[Score | None]:
    """By text, which is a conversation of one reply, or its replies."""
    conversations = [[text] if isinstance(text, str) else text for text in texts]

    async def scores() -> list[Score | None]:
        pass_rate = metric()
        return await asyncio.gather(*(pass_rate.score(*played(metadata, *replies)) for replies in conversations))

    return asyncio.run(scores())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (reply(CODE), CODE),
        (reply(CODE, ""), CODE),
        (reply(CODE, "Python3 title=x"), CODE),
        (reply("first = 1\n") + reply(CODE), CODE),
        (reply(CODE) + reply("[2, 4]\n", ""), CODE),
        (reply("$ ls\n", "bash") + reply(CODE) + reply("{}\n", "json"), CODE),
        (CODE, CODE),
        ("\n    return 2 * x\n", "\n    return 2 * x\n"),
        ("", ""),
        (reply("    return 2 * x\n\n\n"), "    return 2 * x\n\n\n"),
        ("1. So:\n\n    ```python\n    if x:\n        y\n\n    z\n    ```\n", "if x:\n    y\n\nz\n"),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```python\n" + CODE[:-1], CODE),
        ("So:\n```python\ndef f():\n    return [1,", "def f():\n    return [1,\n"),
        ("```python\n\tx = 'a\x0cb\u2028c'\n```", "\tx = 'a\x0cb\u2028c'\n"),
        ("```python\nx\n```\n```", "x\n"),
    ],
)
def test_code_is_taken_out_of_a_reply_as_it_stands(text: str, code: str) -> None:
    assert extract(text) == code


MAIN = "def twice(x):\n    return double(x)\n"
HELPER = "def double(x):\n    return 2 * x\n"
RIGHT = reply(CODE)
PROD = "def twice(x):\n    return prod([2, x])\n"
METHOD = """from dataclasses import dataclass
@dataclass
class Numbers:
    factor: int = 2
    def twice(self, x):
        return self.factor * x
twice = Numbers().twice
"""
OWN_TESTS = """import unittest
from solution import twice
class TestTwice(unittest.TestCase):
    def test_it(self):
        self.assertEqual(twice(2), 4)
unittest.main()
"""


@pytest.mark.processes
def test_what_follows_the_code_takes_nothing_away() -> None:
    """In a conversation the code need not be in the last reply, nor in one block."""
    conversations = {
        "thanks": [RIGHT, "You're welcome!"],
        "a word that parses": [RIGHT, "Thanks"],
        "an example that prints": [f"{RIGHT}\n## Example usage\n\n" + reply("result = twice(21)\nprint(result)\n")],
        "an example that fails here": [RIGHT + reply("rows = open('rows.csv').read()\nprint(twice(rows))\n")],
        "an example inside the block": [reply(CODE + "print(twice(open))\ntwice('a' + 1)\nassert twice(1) == 3\n")],
        "an end of the program": [reply(f"import sys\n{CODE}print(twice(1))\nsys.exit()\n")],
        "a draft whose tests name it": [
            reply("twice = abs\n"),
            reply("class A:\n    n = 2\ntwice = A.n.__mul__\n"),
            RIGHT,
        ],
        "a helper of a table, revised": [
            reply("def build():\n    return [3]\nTABLE = build()\ndef twice(x):\n    return TABLE[0] * x\n"),
            reply("def build():\n    return [2]\n"),
        ],
        "a method under the name of the tests": [reply("twice = (2).__mul__\n"), reply("print(twice(2))\n")],
        "output": [RIGHT + reply("42\n", ""), reply("$ python twice.py\n", "bash")],
        "helper and main in two blocks": [reply(HELPER) + reply(MAIN)],
        "helper and main in two replies": [reply(HELPER), "Next?", reply(MAIN)],
        "a repeated function alone": [reply(HELPER.replace("2", "3") + MAIN), reply(HELPER)],
        "a constant changed": [reply("FACTOR = 3\ndef twice(x):\n    return FACTOR * x\n"), reply("FACTOR = 2\n")],
        "a constant that is computed, of a draft": [
            reply("import re\nTWO = re.compile('2')\nDIGITS = [TWO.pattern]\ndef twice(x):\n    return 0\n"),
            reply("def twice(x):\n    return int(DIGITS[0]) * x\n"),
        ],
        "an example in several steps": [RIGHT + reply("rows = twice([1])\nfirst = rows[0]\nprint(first)\n")],
        "an example by a module of its own": [RIGHT + reply("from your_module import twice\nprint(twice(2))\n")],
        "tests by a module of its own": [RIGHT, reply(OWN_TESTS)],
        "an example of a method": [reply(CODE + "class Twice:\n    pass\nTwice().of(2)\n")],
        "an example of a coroutine": [reply("import asyncio\nasync def f():\n    1 / 0\nasyncio.run(f())\n" + CODE)],
        "an import of a draft": [reply("from math import prod\ndef twice(x):\n    return 0\n"), reply(PROD)],
        "a decorated class": [reply(METHOD), reply("print(Numbers().twice(2))\n")],
        "a name of another number of arguments": [reply("def twice(x, y):\n    return x + y\n" + HELPER), reply(MAIN)],
        "code of another language": [reply("def twice(x)\n  3 * x\nend\n", "ruby") + reply(CODE, "")],
        "a draft that fails": [reply("DATA = open('rows.csv')\ndef twice(x):\n    return 0\n"), RIGHT],
        "a draft that does not parse": [reply("def twice(x)\n    return 2 * x\n"), RIGHT],
        "an import of the future": [reply(HELPER), reply("from __future__ import annotations\n" + MAIN)],
        "a fragment to look at": [RIGHT, "The line that matters:\n" + reply("    return 2 * x\n")],
    }
    scores = dict(zip(conversations, score(TWICE, *conversations.values()), strict=True))
    assert scores == dict.fromkeys(conversations, 1.0)


@pytest.mark.processes
def test_a_later_definition_wins_also_if_it_is_wrong() -> None:
    wrong = reply("def twice(x):\n    return x\n")
    assert score(
        TWICE, [RIGHT, wrong], [RIGHT, reply("def twice(x)\n    return 2 * x\n")], ["I cannot.", "Thanks"]
    ) == [
        0.0,
        0.0,
        0.0,
    ]


def test_code_that_is_too_deep_to_be_written_again_is_merged() -> None:
    deep = HELPER + "X = f" + "()" * 400 + "\nf" + "()" * 400 + "\n"
    assert HELPER in merged([reply(MAIN), reply(deep), reply("Y = 1\nprint(Y)\n")])


def test_code_that_is_no_definition_is_the_last_block() -> None:
    prompt = "    return 2 * x\n"
    assert merged(["Fill it in:\n" + reply(prompt), "You're welcome!"]) == prompt
    assert merged([prompt]) == prompt and merged([]) == ""


@pytest.mark.processes
def test_the_judge_takes_the_code_out_of_the_whole_conversation() -> None:
    """And knows the stub, since a vague user need not name the function."""
    judge = FakeJudge({"code": CODE}, {"code": reply(CODE)}, {"code": ""}, Missing("down"))
    pass_rate = PassRate(PassRate.Options(extract="judge", model="openai/strong"), judge)  # type: ignore[arg-type]
    stub = {**TWICE, "prompt": "def twice(x):\n    pass\n"}
    task, conversation = played(stub, "def double(n): return n + n", "You're welcome!")
    scores = [asyncio.run(pass_rate.score(task, conversation)) for _ in range(4)]
    assert scores == [1.0, 1.0, 0.0, Missing("down")]
    shown = judge.prompts[0]
    assert "def double(n)" in shown and "begin with this stub" in shown and stub["prompt"].strip() in shown
    assert "assert candidate" not in shown, "the tests are not shown"
    assert judge.models[0] == "openai/strong" and PassRate.judged(pass_rate.options)
    assert not PassRate.judged(PassRate.Options())


def test_the_authors_requirement_stands_in_for_the_stub() -> None:
    judge = FakeJudge({"code": ""})
    pass_rate = PassRate(PassRate.Options(extract="judge"), judge)  # type: ignore[arg-type]
    metadata = {**TWICE, "prompt": "def twice(x):\n", "extraction_requirement": "Start with def twice(x)."}
    asyncio.run(pass_rate.score(*played(metadata, "x")))
    assert "Start with def twice(x)." in judge.prompts[0] and "begin with this stub" not in judge.prompts[0]


@pytest.mark.parametrize("end", ["```\nThat is all.\n", "```\n```text\nout\n```\n", ""])
def test_a_fence_inside_a_string_does_not_end_the_code(end: str) -> None:
    code = 'def f():\n    """Gives\n    ```\n    2\n```\n```python\n    """\n    return 2\n'
    assert extract(f"```python\n{code}{end}").rstrip("\n") == code.rstrip("\n")


@pytest.mark.processes
def test_line_ends_of_another_system_stay_where_they_were() -> None:
    assert extract("Hi\r\n```python\r\nx = 1\r\n\r\nif x:\r\n    y\r\n```\r\n") == "x = 1\r\n\r\nif x:\r\n    y\r\n"
    assert score(TWICE, reply(CODE).replace("\n", "\r\n")) == [1.0]


@pytest.mark.processes
def test_code_that_breaks_parsers_is_code_that_fails() -> None:
    broken = ["(" * 10_000, "-" * 100_000 + "1", '"a"' + ' + "a"' * 100_000, "x = '\0'", "x = '\ud800'", "9" * 10_000]
    assert score(TWICE, *map(reply, broken)) == [0.0] * len(broken)


@pytest.mark.processes
def test_a_reply_passes_if_all_tests_pass() -> None:
    assert score(TWICE, reply(CODE), reply("def twice(x):\n    return x\n"), "I cannot.", "") == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.processes
def test_a_reply_that_leaves_before_its_tests_has_not_passed_them() -> None:
    leave = ["import sys; sys.exit(0)", "raise SystemExit", "import os; os._exit(0)", "import atexit, os; exit()"]
    replies = [reply(f"{CODE}class Leave:\n    print(twice)\n    {code}\n") for code in leave]
    assert score(TWICE, *replies) == [0.0] * len(leave)


@pytest.mark.processes
def test_a_main_guard_is_not_run() -> None:
    assert score(TWICE, reply(f"{CODE}\nif __name__ == '__main__':\n    input()\n")) == [1.0]


@pytest.mark.processes
def test_tests_may_be_asserts() -> None:
    assert score({"tests": "assert twice(2) == 4"}, reply(CODE), reply("twice = abs\n")) == [1.0, 0.0]


@pytest.mark.processes
def test_tests_may_be_unittest_cases_and_those_of_the_reply_do_not_count() -> None:
    case = "import unittest\nclass {}(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual({}, {})\n"
    tests = {"tests": case.format("TestTwice", "twice(2)", 4) + "\nif __name__ == '__main__':\n    unittest.main()\n"}
    with_tests = CODE + case.format("TestOwn", 1, 2)
    assert score(tests, reply(CODE), reply("twice = abs\n"), reply(with_tests)) == [1.0, 0.0, 1.0]
    assert score({"tests": "assert twice(2) == 4"}, reply(with_tests), reply(with_tests + "twice = abs\n")) == [
        1.0,
        0.0,
    ]


BIG_CODE = {  # BigCodeBench's form; its solution may be a whole program as well
    "test": """import unittest
from unittest.mock import patch
class TestCases(unittest.TestCase):
    def setUp(self):
        self.lines = ["b,1", "a,2", "b,3"]
    def test_sums(self):
        self.assertEqual(task_func(self.lines), {"a": 2, "b": 4})
    def test_nothing(self):
        self.assertEqual(task_func([]), {})
    @patch("csv.reader", side_effect=ValueError)
    def test_lines_that_cannot_be_read(self, reader):
        with self.assertRaises(ValueError):
            task_func(self.lines)
""",
    "entry_point": "task_func",
}
SUMS = """import csv
from collections import Counter
def task_func(lines):
    sums = Counter()
    for name, count in csv.reader(lines):
        sums[name] += int(count)
    return dict(sums)
"""


@pytest.mark.processes
def test_tests_may_have_the_form_of_big_code_bench() -> None:
    wrong = [SUMS.replace("+=", "="), SUMS.replace("csv.reader(lines)", "(line.split(',') for line in lines)"), ""]
    helped = SUMS + "def check(numbers):\n    return False\n"  # a helper of that name makes it no HumanEval
    assert score(BIG_CODE, reply(SUMS), *map(reply, wrong), reply(helped)) == [1.0, 0.0, 0.0, 0.0, 1.0]
    named = {"test": BIG_CODE["test"]}  # the tests call the candidate by its name themselves
    assert score(named, reply(SUMS), reply(wrong[0])) == [1.0, 0.0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "test",
    [
        BIG_CODE["test"].replace("class", "@unittest.skip('slow')\nclass"),
        BIG_CODE["test"].replace(
            "    def setUp", "    @unittest.skip('slow')\n    def test_more(self): ...\n    def setUp"
        ),
    ],
)
def test_tests_that_are_skipped_are_not_passed(test: str) -> None:
    assert score(BIG_CODE | {"test": test}, reply(SUMS)) == [0.0]


@pytest.mark.processes
def test_functions_of_the_tests_run() -> None:
    task = BIG_CODE | {"test": "def test_it():\n    assert task_func([]) == {}\n"}
    assert score(task, reply(SUMS), reply(SUMS.replace("return ", "return 1, "))) == [1.0, 0.0]


@pytest.mark.processes
def test_tests_that_run_nothing_are_missing() -> None:
    test = "import unittest\nclass TestCases(unittest.TestCase):\n    def sums(self):\n        pass\n"
    (missing,) = score(BIG_CODE | {"test": test}, reply(SUMS))
    assert isinstance(missing, Missing) and "run nothing" in missing.why


@pytest.mark.processes
def test_a_reply_cannot_skip_its_tests() -> None:
    skips = "import unittest\ndef task_func(lines):\n    raise unittest.SkipTest\n"
    at_once = "import unittest\ndef setUpModule():\n    raise unittest.SkipTest\n"
    for tests in (BIG_CODE, {"tests": BIG_CODE["test"]}):
        assert score(tests, reply(skips), reply(skips + at_once), reply(SUMS + at_once)) == [0.0, 0.0, 1.0]


JUMP = """import sys
def jump(frame, event, argument):
    if frame.f_code.co_filename == "<tests>" and frame.f_code.co_name == "check" and event == "line":
        frame.f_lineno = 3
    return jump
sys.settrace(jump)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *a, **k: None\n",
        "import builtins\nbuiltins.compile = lambda *a, **k: ''\n",
        "import __main__\n__main__.exec = lambda *a, **k: None\n",
        "import __main__\n__main__.compile = lambda *a, **k: ''\n",
        "import sys\nsys._getframe(1).f_locals['sources']['tests'] = ''\n",
        "import builtins\nbuiltins.abs = lambda x: 0\n",
        "__builtins__ = {'abs': lambda x: 0}\n",
        JUMP,
    ],
)
def test_what_a_reply_replaces_does_not_run_its_tests(code: str) -> None:
    test = "def check(candidate):\n    assert abs(candidate(2) - 4) < 0.1\n    return\n"
    assert score(TWICE | {"test": test}, reply(code + "def twice(x):\n    return x\n")) == [0.0]


RUNNER = """import sys, types, unittest
class Runner:
    def run(self, suite):
        return types.SimpleNamespace(wasSuccessful=lambda: True, skipped=[], testsRun=1)
fake = types.ModuleType("unittest")
vars(fake).update(vars(unittest), TextTestRunner=Runner)
sys.modules["unittest"] = fake
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import builtins\nbuiltins.exec = lambda *a, **k: None\n",
        "isinstance = lambda *a: False\n",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n",
        "import unittest\nunittest.TestCase.run = lambda self, result: result.startTest(self)\n",
        "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n",
        RUNNER,
    ],
)
def test_what_a_reply_replaces_does_not_run_its_unittest_cases(code: str) -> None:
    case = "import unittest\nclass TestTwice(unittest.TestCase):\n    def test_it(self):\n        {}\n"
    tests = {"tests": case.format("self.assertEqual(twice(2), 4)")}
    assert score(tests, reply(code + "def twice(x):\n    return x\n")) == [0.0]


@pytest.mark.processes
def test_a_reply_may_use_unittest_itself() -> None:
    """Tests use a consistent unittest, whatever parts of it the reply has loaded."""
    uses = "import unittest.mock\nfrom unittest import IsolatedAsyncioTestCase, TestCase\n"
    tests = BIG_CODE["test"].replace(
        "from unittest.mock import patch", "import unittest.mock\npatch = unittest.mock.patch"
    )
    assert score(BIG_CODE | {"test": tests}, reply(uses + SUMS)) == [1.0]


@pytest.mark.processes
def test_a_prompt_comes_first_whether_the_reply_repeats_it_or_goes_on() -> None:
    helped = TWICE | {"prompt": 'import math\n\ndef twice(x):\n    """2 * x"""\n'}
    assert score(helped, reply("    return math.prod([2, x])\n")) == [1.0]
    assert score(helped, reply("def twice(x):\n    return math.prod([2, x])\n")) == [1.0]
    unfinished = TWICE | {"prompt": "def twice(x):\n"}
    assert score(unfinished, reply("    return 2 * x\n"), reply(CODE)) == [1.0, 1.0]


@pytest.mark.processes
def test_it_does_not_apply_to_a_task_without_tests() -> None:
    assert score({}, reply(CODE)) == [None]
    assert score({"entry_point": "twice"}, reply(CODE)) == [None]


@pytest.mark.processes
def test_tests_without_their_candidate_are_missing_and_no_zero() -> None:
    (missing,) = score({"test": TWICE["test"]}, reply(CODE))
    assert isinstance(missing, Missing)
    assert "entry_point" in missing.why


@pytest.mark.processes
def test_a_sandbox_that_fails_is_missing_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.unavailable() is None
    monkeypatch.setitem(sandbox._ways, (), sandbox._Way(("/bin/false",)))
    (missing,) = score(TWICE, reply(CODE))
    assert isinstance(missing, Missing)
    assert missing.why.startswith("sandbox: ")


@pytest.mark.processes
def test_concurrent_programs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def run(program: sandbox.Program, limits: sandbox.Limits, container: Sequence[str]) -> sandbox.Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if "boom" in program.candidate["solution"]:
            raise SandboxError("boom")
        return sandbox.Result(True, "", "")

    monkeypatch.setattr(sandbox, "run", run)

    async def scores() -> list[Score | None]:
        pass_rate = metric(concurrent=3)
        return await asyncio.gather(*(pass_rate.score(*played(TWICE, text)) for text in ["boom", *[CODE] * 20]))

    assert asyncio.run(scores()) == [Missing("sandbox: boom"), *[1.0] * 20]
    assert most == 3


@pytest.mark.processes
@pytest.mark.parametrize("setting", ["concurrent", "cpu_seconds", "memory"])
def test_settings_that_cannot_work_are_refused(setting: str) -> None:
    assert metrics.ScoredMetric("pass_rate", {setting: 1}).kind is PassRate
    for value in (0, 0.5, "many"):
        with pytest.raises(ValueError, match=rf"reward\.metrics\.pass_rate\.{setting}="):
            metrics.ScoredMetric("pass_rate", {setting: value})


@pytest.mark.processes
def test_a_machine_that_cannot_isolate_refuses_the_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PassRate.unavailable(PassRate.Options()) is None
    monkeypatch.setattr(sandbox, "unavailable", lambda container: "no namespaces")
    assert PassRate.unavailable(PassRate.Options()) == "no namespaces"


@pytest.fixture
def local_ray() -> Iterator[None]:
    assert sandbox.unavailable() is None  # before a fork bomb is tried
    with ray_session(2):
        yield


@pytest.mark.slow
@pytest.mark.processes
def test_a_ray_worker_outlives_what_it_runs(local_ray: None) -> None:
    worker = ray.remote(num_cpus=0)(PassRate).remote(PassRate.Options(cpu_seconds=4), None)
    bomb = "import os\nwhile True:\n    os.fork()\n"
    harmful = [reply(code) for code in (bomb, "while True:\n    pass\n", "import os\nos.kill(os.getppid(), 9)\n")]
    assert ray.get([worker.score.remote(*played(TWICE, text)) for text in harmful]) == [0.0, 0.0, 0.0]
    assert ray.get(worker.score.remote(*played(TWICE, reply(CODE)))) == 1.0


@pytest.fixture(scope="module")
def problems(dataset: Callable[[str], Path]) -> list[dict[str, Any]]:
    """All of HumanEval."""
    lines = gzip.decompress(dataset("humaneval/HumanEval.jsonl.gz").read_bytes()).splitlines()
    return [json.loads(line) for line in lines]


def failing(problems: Sequence[Mapping[str, Any]], replies: Sequence[str]) -> list[str]:
    """Problems of HumanEval that do not score 1 for the replies."""

    async def scores() -> list[Score | None]:
        pass_rate = metric()
        pairs = [played(problem, text) for problem, text in zip(problems, replies, strict=True)]
        return await asyncio.gather(*(pass_rate.score(*pair) for pair in pairs))

    return [problem["task_id"] for problem, score in zip(problems, asyncio.run(scores()), strict=True) if score != 1.0]


@pytest.mark.processes
@pytest.mark.slow
def test_every_solution_of_human_eval_passes_whole(problems: list[dict[str, Any]]) -> None:
    assert len(problems) == 164
    assert failing(problems, [reply(problem["prompt"] + problem["canonical_solution"]) for problem in problems]) == []


@pytest.mark.processes
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_every_solution_of_human_eval_passes_as_what_follows_its_prompt(
    problems: list[dict[str, Any]], every: int
) -> None:
    assert failing(problems[::every], [reply(problem["canonical_solution"]) for problem in problems[::every]]) == []


@pytest.mark.processes
@pytest.mark.slow
def test_no_solution_of_human_eval_passes_that_returns_something_else(problems: list[dict[str, Any]]) -> None:
    spoilt = [re.sub(r"\breturn\b(.*)", r"return 'wrong'", problem["canonical_solution"]) for problem in problems]
    passing = len(problems) - len(failing(problems, [reply(code) for code in spoilt]))
    assert passing == 0
