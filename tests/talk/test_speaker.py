"""The process that serves models for a talk, if it serves none; tests/talk/test_page.py has one that does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatron_collab.talk.speaker import SpeakerProcess


@pytest.mark.processes
def test_a_lost_process_is_one_line(tmp_path: Path) -> None:
    before = psutil.Process().children()
    speaker = SpeakerProcess(tmp_path, ["before"], 0, 1)
    (process,) = (child for child in psutil.Process().children() if child not in before)
    process.kill()
    speaker.send({"action": "begin", "task": ""})
    assert [*speaker.updates()] == [{"fault": "the process ended with code -9"}]
    speaker.send({"action": "user"})
    speaker.end()
