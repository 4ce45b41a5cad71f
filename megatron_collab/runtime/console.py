"""The console: every line of a program passes the logger `megatron_collab`, with levels and one format.

Lines of level INFO and DEBUG go to stdout as they are. Warnings and errors go to stderr and begin with
"megatron-collab: ". A line of a worker, or of a rank other than the first, begins with the name of its process in
brackets. LEVEL in the environment decides what is shown, in all processes of a run: debug, info (the default), warning
or error; `--verbose` and `--quiet` set it to debug and warning. `--plain`: nothing is drawn on a terminal (screen.py).
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from megatron_collab.runtime import screen
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.runtime.redact import redact_output
from megatron_collab.runtime.text import printable

LEVEL = "MEGATRON_COLLAB_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FLAGS = {"--verbose": (LEVEL, "debug"), "--quiet": (LEVEL, "warning"), "--plain": (screen.PLAIN, "1")}

_package = logging.getLogger("megatron_collab")


class _Console(logging.Handler):
    """Writes to the streams that sys has at that moment: their output is redacted, and tests capture it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def emit(self, record: logging.LogRecord) -> None:
        alarming = record.levelno >= logging.WARNING
        stream = sys.stderr if alarming else sys.stdout
        part = f"[{self.process}] " if self.process else ""
        line = f"{'megatron-collab: ' if alarming else ''}{part}{printable(record.getMessage())}"
        try:
            print(line, file=stream)
            stream.flush()
        except Exception:
            self.handleError(record)


def begin(process: str = "") -> None:
    """From now on, show the package's lines, and redact what this process prints.

    `process`: its name in brackets; "" for the first process of a program. Exits if LEVEL is set to something else.
    """
    for stream in (sys.stdout, sys.stderr):
        if type(stream) is io.TextIOWrapper and stream.write_through:  # not what a test has put there
            # PYTHONUNBUFFERED, which many containers set, writes each part of a line at once: lines of ranks would mix.
            stream.reconfigure(line_buffering=True, write_through=False)
    redact_output()
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)
    name = os.environ.get(LEVEL, "info").lower()
    if name not in LEVELS:
        print(f"megatron-collab: {LEVEL}={name}: no such level; choose one of {', '.join(LEVELS)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    _package.handlers[:] = [_Console(process)]
    _package.setLevel(LEVELS[name])
    _package.propagate = False


def show(text: str, end: str = "\n") -> None:
    """Print text that may come from outside; what a terminal would obey is escaped."""
    print(printable(text), end=end, flush=True)


def show_secret(line: str) -> None:
    """Print a line whose key its reader needs: sys.stdout itself redacts it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(f"{line}\n".encode())
    sys.stdout.buffer.flush()


def _outliving(stream: TextIO | None) -> TextIO:
    """`stream`, which from now on drops output that cannot be written: a run outlives its pipe, its terminal and a full
    disk. A stream that was closed before the start is replaced by one that drops everything.
    """
    stream = stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if "flush" not in vars(stream):
        vars(stream).update({call: partial(_attempt, getattr(stream, call)) for call in ("write", "flush")})
    return stream


def _attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    with suppress(OSError):
        return call(*arguments)


def take_flags(arguments: Sequence[str]) -> list[str]:
    """`arguments` without FLAGS, which set variables for this process and those that it starts; the last counts."""
    os.environ |= [FLAGS[argument] for argument in arguments if argument in FLAGS]
    return [argument for argument in arguments if argument not in FLAGS]
