"""Processes started by tests: all of them end with their test, even if it fails."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

import psutil

END_SECONDS = 30.0  # in which what a session has started must have ended after its last test
_MARK = "MEGATRON_COLLAB_TEST_SESSION"
_TEST = "PYTEST_CURRENT_TEST"  # pytest sets it


def mark() -> None:
    """From here on, mark the environment so that descendants of this process can be recognized."""
    os.environ[_MARK] = secrets.token_hex(8)


def alive(seconds: float = 0.0) -> dict[psutil.Process, str]:
    """Processes started since `mark` that live after `seconds`, each with its test as "path::name (phase)"."""
    descendants = psutil.Process().children(recursive=True)
    started = {process: test for process in psutil.process_iter() if (test := _test(process, process in descendants))}
    _, remaining = psutil.wait_procs(list(started), timeout=seconds)
    return {process: started[process] for process in remaining}


def end(test: str) -> None:
    """Kill the processes that `test` started, and their descendants."""
    for process, starter in alive().items():
        if starter == test:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _test(process: psutil.Process, descendant: bool) -> str | None:
    """The test that started `process`; None if this process did not start it, or if both end together."""
    with suppress(psutil.Error):
        environment, command = process.environ(), " ".join(process.cmdline())
        ours = descendant or environment.get(_MARK) == os.environ[_MARK]
        if ours and "multiprocessing.resource_tracker" not in command:
            return environment.get(_TEST, "a test")
    return None
