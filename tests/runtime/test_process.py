from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

CODE = "from megatron_collab.runtime.process import die_with_parent; die_with_parent({}); print('alive')"


def child(argument: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE.format(argument)], capture_output=True, text=True, timeout=60)


def test_a_child_of_a_living_parent_goes_on() -> None:
    for argument in ("", os.getpid()):
        assert child(argument).stdout == "alive\n"


def test_a_parent_that_ended_before_the_call_is_noticed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert child(ended.pid).returncode == -signal.SIGKILL
