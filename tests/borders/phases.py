"""On PYTHONPATH as sitecustomize: the first process to reach MODULE:FUNCTION of PHASE makes the file MARK, and dwells
there until the test, which has sent its signal, makes MARK-sent.

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
from contextlib import suppress
from typing import Any

DWELLS = 60.0  # seconds at most, should the test have ended


def reached() -> None:
    with suppress(FileExistsError):
        os.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL))
        deadline = time.monotonic() + DWELLS
        while not os.path.exists(os.environ["MARK"] + "-sent") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(3)  # in which the signal arrives, also if another process passes it on and the machine is busy


def wrapped(function: Any, call: int) -> Any:
    calls = itertools.count(1)

    @functools.wraps(function)
    def first(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            reached()
        return function(*arguments, **named)

    return first


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, function: str = "", call: str = "1") -> None:
        self.module, self.function, self.call = module, function, int(call)

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
            setattr(owner, last, wrapped(getattr(owner, last), self.call))

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


if "PHASE" in os.environ:
    sys.meta_path.insert(0, Finder(*os.environ["PHASE"].split(":")))
