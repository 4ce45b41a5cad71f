"""Mirrors state that the tests change into the candidate's process.

Patches of unittest.mock are applied in both processes. Before each act the candidate gets what has changed: the
standard streams that the tests replaced, argv, the environment, the folder, and the state of seeded random generators.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from copy import copy
from typing import Any

from .classes import definition
from .wire import WirePeer

TASK_MODULES = ("prompt", "tests")  # modules of the tests themselves
_STREAMS = ("stdin", "stdout", "stderr")
_originals = {name: getattr(sys, name) for name in _STREAMS}
_getcwd = os.getcwd
_sent: dict[str, Any] = {}


def state_changes() -> dict[str, Any]:
    """The mirrored state that has changed since the previous call."""
    streams = [name for name in _STREAMS if _replaced(name)]
    state: dict[str, Any] = {"streams": streams, "folder": _getcwd(), "argv": sys.argv}
    state["environment"] = getattr(os.environ, "_data", os.environ)  # not decoded, which takes long
    if "random" in _seeded:
        state["random"] = sys.modules["random"].getstate()
    if "numpy" in _seeded:
        state["numpy"] = tuple(sys.modules["numpy"].random.get_state())
    changes = {name: value for name, value in state.items() if name in _dirty or not _equal(_sent.get(name), value)}
    _dirty.clear()
    _sent.update({name: copy(value) for name, value in changes.items()})
    return changes | ({"environment": dict(os.environ)} if "environment" in changes else {})


def _replaced(name: str) -> bool:
    """Whether the tests replaced a standard stream, or its write, as with patch("sys.stdout.write")."""
    stream = getattr(sys, name)
    return stream is not _originals[name] or "write" in vars(stream)


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):  # a generator's state, which may contain an array
        return len(before) == len(now) and all(map(_equal, before, now))
    return before.tobytes() == now.tobytes() if hasattr(now, "tobytes") else before == now


def begin() -> None:
    """Take this process's state as already sent: the candidate's state is the same now."""
    _originals.update((name, getattr(sys, name)) for name in _STREAMS)
    state_changes()


_seeded: set[str] = set()  # generators whose state the candidate follows
_dirty: set[str] = set()  # generators to send even if their state has not changed


def follow_seeds() -> None:
    """Whenever the tests seed a random generator, send its state to the candidate from then on."""

    def follow(module: Any, name: str) -> None:
        seed = module.seed

        def seed_and_mark(*arguments: Any, **named: Any) -> None:
            seed(*arguments, **named)
            _seeded.add(name)
            _dirty.add(name)

        module.seed = seed_and_mark

    follow(importlib.import_module("random"), "random")
    if "numpy" in sys.modules:
        follow(sys.modules["numpy"].random, "numpy")


def imported_name(value: Any) -> tuple[str, str] | None:
    """Module and name by which another process can import this module or definition; None if it cannot."""
    if isinstance(value, types.ModuleType):
        return (value.__name__, "") if sys.modules.get(value.__name__) is value else None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if isinstance(module, str) and isinstance(name, str) and module not in TASK_MODULES:
        return (module, name) if definition(module, name) is value else None
    return None


def follow_patches(peer: WirePeer, modules: dict[Any, str]) -> None:
    """Apply each patch of unittest.mock in the candidate's process too; `modules` have other names there."""
    import unittest.mock

    kind: Any = type(unittest.mock.patch("os.path"))  # the class of all patches; this patch is not started
    enter, leave = kind.__enter__, kind.__exit__

    def locate(patch: Any) -> tuple[str, str, str] | None:
        module = modules.get(patch.target) if isinstance(patch.target, types.ModuleType) else None
        owner = (module, "") if module else imported_name(patch.target)
        streams = owner == ("sys", "") and patch.attribute in _STREAMS  # these are mirrored with each call
        return (*owner, patch.attribute) if owner and not streams else None

    def enter_both(patch: Any) -> Any:
        replacement = enter(patch)
        if location := locate(patch):
            peer.ask("patch", None, *location, getattr(patch.target, patch.attribute))
        return replacement

    def leave_both(patch: Any, *raised: Any) -> Any:
        if location := locate(patch):
            peer.ask("unpatch", None, *location)
        return leave(patch, *raised)

    kind.__enter__, kind.__exit__ = enter_both, leave_both


def print_all(printed: Any) -> None:
    """Write the candidate's output to streams that the tests replaced: alternately a name and a text, None to flush."""
    if type(printed) is not tuple:
        raise TypeError("printed output must be a tuple")
    for name, text in zip(printed[::2], printed[1::2], strict=True):
        stream = getattr(sys, name) if name in _STREAMS[1:] else None
        if text is None and stream is not None:
            stream.flush()
        elif stream is not None:
            stream.write(str.__str__(text))


def read_line() -> Any:
    """A line of the tests' replacement of stdin."""
    return sys.stdin.readline()


def read() -> Any:
    """The remaining text of the tests' replacement of stdin."""
    return sys.stdin.read()
