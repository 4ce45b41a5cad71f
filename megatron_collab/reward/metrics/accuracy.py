"""Whether the policy gives the right answer: math-verify checks surely stated answers, a judge the others (or all).

math-verify may compute forever, and a signal stops it only in the main thread of a process, and not inside C code. So
it runs in the main thread of a child process that exits when an answer takes too long.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_collab.llm.answer import Field
from megatron_collab.reward.metrics import THOUGHT, Metric, judges_prompt
from megatron_collab.reward.metrics.equality import Verdict, of_texts, readable
from megatron_collab.reward.metrics.formulas import verdict
from megatron_collab.reward.metrics.stated_answer import stated_answer
from megatron_collab.runtime import keys
from megatron_collab.settings import option, require
from megatron_collab.types import Conversation, Missing, Score, Task

SOFT_LIMIT = 4.0  # CPU seconds of one comparison; then it is unclear
HARD_LIMIT = 20.0  # seconds of one answer; then the child exits
MEMORY_LIMIT = 4 << 30  # bytes

_FIELDS = (THOUGHT, Field("accuracy", int, choices=(0, 1), help="1 if it is right, else 0"))


class Checker:
    """A child process, started when first needed and after it died; thread-safe, one answer at a time."""

    def __init__(self, hard_limit: float = HARD_LIMIT) -> None:
        self.hard_limit = hard_limit
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def compare(self, truth: str, answer: str) -> Verdict | Missing:
        """Whether two answers are equal (equality.py); Missing if the child died over it."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                command = [sys.executable, "-m", "megatron_collab.reward.metrics.accuracy", str(self.hard_limit)]
                self._child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=keys.without(os.environ)
                )
            child = self._child
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([truth, answer]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                return Missing(f"math-verify ended with exit code {child.wait()} on {answer[-80:]!r}")
            return Verdict(line.strip())

    def close(self) -> None:
        """End the child; without this call it ends with this process."""
        with self._lock:
            if self._child is not None:
                self._child.communicate()


_CHECKER = Checker()


async def compare(truth: str, replies: Sequence[str]) -> Verdict | Missing:
    """Whether the answer that `replies` surely state (stated_answer.py) equals `truth`; unclear if they state none.

    This process's child compares one formula at a time.
    """
    answer = stated_answer(replies) or ""
    decided = of_texts(truth, answer)
    return await asyncio.to_thread(_CHECKER.compare, truth, answer) if decided is None else decided


class Accuracy(Metric):
    """1 if the conversation surely states the task's answer, 0 if it surely states another.

    The judge decides all other cases from the complete conversation; with verify=false it decides every case, as in the
    published rewards. Without a judge such a conversation scores as `unclear` says. The score is Missing if math-verify
    fails or cannot read the task's answer.
    """

    ground_truth = True

    @dataclass(frozen=True)
    class Options:
        judge: bool = option(False, "ask a judge if no answer is surely stated or math-verify cannot compare it")
        verify: bool = option(True, "let math-verify check surely stated answers; false: judge only")
        unclear: str = option(
            "zero", "without a judge, the score if no answer is surely stated", choices=("zero", "missing")
        )
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
        if options.judge:
            return {}
        return {number: _unread(task) for number, task in enumerate(tasks) if not readable(task.answer)}

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        if self.lacks(self.options, task):
            return None
        result = await compare(task.answer, conversation.replies) if self.options.verify else Verdict.UNCLEAR
        if result in (Verdict.EQUAL, Verdict.DIFFERENT):
            return float(result is Verdict.EQUAL)
        if self.options.judge:
            answer = await self.ask_judge(judges_prompt(self.options.prompt, "accuracy"), task, conversation, _FIELDS)
            return answer if isinstance(answer, Missing) else float(answer["accuracy"])
        if result is Verdict.NO_TRUTH:
            return Missing(_unread(task))
        if isinstance(result, Missing):
            return result
        return (
            0.0
            if self.options.unclear == "zero"
            else Missing("no answer is surely stated; set the metric's judge=true")
        )


def _unread(task: Task) -> str:
    return f"math-verify cannot read the answer {task.answer[:80]!r}; set the metric's judge=true"


def _serve(hard_limit: float) -> None:
    """Read lines of JSON [truth, answer] until end of file, and print a Verdict for each.

    A comparison is interrupted after SOFT_LIMIT of CPU time, and is unclear. math-verify's own limit counts wall time,
    so on a loaded machine it would interrupt others too.
    """
    from math_verify.errors import TimeoutException

    def end(*_: object) -> None:
        raise TimeoutException

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    signal.signal(signal.SIGVTALRM, end)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    with open(os.devnull, "w") as null_device:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(hard_limit, exit=True, file=null_device)
            signal.setitimer(signal.ITIMER_VIRTUAL, SOFT_LIMIT, 0.5)  # again: math-verify catches the first
            try:
                result = verdict(*json.loads(line))
            except TimeoutException:
                result = Verdict.UNCLEAR
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            faulthandler.cancel_dump_traceback_later()
            print(result, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
