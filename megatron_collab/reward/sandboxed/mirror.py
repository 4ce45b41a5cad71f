"""What tests change around the candidate is changed in its process as well, since that is another one.

Patches of unittest.mock are made in both. Before each act it is told, if they have changed: which of the standard
streams the tests replaced, the environment, the folder, and the state of random generators that they seeded.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from copy import copy
from typing import Any

from .classes import find_class
from .wire import WirePeer

TASK_MODULES = ("prompt", "tests")  # of the tests themselves
_STREAMS = ("stdin", "stdout", "stderr")
_own = {name: getattr(sys, name) for name in _STREAMS}
_getcwd = os.getcwd
_told: dict[str, Any] = {}


def situation() -> dict[str, Any]:
    """What is new since the last time."""
    streams = [name for name in _STREAMS if _replaced(name)]
    now: dict[str, Any] = {"streams": streams, "folder": _getcwd(), "argv": sys.argv}
    now["environment"] = getattr(os.environ, "_data", os.environ)  # not decoded, which takes long
    if "random" in _seeded:
        now["random"] = sys.modules["random"].getstate()
    if "numpy" in _seeded:
        now["numpy"] = tuple(sys.modules["numpy"].random.get_state())
    new = {name: value for name, value in now.items() if name in _dirty or not _equal(_told.get(name), value)}
    _dirty.clear()
    _told.update({name: copy(value) for name, value in new.items()})
    return new | ({"environment": dict(os.environ)} if "environment" in new else {})


def _replaced(name: str) -> bool:
    """Whether a standard stream is the tests' own, or its write is, as by patch("sys.stdout.write")."""
    stream = getattr(sys, name)
    return stream is not _own[name] or "write" in vars(stream)


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):  # of a generator, maybe with an array in it
        return len(before) == len(now) and all(map(_equal, before, now))
    return before.tobytes() == now.tobytes() if hasattr(now, "tobytes") else before == now


def begin() -> None:
    """Take the candidate's present situation, which is that of this process, as told."""
    _own.update((name, getattr(sys, name)) for name in _STREAMS)
    situation()


_seeded: set[str] = set()  # generators whose state the candidate follows
_dirty: set[str] = set()  # those that it must be told of even if their state has not changed


def follow_seeds() -> None:
    """Let the candidate's random generators follow the tests' wherever the tests seed theirs."""

    def followed(module: Any, name: str) -> None:
        seed = module.seed

        def seeding(*arguments: Any, **named: Any) -> None:
            seed(*arguments, **named)
            _seeded.add(name)
            _dirty.add(name)

        module.seed = seeding

    followed(importlib.import_module("random"), "random")
    if "numpy" in sys.modules:
        followed(sys.modules["numpy"].random, "numpy")


def imported_name(value: Any) -> tuple[str, str] | None:
    """Module and name under which another process finds a module, or what one defines."""
    if isinstance(value, types.ModuleType):
        return (value.__name__, "") if sys.modules.get(value.__name__) is value else None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if isinstance(module, str) and isinstance(name, str) and module not in TASK_MODULES:
        return (module, name) if find_class(module, name) is value else None
    return None


def follow_patches(peer: WirePeer, modules: dict[Any, str]) -> None:
    """Make each patch of unittest.mock in the candidate's process as well; `modules` are named otherwise there."""
    import unittest.mock

    kind: Any = type(unittest.mock.patch("os.path"))  # where all ways to patch come together; this one is not begun
    enter, leave = kind.__enter__, kind.__exit__

    def place(patch: Any) -> tuple[str, str, str] | None:
        module = modules.get(patch.target) if isinstance(patch.target, types.ModuleType) else None
        found = (module, "") if module else imported_name(patch.target)
        streams = found == ("sys", "") and patch.attribute in _STREAMS  # those follow with each call
        return (*found, patch.attribute) if found and not streams else None

    def entered(patch: Any) -> Any:
        given = enter(patch)
        if where := place(patch):
            peer.ask("patch", None, *where, getattr(patch.target, patch.attribute))
        return given

    def left(patch: Any, *raised: Any) -> Any:
        if where := place(patch):
            peer.ask("unpatch", None, *where)
        return leave(patch, *raised)

    kind.__enter__, kind.__exit__ = entered, left


def print_all(printed: Any) -> None:
    """What the candidate did to streams that the tests replaced: in turn the name, and what it wrote, None to flush."""
    if type(printed) is not tuple:
        raise TypeError("no texts")
    for name, text in zip(printed[::2], printed[1::2], strict=True):
        stream = getattr(sys, name) if name in _STREAMS[1:] else None
        if text is None and stream is not None:
            stream.flush()
        elif stream is not None:
            stream.write(str.__str__(text))


def read_line() -> Any:
    """A line of what the tests put in the place of stdin."""
    return sys.stdin.readline()


def read() -> Any:
    """The rest of what the tests put in the place of stdin."""
    return sys.stdin.read()
