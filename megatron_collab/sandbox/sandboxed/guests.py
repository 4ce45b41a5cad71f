"""The tests' side of the pipe: which of the tests' objects the candidate may reach, and what it may do with them.

It may call functions, use mocks as the objects they stand for, read and write files of the tests, and use objects of
the tests' classes by their public names. It may not touch a mock's records, which the tests read, nor any name with a
leading underscore. Modules and their definitions do not cross the pipe: their names do, and the candidate imports them.
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
    """The kind of guest for an object of the tests. Raises Unjudged if the candidate must not reach it, TypeError if
    the candidate caused it."""
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
    fault = f"its tests pass the candidate a {kind.__module__}.{kind.__qualname__}, which is not plain data"
    raise TypeError(fault) if isinstance(value, handles.NoArgumentMethod) else Unjudged(fault)


class Guests:
    """The `WireHost` of the tests."""

    def describe(self, value: Any) -> list[Any]:
        if name := mirror.imported_name(value):
            return ["import", *name]
        return [kind_of(value), str(getattr(value, "__name__", type(value).__name__)), callable(value)]

    def adopt(self, peer: WirePeer, number: int, *description: Any) -> Any:
        if number < 0:
            raise Violation("the candidate must not make the tests import")
        return handles.adopt(peer, number, description)

    def do(self, act: str, target: Any, arguments: tuple[Any, ...]) -> Any:
        if act in _IO:
            return _IO[act](*arguments)
        kind = kind_of(target)
        if act not in _ALLOWED[kind]:
            raise PermissionError(f"{act} is not allowed on a {kind} of the tests")
        if act in ("attribute", "set attribute"):
            _check_name(target, kind, *arguments)
        if act == "call":
            positional, named, *_ = arguments
            return target(*positional, **named)
        return ACTS[act](target, *arguments)


def _check_name(target: Any, kind: str, name: Any, value: Any = None) -> None:
    """Raises AttributeError if a name leads to the tests themselves, or if it changes what a mock records."""
    private = type(name) is not str or name.startswith("_")
    if private or (
        kind == "mock" and (name in dir(type(target)) or name == "method_calls" or isinstance(value, Remote))
    ):
        raise AttributeError(f"{type(target).__name__} of the tests has no {name!r} for the candidate")


_IO: dict[str, Callable[..., Any]] = {"print": mirror.print_all, "read line": mirror.read_line, "read": mirror.read}
