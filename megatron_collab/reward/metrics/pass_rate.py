"""Whether the code of the conversation passes the task's tests, run in the sandbox: 1 if all pass.

The code is that of all replies with later revisions in place of earlier ones: merged block by block (code_blocks.py),
or extracted by a judge, as in CollabLLM's paper and its authors' code, which knows the stub of the task.

The tests are in the task's metadata. Either `test` defines check(candidate) and `entry_point` names the candidate, as
in HumanEval (arXiv 2107.03374), whose `prompt` is code that precedes the policy's; or `test` has unittest cases that
call the candidate by its name, as in BigCodeBench (arXiv 2406.15877); or `tests` is code with asserts, functions named
test… or unittest cases. All must run to their end, and none may be skipped. Tests run in another process than the code
and compare the values that the code's process returns. If tests need more than that, or run nothing, the score is
missing for any code; if the code returns something that is not a plain value, the score is 0.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_collab import sandbox
from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import Judge, Metric, judges_prompt
from megatron_collab.reward.metrics.code_blocks import extract, merged, parses
from megatron_collab.reward.metrics.code_statements import free_names
from megatron_collab.sandbox import Limits, Program, SandboxError
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Missing, Score, Task

_CHECK = re.compile(r"^def check\b", re.MULTILINE)
_JUDGE = "judge"
_EXTRACT = ("blocks", _JUDGE)
_FIELDS = (Field("code", str, help="the program"),)


class PassRate(Metric):
    ground_truth = True

    @dataclass(frozen=True)
    class Options:
        extract: str = option(
            "blocks", "who takes the code out of the conversation: blocks of all replies, or a judge", choices=_EXTRACT
        )
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        prompt: str | None = option(None, "FILE.j2: the extraction prompt of the judge; null: the built-in one")
        concurrent: int = option(len(os.sched_getaffinity(0)), "programs that run at once", ge=1)
        cpu_seconds: int = option(Limits.cpu, "seconds of CPU time of a program", ge=1)
        memory: int = option(Limits.memory, "memory limit of a program in bytes", ge=1, le=1 << 40)
        container: list[str] = option(
            [],
            "command that starts a container with Python 3.11 or newer and no network, if namespaces are refused",
            blank=True,
        )

        def __post_init__(self) -> None:
            judges_prompt(self.prompt, "pass_rate")

    def __init__(self, options: Options, judge: Judge) -> None:
        super().__init__(options, judge)
        self._limits = Limits(cpu=options.cpu_seconds, wall=3.0 * options.cpu_seconds, memory=options.memory)
        self._slots = asyncio.Semaphore(options.concurrent)

    @classmethod
    def judged(cls, options: Any) -> bool:
        return options.extract == _JUDGE

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
        if self.options.extract == _JUDGE:
            rubric = judges_prompt(self.options.prompt, "pass_rate")
            answer = await self.ask_judge(rubric, task, conversation, _FIELDS)
            if isinstance(answer, Missing):
                return answer
            code = extract(answer["code"])  # fenced or not
        else:
            code = merged(_replies(conversation), _names(task.metadata))
        try:
            async with self._slots:
                result = await sandbox.run(program(code, task.metadata), self._limits, self.options.container)
        except SandboxError as error:
            return Missing(f"sandbox: {error}")
        return float(result.passed)


def _replies(conversation: Conversation) -> list[str]:
    """All of the assistant, also those of the task; none if the policy has replied to no user."""
    ends = [*conversation.messages[1:], None]
    pairs = zip(conversation.messages, ends, strict=True) if conversation.replies else ()
    return [
        message.content
        for message, after in pairs
        if message.role == "assistant" and not (after and after.role == "tool")
    ]


def _names(metadata: Mapping[str, Any]) -> set[str]:
    """The names by which the tests may call the policy's code."""
    tests = (metadata.get("test") or "", metadata.get("tests") or "")
    return {metadata.get("entry_point") or ""}.union(*map(free_names, tests))


def program(code: str, metadata: Mapping[str, Any]) -> Program:
    """The program that passes if and only if `code`, complete or continuing `prompt`, passes the task's tests."""
    prompt, entry = metadata.get("prompt", ""), metadata.get("entry_point") or ""
    if not parses(code):
        sources = {"solution": prompt + code}
    else:
        sources = {"prompt": prompt, "solution": code} if parses(prompt) else {"solution": code}
    test = metadata.get("test")
    if test and _CHECK.search(test):
        return Program(sources, f"{test}\ncheck({entry})\n", prompt, entry)
    return Program(sources, test or metadata["tests"], prompt, entry, cases=bool(test))
