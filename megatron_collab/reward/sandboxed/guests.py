"""The tests' side of the pipe: which of the tests' objects the candidate may reach, and what it may do with them.

Functions may be called, mocks be used as what they stand for, files of the tests be read and written, objects of the
tests' own classes be used by their public names. Of a mock it may not touch what the tests will ask it, and of nothing
a name with an underscore. Modules, and what they define, do not cross: their names do, and the candidate takes its own.
"""

from __future__ import annotations

import functools
import io
import sys
import types
from collections.abc import Callable
from typing import Any

from . import handles, mirror
from .values import Violation
from .wire import ACTS, Remote, Unjudged, WirePeer

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial, types.MethodWrapperType)
_BAGS = {("types", "SimpleNamespace"), ("argparse", "Namespace")}
_CALL = frozenset({"call", "text", "representation"})
_READ = frozenset({"iterate", "next", "length", "item", "contains", "truth", "enter", "exit", "int", "float"})
_USE = _CALL | _READ | {"attribute"}
_CHANGE = frozenset({"set attribute", "set item", "delete item"})
# By kind, the acts that the candidate may ask for.
_ALLOWED = {
    "function": _CALL,
    "iterator": frozenset({"iterate", "next", "text", "representation"}),
    "file": _USE - {"call"},
    "mock": _USE | _CHANGE,
    "object": _USE | _CHANGE,
}


def kind_of(value: Any) -> str:
    """Which kind of guest an object of the tests is. Raises Unjudged where it is none."""
    kind = type(value)
    if "unittest.mock" in sys.modules and isinstance(value, sys.modules["unittest.mock"].NonCallableMock):
        return "mock"
    if isinstance(value, _FUNCTIONS) or (isinstance(value, type) and value.__module__ in mirror.TASK_MODULES):
        return "function"
    if isinstance(value, io.IOBase):
        return "file"
    if kind.__module__ in mirror.TASK_MODULES or (kind.__module__, kind.__qualname__) in _BAGS:
        return "object"
    if hasattr(kind, "__next__"):
        return "iterator"
    raise Unjudged(f"its tests pass the candidate a {kind.__module__}.{kind.__qualname__}, which is no data")


class Guests:
    """The `WireHost` of the tests."""

    def describe(self, value: Any) -> list[Any]:
        if name := mirror.imported_name(value):
            return ["import", *name]
        return [kind_of(value), str(getattr(value, "__name__", type(value).__name__)), callable(value)]

    def adopt(self, peer: WirePeer, number: int, *told: Any) -> Any:
        if number < 0:
            raise Violation("the candidate cannot have the tests import")
        return handles.adopt(peer, number, told)

    def do(self, act: str, target: Any, arguments: tuple[Any, ...]) -> Any:
        if act in _DESK:
            return _DESK[act](*arguments)
        kind = kind_of(target)
        if act not in _ALLOWED[kind]:
            raise PermissionError(f"{act} of a {kind} of the tests")
        if act in ("attribute", "set attribute"):
            _check_name(target, kind, *arguments)
        if act == "call":
            positional, named, *_ = arguments
            return target(*positional, **named)
        return ACTS[act](target, *arguments)


def _check_name(target: Any, kind: str, name: Any, value: Any = None) -> None:
    """AttributeError for a name that leads to the tests themselves, or changes what a mock remembers."""
    private = type(name) is not str or name.startswith("_")
    if private or (
        kind == "mock" and (name in dir(type(target)) or name == "method_calls" or isinstance(value, Remote))
    ):
        raise AttributeError(f"{type(target).__name__} of the tests has no {name!r} for the candidate")


_DESK: dict[str, Callable[..., Any]] = {"print": mirror.print_all, "read line": mirror.read_line, "read": mirror.read}
