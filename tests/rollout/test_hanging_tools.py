"""A tool that does not return delays neither other calls nor the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.rollout.tools import ToolFailure
from megatron_collab.rollout.tools.toolbox import find_tool
from megatron_collab.runtime import side_loop
from megatron_collab.runtime.process import wait_for
from megatron_collab.settings import RolloutConfig
from megatron_collab.types import Message, Task
from tests.rollout.fakes import FakePolicy, toolbox_of

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")

BLOCKED = """
import threading

ends = threading.Event()

def block(wait: bool) -> str:
    \"\"\"Waits.

    Args:
        wait: whether it does
    \"\"\"
    if wait:
        ends.wait()
    return "ended"
"""


@pytest.mark.processes
def test_hung_calls_delay_no_other_call_and_fail_beyond_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit bounds the number of threads. Once the calls return, tools work again."""
    monkeypatch.setattr(side_loop, "HUNG", 3)
    (tmp_path / "blocked.py").write_text(BLOCKED)
    spec = f"{tmp_path}/blocked.py:block"
    box = toolbox_of(RolloutConfig(tools=[spec], tool_timeout=60.0), FakePolicy(lambda prompt, seed: ""))

    async def calls() -> list[str]:
        answers = []
        async with box.open(TASK) as session:
            for wait in (True, True, False, True):
                box.timeout = 0.3 if wait else 60.0
                answers.append((await session.answer(f'call block {{"wait": {str(wait).lower()}}}'))[0][0].content)
            with pytest.raises(ToolFailure, match="3 calls have timed out and still hang in their threads"):
                await session.answer('call block {"wait": false}')
            find_tool(spec).function.__globals__["ends"].set()  # type: ignore[attr-defined]
            assert wait_for(lambda: not any(thread.is_alive() for thread in side_loop._late), 60)
            box.timeout = 60.0
            answers.append((await session.answer('call block {"wait": true}'))[0][0].content)
        return answers

    late = "error: block timed out"
    assert asyncio.run(calls()) == [late, late, "ended", late, "ended"]
    assert box.counters == {"tool_calls": 6, "tool_timeouts": 3, "tool_failures": 1}


HANGS = """
import asyncio, time
from megatron_collab.rollout.tools import run
try:
    asyncio.run(asyncio.wait_for(run(time.sleep, 600), 0.1))
except TimeoutError:
    print("late", flush=True)
"""


@pytest.mark.processes
def test_a_call_that_hangs_does_not_hold_the_process_at_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr
