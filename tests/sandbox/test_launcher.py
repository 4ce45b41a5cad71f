"""A run that waits for processors is not too slow; one that sleeps is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_collab.sandbox.sandboxed import launcher

pytestmark = pytest.mark.processes


@contextmanager
def child(seconds: float) -> Iterator[int]:
    """A process that sleeps, then ends with code 0."""
    process = os.fork()
    if process == 0:
        time.sleep(seconds)
        os._exit(0)
    try:
        yield process
    finally:
        assert not os.path.exists(f"/proc/{process}")


class Unlimited(launcher.Memory):
    """The launcher counts all its descendants; this process has others."""

    def exceeded(self) -> bool:
        return False


def ending(seconds: float) -> str:
    """Why a run of `seconds` ends if it has 0.1."""
    output, writing = os.pipe()
    os.close(writing)
    limits = {"wall": 0.1, "output": 1, "cpu": 1, "memory": 1 << 30}
    with child(seconds) as process:
        return launcher.watch(process, output, limits, Unlimited(limits))[0]


def test_waiting_for_processors_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ending(60.0) == "time"
    monkeypatch.setattr(launcher, "waiting_seconds", lambda process: 1e9)
    assert ending(0.2) == ""
    began = time.monotonic()
    assert ending(60.0) == "time"  # however long it waits
    assert time.monotonic() - began < 30.0


def test_waiting_is_what_the_kernel_counts() -> None:
    """Two processes on one processor: both have waited once either has run."""
    processor = min(os.sched_getaffinity(0))
    children = []
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            os.sched_setaffinity(0, {processor})
            while True:
                pass
    try:
        while not all(launcher.waiting_seconds(process) > 0.05 for process in children):
            time.sleep(0.01)
    finally:
        for process in children:
            os.kill(process, 9)
            os.waitpid(process, 0)
    assert launcher.waiting_seconds(children[0]) == 0.0  # it has ended
