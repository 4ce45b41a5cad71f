"""Whether the policy gives the right answer: by math-verify, where that is undecided by a judge, or by a judge alone.

math-verify limits its own time with signals, which only reach the main thread of a process, and not while it
computes inside C. So it runs in the main thread of a child that ends itself when an answer takes too long.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_collab.config import option, require
from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import THOUGHT, Metric, judges_prompt
from megatron_collab.runtime import keys
from megatron_collab.types import Conversation, Missing, Score, Task

SOFT_LIMIT = 2  # seconds of one step of math-verify; then the answer counts as not equal
HARD_LIMIT = 20.0  # seconds of one answer; then the child ends itself
MEMORY_LIMIT = 4 << 30  # bytes

_FIELDS = (THOUGHT, Field("accuracy", int, choices=(0, 1), help="1 if it is right, else 0"))


class Verdict(StrEnum):
    """Result of a comparison; undecided where one side contains nothing that parses as an answer."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_TRUTH = "no_truth"
    NO_ANSWER = "no_answer"


class Checker:
    """A child process, started when first needed and again after it died; thread-safe, one answer at a time."""

    def __init__(self, hard_limit: float = HARD_LIMIT) -> None:
        self.hard_limit = hard_limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def compare(self, answer: str, text: str) -> Verdict | Missing:
        """Whether the last answer found in `text` equals `answer`; Missing where the child died of it."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                command = [sys.executable, "-m", "megatron_collab.reward.metrics.accuracy", str(self.hard_limit)]
                self._child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=keys.without(os.environ)
                )
            child = self._child
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([answer, text]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                return Missing(f"math-verify ended with exit code {child.wait()} on {text[-80:]!r}")
            return Verdict(line.strip())


_CHECKER = Checker()


async def compare(answer: str, text: str) -> Verdict | Missing:
    """`Checker.compare` by this process's child, which is busy with one answer at a time."""
    return await asyncio.to_thread(_CHECKER.compare, answer, text)


class Accuracy(Metric):
    """1 or 0. math-verify is undecided where the answer of the task or that of the reply cannot be read, or it failed.

    Without a judge a reply that holds no answer is then wrong, all else is Missing. With verify=false the judge alone
    decides, from the whole conversation, as in the published rewards.
    """

    @dataclass(frozen=True)
    class Options:
        judge: bool = option(False, "ask a judge where math-verify is undecided")
        verify: bool = option(True, "let math-verify decide where it can; false: the judge alone")
        model: str | None = option(None, "LiteLLM model of the judge; none: reward.judge.model")
        prompt: str | None = option(None, "FILE.j2: the judge's rubric; none: ours")

        def __post_init__(self) -> None:
            judges_prompt(self.prompt, "accuracy")
            require(self.verify or self.judge, "verify=false: leaves nobody who decides; set judge=true too")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return options.judge

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.answer else "an answer"

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        verdict: Verdict | Missing | None = None
        if self.options.verify:
            verdict = await compare(task.answer, conversation.replies[-1] if conversation.replies else "")
        if verdict in (Verdict.EQUAL, Verdict.DIFFERENT):
            return float(verdict is Verdict.EQUAL)
        if self.options.judge:
            answer = await self.ask_judge(judges_prompt(self.options.prompt, "accuracy"), task, conversation, _FIELDS)
            return answer if isinstance(answer, Missing) else float(answer["accuracy"])
        if verdict is Verdict.NO_TRUTH:
            return Missing(f"math-verify cannot read the answer {task.answer[:80]!r}; set the metric's judge=true")
        return verdict if isinstance(verdict, Missing) else 0.0


def _serve(hard_limit: float) -> None:
    """Answer a line of JSON [answer, text] with a line that is a Verdict, until there are no more."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.parser import ExprExtractionConfig

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extraction = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(hard_limit, exit=True, file=nowhere)
            truth, found = (parse(each, extraction, parsing_timeout=SOFT_LIMIT) for each in json.loads(line))
            if not truth:
                verdict = Verdict.NO_TRUTH
            elif not found:
                verdict = Verdict.NO_ANSWER
            else:
                verdict = Verdict.EQUAL if verify(truth, found, timeout_seconds=SOFT_LIMIT) else Verdict.DIFFERENT
            faulthandler.cancel_dump_traceback_later()
            print(verdict, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
