"""On PYTHONPATH as sitecustomize: the first process to reach MODULE:FUNCTION of PHASE makes the file MARK, and dwells
there until the test has sent its signal (MARK-sent) and rank 0 has kept it (MARK-kept).

MODULE alone: that is about to import it. MODULE:FUNCTION:2: at its second call in a process.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

DWELLS = 60.0  # seconds at most, should the test have ended


def reached() -> None:
    mark = os.environ["MARK"]
    with suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        deadline = time.monotonic() + DWELLS
        while not all(os.path.exists(f"{mark}-{file}") for file in ("sent", "kept")) and time.monotonic() < deadline:
            time.sleep(0.01)


def dwells(function: Any, call: int) -> Any:
    """`function`, but that its call with this number, counted from 1, dwells first."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def first(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            reached()
        return function(*arguments, **named)

    return first


def marks(keep: Any) -> Any:
    """The function with which rank 0 keeps a signal, but that it says so in a file."""

    @functools.wraps(keep)
    def kept(*arguments: Any, **named: Any) -> Any:
        keep(*arguments, **named)
        Path(f"{os.environ['MARK']}-kept").touch()

    return kept


class Finder(importlib.abc.MetaPathFinder):
    """Replaces a function of a module when that is imported; without a function, the import itself dwells."""

    def __init__(self, module: str, function: str, wrap: Callable[[Any], Any]) -> None:
        self.module, self.function, self.wrap = module, function, wrap

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        if not self.function:
            reached()
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            *owners, last = self.function.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, self.wrap(getattr(owner, last)))

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


if "PHASE" in os.environ:
    place, name, number, *_ = [*os.environ["PHASE"].split(":"), "", "1"]
    sys.meta_path.insert(0, Finder(place, name, lambda function: dwells(function, int(number or 1))))
    sys.meta_path.insert(0, Finder("megatron_collab.runtime.signals", "_keep", marks))
