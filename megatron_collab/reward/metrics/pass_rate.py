"""Whether the code in the policy's last message passes the task's tests, run in the sandbox: 1 if all pass.

The tests are in the task's metadata. Either `test` defines check(candidate) and `entry_point` names the candidate, as
in HumanEval (arXiv 2107.03374), whose `prompt` is code that precedes the policy's; or `test` has unittest cases that
call the candidate by its name, as in BigCodeBench (arXiv 2406.15877); or `tests` is code with asserts, functions named
test… or unittest cases. All must run to their end, and none may be skipped. Tests run in another process than the code
and compare the values that the code's process returns. If tests need more than that, or run nothing, the score is
missing for any code; if the code returns something that is not a plain value, the score is 0.
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

from megatron_collab import sandbox
from megatron_collab.config import option
from megatron_collab.reward.metrics import Judge, Metric
from megatron_collab.sandbox import Limits, Program, SandboxError
from megatron_collab.types import Conversation, Missing, Score, Task

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_PYTHON = ("python", "python3", "py")
_CHECK = re.compile(r"^def check\b", re.MULTILINE)
_MOST_CLOSINGS = 16  # fences inside strings of one block that are tried


class PassRate(Metric):
    @dataclass(frozen=True)
    class Options:
        concurrent: int = option(len(os.sched_getaffinity(0)), "programs that run at once", ge=1)
        cpu_seconds: int = option(Limits.cpu, "seconds of CPU time of a program", ge=1)
        memory: int = option(Limits.memory, "memory limit of a program in bytes", ge=1, le=1 << 40)
        container: list[str] = option(
            [],
            "command that starts a container with Python 3.11 or newer and no network, if namespaces are refused",
            blank=True,
        )

    def __init__(self, options: Options, judge: Judge) -> None:
        super().__init__(options, judge)
        self._limits = Limits(cpu=options.cpu_seconds, wall=3.0 * options.cpu_seconds, memory=options.memory)
        self._slots = asyncio.Semaphore(options.concurrent)

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        return sandbox.unavailable(options.container)

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.metadata.get("test") or task.metadata.get("tests") else "tests in its metadata"

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        for name in ("prompt", "test", "tests", "entry_point"):
            if not isinstance(task.metadata.get(name) or "", str):
                raise ValueError(f"metadata.{name} is not a string; give the code that pass_rate runs")
        if _CHECK.search(task.metadata.get("test") or "") and not task.metadata.get("entry_point"):
            raise ValueError("metadata.test defines check(candidate), but metadata.entry_point is not set; set it")

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        if _CHECK.search(task.metadata.get("test") or "") and not task.metadata.get("entry_point"):
            return Missing(f"task {task.id}: its metadata has test, but no entry_point to pass to check(candidate)")
        code = extract("".join(conversation.replies[-1:]))  # without a reply to the user there is no code
        try:
            async with self._slots:
                result = await sandbox.run(program(code, task.metadata), self._limits, self.options.container)
        except SandboxError as error:
            return Missing(f"sandbox: {error}")
        return float(result.passed)


def program(code: str, metadata: Mapping[str, Any]) -> Program:
    """The program that passes if and only if `code`, complete or continuing `prompt`, passes the task's tests."""
    prompt, entry = metadata.get("prompt", ""), metadata.get("entry_point") or ""
    if not _parses(code):
        sources = {"solution": prompt + code}
    else:
        sources = {"prompt": prompt, "solution": code} if _parses(prompt) else {"solution": code}
    test = metadata.get("test")
    if test and _CHECK.search(test):
        return Program(sources, f"{test}\ncheck({entry})\n", prompt, entry)
    return Program(sources, test or metadata["tests"], prompt, entry, cases=bool(test))


def extract(reply: str) -> str:
    """The Python code of a reply: its last block fenced as Python, else its last one without a language, else all.

    The fences and the indentation of the opening fence are removed; an unclosed block extends to the end.
    """
    blocks = [block for block in _blocks(reply.split("\n")) if block[1].strip()]
    python = [code for language, code in blocks if language in _PYTHON]
    plain = [code for language, code in blocks if not language]
    return (python or plain or [reply])[-1]


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Language, in lower case, and content of each fenced block (CommonMark 4.5, at any indentation).

    Code may contain fences in its strings. If it does not parse up to the first fence that could close it, the block
    ends at the first later fence, or at the end of the reply, up to which it parses.
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
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises for invalid code
        return False
    return True
