"""Whether the policy gives the right answer: math-verify checks clearly stated answers, a judge the others (or all).

math-verify may compute forever, and a signal stops it only in the main thread of a process, and not inside C code. So
it runs in the main thread of a child process that exits when an answer takes too long.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from megatron_collab.config import option, require
from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import THOUGHT, Metric, judges_prompt
from megatron_collab.reward.metrics.stated_answer import as_math, has_words, stated_answer
from megatron_collab.runtime import keys
from megatron_collab.types import Conversation, Missing, Score, Task

SOFT_LIMIT = 2.0  # CPU seconds of one step of math-verify; then the answer counts as not equal
HARD_LIMIT = 20.0  # seconds of one answer; then the child exits
MEMORY_LIMIT = 4 << 30  # bytes
TRIAL_LIMIT = 5.0  # seconds of one answer of a task before a run
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")  # math-verify reads it

_FIELDS = (THOUGHT, Field("accuracy", int, choices=(0, 1), help="1 if it is right, else 0"))


class Verdict(StrEnum):
    """Result of a comparison; undecided if one side contains nothing that parses as an answer."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NO_TRUTH = "no_truth"
    NO_ANSWER = "no_answer"


class Checker:
    """A child process, started when first needed and after it died; thread-safe, one answer at a time."""

    def __init__(self, hard_limit: float = HARD_LIMIT) -> None:
        self.hard_limit = hard_limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def compare(self, answer: str, text: str) -> Verdict | Missing:
        """Whether the last value in `text` equals `answer`, both `as_math`; Missing if the child died over it."""
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

    def close(self) -> None:
        """End the child; without this call it ends with this process."""
        with self._lock:
            if self._child is not None:
                self._child.communicate()


_CHECKER = Checker()


async def compare(answer: str, replies: Sequence[str]) -> tuple[Verdict | Missing, bool]:
    """Whether the answer that `replies` state (stated_answer.py) equals `answer`, and whether the verdict is certain.

    It is certain if the answer is clearly stated and, for a difference, `answer` has no words: a unit may be written
    in another way. This process's child compares one answer at a time.
    """
    final = stated_answer(replies)
    verdict = await asyncio.to_thread(_CHECKER.compare, as_math(answer), final.value if final else "")
    clear = final is not None and final.clear
    return verdict, clear and (verdict is Verdict.EQUAL or not has_words(answer))


class Accuracy(Metric):
    """1 if the answer that the conversation states (stated_answer.py) equals the task's, by math-verify, else 0.

    With a judge, only certain verdicts count, and the judge decides all other cases from the complete conversation;
    with verify=false it decides every case, as in the published rewards. Without a judge, a conversation that states no
    answer scores 0; the score is Missing if math-verify fails or cannot read the task's answer.
    """

    @dataclass(frozen=True)
    class Options:
        judge: bool = option(False, "ask a judge if no answer is clearly stated or math-verify cannot read it")
        verify: bool = option(True, "let math-verify check clearly stated answers; false: judge only")
        model: str | None = option(None, "LiteLLM model of the judge; null: reward.judge.model")
        prompt: str | None = option(None, "FILE.j2: the judge's rubric; null: the built-in one")

        def __post_init__(self) -> None:
            judges_prompt(self.prompt, "accuracy")
            require(self.verify or self.judge, "verify=false: answers are not checked at all; set judge=true too")

    @classmethod
    def judged(cls, options: Any) -> bool:
        return options.judge

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.answer else "an answer"

    @classmethod
    def unscorable(cls, options: Any, tasks: Sequence[Task]) -> Mapping[int, str]:
        reasons = {}
        with closing(Checker(TRIAL_LIMIT)) as checker:
            for number, task in enumerate(tasks if not options.judge else ()):
                if not _NUMBER.fullmatch(answer := as_math(task.answer)):
                    verdict = checker.compare(answer, "")
                    if verdict is Verdict.NO_TRUTH or isinstance(verdict, Missing):
                        reasons[number] = _unread(task)
        return reasons

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        verdict: Verdict | Missing | None = None
        sure = False
        if self.options.verify:
            verdict, sure = await compare(task.answer, conversation.replies)
        if verdict in (Verdict.EQUAL, Verdict.DIFFERENT) and (sure or not self.options.judge):
            return float(verdict is Verdict.EQUAL)
        if self.options.judge:
            answer = await self.ask_judge(judges_prompt(self.options.prompt, "accuracy"), task, conversation, _FIELDS)
            return answer if isinstance(answer, Missing) else float(answer["accuracy"])
        if verdict is Verdict.NO_TRUTH:
            return Missing(_unread(task))
        return verdict if isinstance(verdict, Missing) else 0.0


def _unread(task: Task) -> str:
    return f"math-verify cannot read the answer {task.answer[:80]!r}; set the metric's judge=true"


def _serve(hard_limit: float) -> None:
    """Read lines of JSON [answer, text] until end of file, and print a Verdict for each."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.parser import ExprExtractionConfig

    def end(*_: object) -> None:
        raise TimeoutException

    def limited(step: Callable[..., Any], *arguments: Any) -> Any:
        """The step's result, interrupted after SOFT_LIMIT of CPU time. math-verify's own limit counts wall time, so on
        a loaded machine it would find nothing in a right answer."""
        signal.setitimer(signal.ITIMER_VIRTUAL, SOFT_LIMIT)
        try:
            return step(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGVTALRM, end)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    extraction = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    read = partial(limited, partial(parse, extraction_config=extraction, parsing_timeout=None))
    equal = partial(limited, partial(verify, timeout_seconds=None))
    with open(os.devnull, "w") as null_device:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(hard_limit, exit=True, file=null_device)
            truth, answer = map(read, json.loads(line))
            if not truth:
                verdict = Verdict.NO_TRUTH
            elif not answer:
                verdict = Verdict.NO_ANSWER
            else:
                verdict = Verdict.EQUAL if equal(truth, answer) else Verdict.DIFFERENT
            faulthandler.cancel_dump_traceback_later()
            print(verdict, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
