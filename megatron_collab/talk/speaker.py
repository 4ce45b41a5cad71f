"""The process that serves models of a run for a talk in the page: what the page's server sees of speaker_program.py.

Lines of JSON: requests on standard input, changes of the session's state on standard output. It ends when standard
input does, so also with the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megatron_collab.observability.records import parsed
from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.text import one_line

END_SECONDS = 30  # for servers to end, after which the process is killed
_LAST_BYTES = 1 << 14  # of its log, in which a fault is looked for


class SpeakerProcess:
    """A process that serves `models` of the run in `folder` (view/talk.py's Speaker); its GPUs: part `part` of `parts`."""

    def __init__(self, folder: Path, models: Sequence[str], part: int, parts: int) -> None:
        self._log = TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_collab.talk.speaker_program", str(part), str(parts), str(folder), *models],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C in the terminal is for the command, and this process ends with it
        )

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin
        with suppress(OSError, ValueError):  # it has ended, as `updates` says too
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def updates(self) -> Iterator[Mapping[str, Any]]:
        assert self._process.stdout
        has_fault = False
        for line in self._process.stdout:
            part = parsed(line.decode())
            assert part is not None
            has_fault = has_fault or bool(part.get("fault"))
            yield part
        self.end()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        with self._log:
            if not has_fault:
                yield {"fault": f"the process ended with code {code}{self._last_line()}"}

    def end(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()

    def _last_line(self) -> str:
        """The last line of its log, which names an error that it did not expect."""
        self._log.seek(max(0, self._log.seek(0, 2) - _LAST_BYTES))
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f": {one_line(redact(line))}" for line in reversed(lines) if line.strip()), "")
