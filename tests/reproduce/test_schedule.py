"""Programs run side by side after those that they need, and signals reach them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_collab.reproduce.schedule import side_by_side


class Log:
    """Runs items; what is in `codes` fails. `most`: how many ran at once."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.begun, self.ended, self.running, self.most = codes, list[str](), list[str](), 0, 0
        self.begun_after = dict[str, int]()  # how many had ended

    async def run(self, item: str) -> int:
        self.begun.append(item)
        self.begun_after[item] = len(self.ended)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3 if item in self.codes else 10):
            await asyncio.sleep(0)
        self.running -= 1
        self.ended.append(item)
        return self.codes.get(item, 0)


PREREQUISITES = {"a1": [], "a2": ["a1"], "b1": [], "b2": ["b1"], "a3": ["a2", "b2"], "c1": []}


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_item_runs_after_those_that_it_needs_and_as_many_as_there_are_jobs(jobs: int) -> None:
    log = Log()
    assert asyncio.run(side_by_side(PREREQUISITES, jobs, log.run)) == 0
    assert log.most == min(jobs, 3) and sorted(log.ended) == sorted(PREREQUISITES)
    for item, prerequisites in PREREQUISITES.items():
        assert all(log.ended.index(need) < log.begun_after[item] for need in prerequisites)


def test_one_by_one_items_run_in_their_order() -> None:
    log = Log()
    asyncio.run(side_by_side(PREREQUISITES, 1, log.run))
    assert log.ended == [*PREREQUISITES]


def test_after_a_failure_nothing_starts_and_what_runs_ends() -> None:
    log = Log(a1=7)
    assert asyncio.run(side_by_side(PREREQUISITES, 2, log.run)) == 7
    assert log.begun == ["a1", "b1"] and log.ended == ["a1", "b1"]


def test_after_an_exception_what_runs_ends_too() -> None:
    log = Log()

    async def run(item: str) -> int:
        if item == "a1":
            raise ValueError("broken")
        return await log.run(item)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(side_by_side(PREREQUISITES, 2, run))
    assert log.ended == ["b1"]


@pytest.mark.processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_signals_reach_all_programs_and_nothing_starts_then(tmp_path: Path, jobs: int) -> None:
    program = "import signal, sys, time, pathlib\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    program += f"pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch()\ntime.sleep(60)\n"
    code = f"""
import asyncio, sys
from megatron_collab.reproduce.schedule import Programs, side_by_side
programs = Programs()
async def main():
    with programs.forwarding():
        prerequisites = {{"a1": [], "a2": ["a1"], "b1": []}}
        return await side_by_side(prerequisites, {jobs}, lambda name: programs.run(["-c", {program!r}, name]))
sys.exit(asyncio.run(main()))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while len([*tmp_path.iterdir()]) < jobs:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert {file.name for file in tmp_path.iterdir()} == {"a1", "b1"} - ({"b1"} if jobs == 1 else set())
    finally:
        process.kill()
