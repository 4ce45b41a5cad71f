"""Writers of metrics and conversations besides the run folder's own files: run.writers, by name or by class path."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, ClassVar
from uuid import uuid4

from megatron_collab.observability.run_record import RunRecord
from megatron_collab.runtime import files, keys
from megatron_collab.runtime.redact import excerpt, redacted
from megatron_collab.settings import Extension, RunConfig, build, header_fault, lookup, nearest, require, uses_wandb

logger = logging.getLogger(__name__)

WRITERS = {
    "mlflow": f"{__name__}.mlflow:MlflowWriter",
    "swanlab": f"{__name__}.swanlab:SwanlabWriter",
    "tensorboard": f"{__name__}.tensorboard:TensorBoardWriter",
    "trackio": f"{__name__}.trackio:TrackioWriter",
    "wandb": f"{__name__}.wandb:WandbWriter",
}
CONVERSATIONS = 10  # that writers get at once: of an evaluation the first ones, the same tasks every time
Rows = Sequence[Mapping[str, Any]]  # of a file of conversations
_OPEN_SECONDS = 60.0  # the run waits for a writer to open; later, what it writes is kept for it
_CLOSE_SECONDS = 60.0  # for all writers together at the end
_MOST_REASONS = 3  # that are printed for a writer
_WAITING = 10_000  # calls that wait for a writer; further ones are dropped


class Writer(Extension):
    """Base class of writers. All methods are called in one thread of its own; what they raise is only printed.

    `package` must be installed, `install` names it for pip; `key_names`: the environment variables of its keys.
    """

    package: ClassVar[str] = ""
    install: ClassVar[str] = ""
    key_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        """Open it for a run that starts or resumes at step `start`.

        `run`: the options run.NAME, such as run.dir; `settings`: `program`, and all settings by group and name, without
        keys.
        """
        super().__init__(options)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, or of an evaluation at that step."""
        raise NotImplementedError

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        """Write at most CONVERSATIONS of `step`: of an evaluation (`name` eval or eval/SET) or of training (train)."""

    def close(self, failed: bool) -> None:
        """End of the run; `failed`: by an error. Returns when everything is written."""


def writer_kinds(run: RunConfig) -> dict[str, tuple[type[Writer], Any]]:
    """The classes and options of a run's writers, by name; Weights & Biases only with its key.

    Raises ConfigError, also for a key that no header can hold.
    """
    kinds = dict[str, tuple[type[Writer], Any]]()
    for name in run.writers:
        if name == "wandb" and not uses_wandb(run):
            continue
        kind = lookup(name, "run.writers", WRITERS, Writer)
        missing = kind.package and find_spec(kind.package) is None
        out = f"pip install {kind.install or kind.package}, or remove it from run.writers"
        require(not missing, f"run.writers={name}: needs the package {kind.package}; {out}")
        for key_name in kind.key_names:
            fault = header_fault(os.environ.get(key_name) or "unset")
            require(not fault, f"{key_name}: {fault}")
        kinds[name] = kind, build(kind.Options, run.writer_options.get(name, {}), f"run.writer_options.{name}.")
    for name in run.writer_options:
        require(name in run.writers, f"run.writer_options.{name}: not in run.writers{nearest(name, run.writers)}")
    return kinds


class Writers:
    """The writers of a run that starts or resumes at step `start`, each in a thread: none can end or delay the run."""

    def __init__(self, record: RunRecord, start: int) -> None:
        with keys.in_environment("WANDB_API_KEY"):
            kinds = writer_kinds(record.run)
        self._threads = [
            _WriterThread(name, partial(kind, options, record.run, redacted(record.settings), start), kind.key_names)
            for name, (kind, options) in kinds.items()
        ]
        deadline = time.monotonic() + _OPEN_SECONDS
        for thread in self._threads:
            thread.wait(thread.opened, deadline, "is not open yet; the run begins without it")

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for thread in self._threads:
            thread.add("scalars", step, dict(metrics))

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        for thread in self._threads:
            thread.add("conversations", step, name, rows)

    def close(self, failed: bool) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.add("close", failed)
        for thread in self._threads:
            thread.wait(thread.closed, deadline, "has not written everything; the rest is lost")


class _WriterThread:
    def __init__(self, name: str, make: Callable[[], Writer], key_names: Sequence[str]) -> None:
        self.opened, self.closed = Event(), Event()
        self._name, self._make, self._key_names = name, make, key_names
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(_WAITING)
        self._warned = set[str]()
        Thread(target=self._work, name=f"writer {name}", daemon=True).start()

    def add(self, method: str, *args: Any) -> None:
        try:
            self._calls.put_nowait((method, args))
        except Full:
            self._warn(f"{_WAITING} calls wait for it; it lacks the next ones")

    def wait(self, event: Event, deadline: float, otherwise: str) -> None:
        if not event.wait(max(0.0, deadline - time.monotonic())):
            self._warn(otherwise)

    def _work(self) -> None:
        writer = self._attempt(self._make)
        self.opened.set()
        method = ""
        while writer and method != "close":
            method, args = self._calls.get()
            self._attempt(partial(getattr(writer, method), *args))
        self.closed.set()

    def _attempt[Result](self, call: Callable[[], Result]) -> Result | None:
        try:
            with keys.in_environment(*self._key_names) if self._key_names else nullcontext():
                return call()
        except BaseException as error:  # a custom writer may raise anything
            self._warn(" ".join(f"{type(error).__name__}: {error}".split()))
            return None

    def _warn(self, reason: str) -> None:
        """Print a reason once; the run goes on."""
        if reason not in self._warned and len(self._warned) < _MOST_REASONS:
            self._warned.add(reason)
            logger.warning(f"writer {self._name}: {redacted(reason)}")


def run_id(run: RunConfig, writer: str) -> str:
    """The id of the run at a writer, the same for all its starts: the content of the file WRITER_id."""
    file = Path(run.dir) / f"{writer}_id"
    if not file.exists():
        files.replace(file, uuid4().hex)
    return file.read_text()


def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a conversation, by name; each text has at most LONGEST_EXCERPT characters."""
    dialogue = [f"{message['role']}: {message['content']}" for message in row["messages"]]
    reasons = [f"{name}: {of['reason'] or of['answer']}" for name, of in row.get("judgments", {}).items()]
    private = [
        f"message {at}, {name}: {note}" for at, of in row.get("private", {}).items() for name, note in of.items()
    ]
    return {
        "task": str(row["task"]),
        "conversation": excerpt("\n\n".join(dialogue)),
        "ending": str(row["ending"]),
        "reward": row["reward"],
        "standard_error": row.get("standard_error"),
        "scores": _numbers(row["scores"]),
        "parts": _numbers(row.get("parts", {})),
        "reasons": excerpt("\n\n".join(reasons)),
        "goal": excerpt(str(row.get("goal", ""))),
        "private": excerpt("\n\n".join(private)),
    }


def plain_text(row: Mapping[str, Any]) -> str:
    """The `cells` of a conversation that have a value, below each other."""
    return "\n\n".join(f"{name}:\n{value}" for name, value in cells(row).items() if value not in ("", None))


def _numbers(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if isinstance(value, int | float))
