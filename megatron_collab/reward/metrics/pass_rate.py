"""Whether the code in the policy's last message passes the task's tests, run in the sandbox: 1 if all pass.

Tests stand in the task's metadata: `test` defines check(candidate) and `entry_point` names the candidate, as in
HumanEval (arXiv 2107.03374), where `prompt` is code that comes before the policy's; or `test` has unittest cases that
call the candidate by its name, as in BigCodeBench (arXiv 2406.15877); or `tests` is code with asserts or unittest
cases. Of unittest cases at least one must run, and none may be skipped: the candidate could raise SkipTest. Code that
sets out to deceive them, by values equal to everything for one, can: they run in its process, as HumanEval's do.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_collab.config import option
from megatron_collab.reward import sandbox
from megatron_collab.reward.metrics import Judge, Metric
from megatron_collab.reward.sandbox import Limits, SandboxError
from megatron_collab.types import Conversation, Missing, Score, Task

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_PYTHON = ("python", "python3", "py")
_CHECK = re.compile(r"^def check\b", re.MULTILINE)
_MOST_CLOSINGS = 16  # how many fences inside strings of one block are looked at

# Runs the unittest cases that the tests define, not those of the reply.
_UNITTEST = """
import unittest
kinds = [kind for kind in list(tests.values()) if isinstance(kind, type) and kind.__module__ == "tests"]
cases = [kind for kind in kinds if issubclass(kind, unittest.TestCase)]
suites = map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)
result = unittest.TextTestRunner().run(unittest.TestSuite(suites))
assert result.wasSuccessful() and not result.skipped
assert result.testsRun or {optional} and not cases, "no test has run"
"""


class PassRate(Metric):
    @dataclass(frozen=True)
    class Options:
        concurrent: int = option(len(os.sched_getaffinity(0)), "programs that run at once", ge=1)
        cpu_seconds: int = option(Limits.cpu, "seconds of CPU time of a program", ge=1)
        memory: int = option(Limits.memory, "bytes that a program may take", ge=1)

    def __init__(self, options: Options, judge: Judge) -> None:
        super().__init__(options, judge)
        self._limits = Limits(cpu=options.cpu_seconds, wall=3.0 * options.cpu_seconds, memory=options.memory)
        self._slots = asyncio.Semaphore(options.concurrent)

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        return sandbox.unavailable()

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.metadata.get("test") or task.metadata.get("tests") else "tests in its metadata"

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        if _CHECK.search(task.metadata.get("test") or "") and not task.metadata.get("entry_point"):
            return Missing(f"task {task.id}: its metadata has test, but no entry_point to hand to check(candidate)")
        code = extract("".join(conversation.replies[-1:]))  # who never spoke to the user wrote no code
        try:
            async with self._slots:
                result = await sandbox.run(program(code, task.metadata), self._limits)
        except SandboxError as error:
            return Missing(f"sandbox: {error}")
        return float(result.passed)


def program(code: str, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Sources that pass exactly if `code`, whole or what follows `prompt`, passes the tests in a task's metadata."""
    prompt = metadata.get("prompt", "")
    if not _parses(code):
        sources = {"solution": prompt + code}
    else:
        sources = {"prompt": prompt, "solution": code} if _parses(prompt) else {"solution": code}
    test = metadata.get("test")
    if test and _CHECK.search(test):
        return sources | {"tests": f"{test}\ncheck({metadata['entry_point']})\n"}
    # Not in the module of the tests, where names of the reply would hide builtins.
    cases = (
        f"import builtins\nbuiltins.exec({_UNITTEST.format(optional=not test)!r}, {{'tests': builtins.globals()}})\n"
    )
    return sources | {"tests": f"{test or metadata['tests']}\n{cases}"}


def extract(reply: str) -> str:
    """The Python code of a reply: its last block fenced as Python, else its last one without a language, else all.

    Without the fences and the indentation of the opening one; a block that is not closed goes to the end.
    """
    blocks = [block for block in _blocks(reply.split("\n")) if block[1].strip()]
    python = [code for language, code in blocks if language in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (python or plain or [reply])[-1]


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Language, in lower case, and content of each fenced block (CommonMark 4.5, at any indentation).

    Code may hold fences in its strings: where it does not parse up to the first fence that could close it, but does
    up to a later one or to the end of the reply, it ends there.
    """
    at = 0
    while at < len(lines):
        opening = _OPENING.fullmatch(lines[at].rstrip())
        at += 1
        if not opening:
            continue
        fence, indent = opening["fence"], len(opening["indent"])
        body = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines[at:]]
        marks = ((i, line.strip()) for i, line in enumerate(body))
        closes = [i for i, mark in marks if mark.startswith(fence) and set(mark) == {fence[0]}]
        ends = [*closes[:_MOST_CLOSINGS], len(body)]
        end = next((end for end in ends if _parses("\n".join(body[:end]))), ends[0])
        yield opening["language"].lower(), "\n".join(body[:end]) + "\n"
        at += end + 1


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what it raises for code that is no code
        return False
    return True
