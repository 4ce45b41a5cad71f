"""Symbolic comparison of answers in a child process, which may hang or die without harm.

math-verify limits its own time with signals, which only reach the main thread of a process, and not while it
computes inside C. So it runs in the main thread of a child that ends itself when an answer takes too long.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from enum import StrEnum

from megatron_collab.types import Missing

SOFT_LIMIT = 2  # seconds of one step of math-verify; then the answer counts as not equal
HARD_LIMIT = 20.0  # seconds of one answer; then the child ends itself
MEMORY_LIMIT = 4 << 30  # bytes


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
                command = [sys.executable, "-m", "megatron_collab.reward.math_verify_worker", str(self.hard_limit)]
                self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            child = self._child
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps([answer, text]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                return Missing(f"math-verify ended with exit code {child.wait()} on {text[-80:]!r}")
            return Verdict(line.strip())


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
