"""The bottom of a terminal while something takes long: progress bars and a view of the run, drawn in place.

If stderr is no terminal, or with --plain, a bar prints a line every LOG_EVERY seconds instead, a phase one at its end
if it took as long, and there is no view.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # rich takes a tenth of a second to import, and is needed on terminals only
    from rich.console import RenderableType
    from rich.text import Text

logger = logging.getLogger(__name__)

PLAIN = "MEGATRON_COLLAB_PLAIN"  # set by --plain, in all processes of a run
LOG_EVERY = 10.0  # seconds between two lines of progress in a log file
_REDRAWN_EVERY = 0.25  # seconds
_SCROLLING = 5  # rows of the terminal at least that are left for lines
_SAVE, _RESTORE = "\x1b7", "\x1b8"  # the position of the cursor


class Bar(Protocol):
    def update(self, n: int) -> None: ...

    def close(self) -> None: ...


def is_drawn() -> bool:
    """Whether bars and views are drawn."""
    return _shows() and sys.stderr.isatty() and os.environ.get(PLAIN) != "1" and os.environ.get("TERM") != "dumb"


def progress(title: str, total: int, unit: str = "task") -> Bar:
    """Progress on stderr from 0 to `total`, unless only warnings are shown; it disappears when it is closed."""
    if is_drawn():
        return _screen().bar(title, total, unit)
    return _Lines(title, total, unit) if _shows() else _Hidden()


def counted[Item](items: Sequence[Item], title: str, unit: str) -> Iterator[Item]:
    """The items one after the other, with the progress of the loop over them."""
    with closing(progress(title, len(items), unit)) as bar:
        for item in items:
            yield item
            bar.update(1)


@contextmanager
def phase(title: str) -> Iterator[None]:
    """Within the block, show that `title` goes on, and for how long; for work whose size is not known."""
    began = time.monotonic()
    with stages(lambda: title):
        yield
    seconds = time.monotonic() - began
    if seconds >= LOG_EVERY and _shows() and not is_drawn():
        print(f"{title}: {duration(seconds)}", file=sys.stderr, flush=True)


@contextmanager
def stages(current: Callable[[], str]) -> Iterator[None]:
    """Within the block, show the `current` stage and for how long it goes on, if anything is drawn."""
    if not is_drawn():
        yield
        return
    drawn, line = _screen(), _Stage(current)
    drawn.add(line)
    try:
        yield
    finally:
        drawn.drop(line)


def _shows() -> bool:
    return logging.getLogger("megatron_collab").isEnabledFor(logging.INFO)


def show(view: RenderableType) -> None:
    """Draw `view` above the bars until `close`, if anything is drawn; it may change, and is rendered each time."""
    if is_drawn():
        _screen().show(view)


def note(text: str) -> None:
    """A line before a time in which this program cannot draw, if anything is drawn."""
    if is_drawn():
        print(text, file=sys.stderr, flush=True)


def close() -> None:
    """Take the bars off the terminal; the view stays as it was last, as part of what was printed."""
    if _Screen.instance is not None:
        _Screen.instance.close()


def restore() -> None:
    """Let the whole terminal scroll again if a process that had drawn was killed."""
    if is_drawn():
        print(f"{_SAVE}\x1b[r{_RESTORE}\x1b[J", end="", file=sys.stderr, flush=True)


class _Screen:
    """Lines at the bottom of the terminal, below the region in which it scrolls (DECSTBM; VT100's manual, chapter 3).

    Whatever any process prints scrolls above them: ranks, libraries and tracebacks share the terminal. A thread draws,
    each time in one write, and only what has changed. Terminals forget the region when their size changes; then it is
    set anew. If another program ends it, as an editor may after Ctrl-Z, lines may be drawn over.
    """

    instance: _Screen | None = None

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            *(TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), MofNCompleteColumn()),
            *(TextColumn("{task.fields[unit]}", markup=False), TimeElapsedColumn(), TimeRemainingColumn()),
            console=self._console,
        )
        self._view: RenderableType | None = None
        self._stages = list[_Stage]()
        self._lock = threading.RLock()
        # A child must not inherit the lock of a stream that this thread is writing to.
        release = self._lock.release
        os.register_at_fork(before=self._lock.acquire, after_in_parent=release, after_in_child=release)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._drawn = list[str]()
        self._size = os.terminal_size((0, 0))
        self._reserved = 0  # rows at the bottom of the terminal
        atexit.register(self.close)

    def bar(self, title: str, total: int, unit: str) -> Bar:
        bar = self._bars.add_task(title, total=total, unit=f"{unit}s")
        self._start()
        return _Drawn(self, bar)

    def show(self, view: RenderableType) -> None:
        self._view = view
        self._start()

    def advance(self, bar: int, n: int) -> None:
        """Nothing if the bar is closed."""
        if bar in self._bars.task_ids:
            self._bars.advance(bar, n)  # type: ignore[arg-type]

    def remove(self, bar: int) -> None:
        """A second time: nothing."""
        if bar in self._bars.task_ids:
            self._bars.remove_task(bar)  # type: ignore[arg-type]
        self._end_if_empty()

    def add(self, stage: _Stage) -> None:
        self._stages.append(stage)
        self._start()

    def drop(self, stage: _Stage) -> None:
        """Nothing if the screen was closed meanwhile."""
        if stage in self._stages:
            self._stages.remove(stage)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._view is None and not self._bars.task_ids and not self._stages:
            self.close()

    def close(self) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        for bar in self._bars.task_ids:
            self._bars.remove_task(bar)
        self._stages.clear()
        view, self._view = self._view, None
        with self._lock:
            self._release()
        if view is not None:
            print("\n".join(self._lines(view)), file=sys.stderr, flush=True)

    def _start(self) -> None:
        if self._thread is None:
            self._ended.clear()
            self._draw()
            self._thread = threading.Thread(target=self._redraw, name="screen", daemon=True)
            self._thread.start()

    def _redraw(self) -> None:
        while not self._ended.wait(_REDRAWN_EVERY):
            try:
                self._draw()
            except Exception as error:  # a run must not end for its view, nor the view for one drawing
                logger.debug(f"not drawn: {type(error).__name__}: {error}")

    def _lines(self, part: RenderableType) -> list[str]:
        """`part` as lines with their colors, no longer than the terminal is wide."""
        self._console.width = self._size.columns
        with self._console.capture() as capture:
            self._console.print(part)
        return capture.get().removesuffix("\n").split("\n")

    def _draw(self) -> None:
        size = _size()
        with self._lock:
            is_resized, self._size = size != self._size, size
            bars = [line for stage in [*self._stages] for line in self._lines(stage.text())]
            bars += self._lines(self._bars.get_renderable()) if self._bars.task_ids else []
            view = [] if self._view is None else self._lines(self._view)
            most = max(size.lines - _SCROLLING, 0)
            lines = [*view[: max(most - len(bars), 0)], *bars][:most]
            if is_resized or len(lines) > self._reserved:
                self._release(clear=not is_resized)
                self._reserve(len(lines))
            lines += [""] * (self._reserved - len(lines))
            if lines == self._drawn:
                return
            first = size.lines - self._reserved + 1
            text = "".join(f"\x1b[{first + n};1H\x1b[2K{line}\x1b[m" for n, line in enumerate(lines))
            self._write(f"{_SAVE}{text}{_RESTORE}")
            self._drawn = lines

    def _reserve(self, reserved: int) -> None:
        """Scroll up what is there, and let only the rows above the last ones scroll, with the cursor among them."""
        if reserved:
            region = f"{_SAVE}\x1b[1;{self._size.lines - reserved}r{_RESTORE}"
            self._write("\n" * reserved + f"\x1b[{reserved}A{region}")
        self._reserved = reserved

    def _release(self, clear: bool = True) -> None:
        """Let the whole terminal scroll again, and `clear` the rows, unless a resize has moved what is there."""
        if self._reserved:
            first = self._size.lines - self._reserved + 1
            rows = f"\x1b[{first};1H\x1b[J" if clear else ""
            self._write(f"{_SAVE}\x1b[r{rows}{_RESTORE}")
        self._reserved, self._drawn = 0, []

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _size() -> os.terminal_size:
    """Of the terminal; 0 x 0 if it has just gone away."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno())
    return os.terminal_size((0, 0))


def _screen() -> _Screen:
    if _Screen.instance is None:
        _Screen.instance = _Screen()
    return _Screen.instance


class _Stage:
    """A line with what goes on, and since when."""

    def __init__(self, current: Callable[[], str]) -> None:
        self._current, self._title, self._began = current, "", 0.0

    def text(self) -> Text:
        from rich.text import Text

        title, now = self._current(), time.monotonic()
        if title != self._title:
            self._title, self._began = title, now
        return Text(f"{title}, {duration(now - self._began)}", no_wrap=True, overflow="ellipsis")


class _Drawn:
    """A bar on a terminal."""

    def __init__(self, drawn: _Screen, bar: int) -> None:
        self._screen, self._bar = drawn, bar

    def update(self, n: int) -> None:
        self._screen.advance(self._bar, n)

    def close(self) -> None:
        self._screen.remove(self._bar)


class _Lines:
    """Progress in a log file: at most one line every LOG_EVERY seconds."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit, self._done = title, total, unit, 0
        self._began = self._printed = time.monotonic()

    def update(self, n: int) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._printed >= LOG_EVERY:
            self._printed = now
            print(self._line(now - self._began), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        """E.g. "evaluation: 100/300 tasks (33 %), 2 min 5 s, 4 min 10 s left"."""
        share = f" ({100 * self._done // self._total} %)" if self._total else ""
        line = f"{self._title}: {self._done}/{self._total} {self._unit}s{share}, {duration(seconds)}"
        if self._done:
            line += f", {duration(seconds / self._done * (self._total - self._done))} left"
        return line

    def close(self) -> None:
        """Nothing to close."""


class _Hidden:
    def update(self, n: int) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""


def duration(seconds: float) -> str:
    """E.g. "0.4 s", "42 s", "2 min 5 s", "3 h 20 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    total = round(seconds)
    hours, minutes, seconds = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
