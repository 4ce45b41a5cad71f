"""Progress in a log file and on a terminal, with the lines of the log above what is drawn."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from typing import Any

import pyte
import pytest

from megatron_collab.runtime import screen
from megatron_collab.runtime.screen import duration, progress


def test_a_log_file_gets_a_line_at_most_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = progress("evaluation", 300)
    bar.update(100)
    bar.update(200)
    bar.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(screen, "LOG_EVERY", 0.0)
    bar = progress("evaluation", 300)
    bar.update(100)
    bar.update(200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "evaluation: 100/300 tasks (33 %), 0.0 s, 0.0 s left",
        "evaluation: 300/300 tasks (100 %), 0.0 s, 0.0 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.4 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (12_000, "3 h 20 min"), (-1, "0.0 s")],
)
def test_a_duration_is_written_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


ON_TERMINAL = """
FIRST
import logging, signal, subprocess, sys, time
from rich.text import Text
from megatron_collab.runtime import console, screen

screen._REDRAWN_EVERY = 0.01
console.begin()
logger = logging.getLogger("megatron_collab")
logger.info("the start")
screen.note("importing")
screen.show(Text("the view"))
bar = screen.progress("evaluation", 3, "task")
bar.update(1)
for n in range(30):
    logger.info(f"line {n} with [markup] and key sk-0123456789abcdefghij")
logger.warning("slow")
subprocess.run([sys.executable, "-c", "raise ValueError('of another process')"])
WITHIN
bar.close()
bar.close()
screen.close()
logger.info("the end")
"""
LAUNCHER = """
import subprocess, sys
from megatron_collab.runtime import console, screen

console.begin()
subprocess.run([sys.executable, "-c", '''SCRIPT'''])
screen.restore()
"""
ROWS, COLUMNS = 24, 80


def on_terminal(within: str = "", *flags: str, launcher: str = "SCRIPT", first: str = "") -> pyte.HistoryScreen:
    """A terminal after the script, which does `first`, then `within` before it ends, and may have a `launcher`."""
    terminal = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
    stream = pyte.ByteStream(terminal)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))

    def read() -> None:
        with suppress(OSError):  # the terminal's other side is closed
            while piece := os.read(ours, 1 << 16):
                stream.feed(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    script = ON_TERMINAL.replace("console.begin()", f"console.take_flags({[*flags]!r})\nconsole.begin()", 1)
    script = launcher.replace("SCRIPT", script.replace("FIRST", first).replace("WITHIN", within))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment["TERM"] = "xterm"
    try:
        subprocess.run([sys.executable, "-c", script], stdout=theirs, stderr=theirs, env=environment, timeout=100)
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)
    return terminal


def rows(terminal: pyte.HistoryScreen) -> list[str]:
    """All rows that can be seen or scrolled back to, without the blank ones."""
    history = ["".join(row[column].data for column in range(COLUMNS)) for row in terminal.history.top]
    return [row.rstrip() for row in (*history, *terminal.display) if row.strip()]


@pytest.mark.processes
@pytest.mark.parametrize("flags", [(), ("--plain",), ("--quiet",)])
def test_every_line_stays_and_what_is_drawn_is_below(flags: tuple[str, ...]) -> None:
    """Also those of other processes, such as the traceback of a rank."""
    lines = rows(on_terminal("", *flags))
    info = "--quiet" not in flags
    expected = ["the start", *(f"line {n} with [markup] and key ***" for n in range(30))] if info else []
    expected[1:1] = [] if flags else ["importing"]
    expected += [
        "megatron-collab: slow",
        "Traceback (most recent call last):",
        '  File "<string>", line 1, in <module>',
    ]
    expected += ["    raise ValueError('of another process')"] * (sys.version_info >= (3, 13))
    expected += ["ValueError: of another process"]
    assert [line for line in lines if "view" not in line] == [*expected, *(["the end"] if info else [])]
    assert lines.count("the view") == (not flags), "its last state stays"
    assert flags or lines.index("the view") == len(lines) - 2


@pytest.mark.processes
def test_the_view_is_at_the_bottom_while_lines_scroll() -> None:
    display = on_terminal("screen._screen()._draw(); import os; os.kill(os.getpid(), signal.SIGKILL)").display
    assert display[-2].strip() == "the view" and display[-1].startswith("evaluation ") and "1/3 tasks" in display[-1]
    assert display[-3].strip() == "" and display[-4].startswith("ValueError: of another process")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "end", "last"),
    [
        ("", "sys.exit(3)", "the view"),
        ("", "raise ValueError", "the view"),
        ("signals.end_commands()", "kill('SIGTERM')", "the view"),
        ("signals.begin()", "kill('SIGTERM')", "megatron-collab: received SIGTERM before the run began; exiting"),
        ("", "kill('SIGKILL')", "ValueError: of another process"),
    ],
)
def test_a_terminal_scrolls_again_after_a_process_that_drew(first: str, end: str, last: str) -> None:
    """Also one that was killed, if its launcher restores the terminal."""
    first = f"""
import os, signal, time
from megatron_collab.runtime import signals

def kill(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(60)

{first}
"""
    launcher = LAUNCHER if "KILL" in end else "SCRIPT"
    terminal = on_terminal(f"screen._screen()._draw()\n{end}", launcher=launcher, first=first)
    assert terminal.margins is None
    assert any(row.startswith(last) for row in rows(terminal)[-3:])


@pytest.mark.processes
def test_a_stage_is_shown_while_it_goes_on() -> None:
    """Also in a process that forks meanwhile."""
    within = """
import os
title = "loading the model"
with screen.stages(lambda: title):
    screen._screen()._draw()
    title = "a sync"
    for n in range(20):
        if not os.fork():
            print(f"child {n}", file=sys.stderr)
            os._exit(0)
        os.wait()
    screen._screen()._draw()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    terminal = on_terminal(within)
    assert terminal.display[-2].startswith("a sync, ")
    assert terminal.display[-3].strip() == "the view" and terminal.display[-1].startswith("evaluation ")
    assert [row for row in rows(terminal) if row.startswith("child")] == [f"child {n}" for n in range(20)]


def test_a_phase_prints_a_line_in_a_log_file_if_it_was_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with screen.phase("reading"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(screen, "LOG_EVERY", 0.0)
    with screen.phase("reading"):
        pass
    assert re.fullmatch(r"reading: [\d.]+ s\n", capsys.readouterr().err)


@pytest.mark.processes
def test_no_line_is_lost_when_the_terminal_is_resized() -> None:
    """A terminal forgets its region then."""
    resized = f"""
import termios
print("\\x1b[r", end="", file=sys.stderr, flush=True)
termios.tcsetwinsize(2, ({ROWS}, {COLUMNS - 1}))
screen._screen()._draw()
for n in range(30):
    logger.info(f"later {{n}}")
"""
    terminal = on_terminal(resized)
    assert [row for row in rows(terminal) if row.startswith("later")] == [f"later {n}" for n in range(30)]


def test_a_drawing_that_fails_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drawings, drawn = iter([ZeroDivisionError, None]), threading.Event()

    def draw(self: Any) -> None:
        if error := next(drawings, None):
            raise error
        drawn.set()

    monkeypatch.setattr(screen._Screen, "_draw", draw)
    monkeypatch.setattr(screen, "_REDRAWN_EVERY", 0.001)
    drawn_screen = screen._Screen()
    thread = threading.Thread(target=drawn_screen._redraw, daemon=True)
    thread.start()
    assert drawn.wait(60)
    drawn_screen._ended.set()
    thread.join()
