"""The process that serves models for a talk, if it serves none; tests/talk/test_page.py has one that does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatron_collab.talk import speaker
from megatron_collab.talk.speaker import SpeakerProcess

_KILLED = """#!/bin/sh
echo '{"progress": "a server starts"}'
echo no memory >&2
printf '{"chats": ['
kill -9 $$
"""


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


@pytest.mark.processes
def test_a_process_that_is_killed_while_it_writes_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text(_KILLED)
    program.chmod(0o700)
    monkeypatch.setattr(speaker.sys, "executable", str(program))
    progress, fault = SpeakerProcess(tmp_path, ["before"], 0, 1).updates()
    assert progress == {"progress": "a server starts"}
    assert fault == {"fault": "the process ended with code -9: no memory"}
