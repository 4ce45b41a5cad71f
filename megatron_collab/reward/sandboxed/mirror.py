"""What tests change around the candidate is changed in its process as well, since that is another one.

Patches of unittest.mock are made in both. Each call brings along, where they have changed: which of the standard
streams the tests replaced, the environment, the folder, and the state of random generators that they seeded.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

from .classes import find_class
from .wire import WirePeer

TASK_MODULES = ("prompt", "tests")  # of the tests themselves
_STREAMS = ("stdin", "stdout", "stderr")
_own = {name: getattr(sys, name) for name in _STREAMS}
_getcwd = os.getcwd
_told: dict[str, Any] = {}


def situation() -> dict[str, Any]:
    """What is new since the last call."""
    streams = [name for name in _STREAMS if getattr(sys, name) is not _own[name]]
    now: dict[str, Any] = {"streams": streams, "environment": dict(os.environ), "folder": _getcwd(), "argv": sys.argv}
    if "random" in _seeded:
        now["random"] = sys.modules["random"].getstate()
    if "numpy" in _seeded:
        now["numpy"] = tuple(sys.modules["numpy"].random.get_state())
    new = {name: value for name, value in now.items() if name in _dirty or not _equal(_told.get(name), value)}
    _dirty.clear()
    _told.update({name: list(value) if isinstance(value, list) else value for name, value in new.items()})
    return new


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


def write(stream: str, text: str) -> None:
    """What the candidate printed to a stream that the tests replaced."""
    if stream in _STREAMS[1:]:
        getattr(sys, stream).write(str.__str__(text))


def read_line() -> Any:
    """A line of what the tests put in the place of stdin."""
    return sys.stdin.readline()
