"""Handles: the tests' references to the candidate's objects.

The tests see data, or a `Handle`: its attributes and calls are evaluated in the candidate's process and give data or
more handles. A handle equals only itself, has no order and no arithmetic, and is not an instance of a data type. If the
tests could ask it how it compares with what they expect, that is refused.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Generator, Iterator
from typing import Any

from . import mirror
from .classes import find_class
from .values import TYPES, Violation
from .wire import Remote, WirePeer

_DATA = (*TYPES.values(), collections.deque)
# Methods that compare with their arguments, of types whose values cross as data.
_DATA_METHODS = {name for kind in _DATA if kind not in (object, type) for name in dir(kind)}
_DATA_METHODS |= {"equals", "eq", "ne", "lt", "le", "gt", "ge", "sub", "isin", "compare", "combine", "identical", "dot"}
_ARRAYS = {"ndarray", "generic", "NDFrame", "Index"}  # base classes of NumPy's and pandas' data
_TEXT_NAMES = {"__name__", "__qualname__", "__doc__"}  # double-underscore names with text values


class Handle(Remote):
    """An object of the candidate that is not data."""

    def __init__(self, peer: WirePeer, number: int, bases: list[tuple[str, str]]) -> None:
        super().__init__(peer, number)
        object.__setattr__(self, "_bases", bases)
        object.__setattr__(self, "_subject", False)

    @property  # type: ignore[misc]  # read-only; isinstance reads it
    def __class__(self) -> type:
        for module, name in object.__getattribute__(self, "_bases"):
            kind = getattr(types, f"{name.title()}Type", None) if module == "builtins" else find_class(module, name)
            if kind is not None and not _is_data(kind):
                return kind
        return type(self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and ask(self, "is one", value) is True

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in _TEXT_NAMES) or name == "_typ":  # marks pandas objects
            raise AttributeError(name)
        value = ask(self, "attribute", name)
        if name in _DATA_METHODS and isinstance(value, Handle) and not object.__getattribute__(self, "_subject"):
            return NoArgumentMethod(value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "set attribute", name, value)

    def __getitem__(self, key: Any) -> Any:
        return ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        ask(self, "delete item", key)

    def __len__(self) -> int:
        return _exactly(int, ask(self, "length"))

    def __iter__(self) -> Iterator[Any]:
        iterator = ask(self, "iterate")
        return iterator if isinstance(iterator, Handle) else iter(iterator)

    def __next__(self) -> Any:
        return ask(self, "next")

    def __bool__(self) -> bool:
        return _exactly(bool, ask(self, "truth"))

    def __str__(self) -> str:
        return _exactly(str, ask(self, "text"))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __repr__(self) -> str:
        return _exactly(str, ask(self, "representation"))

    def __int__(self) -> int:
        return _exactly(int, ask(self, "int"))

    def __float__(self) -> float:
        return _exactly(float, ask(self, "float"))

    def __enter__(self) -> Any:
        return ask(self, "enter")

    def __exit__(self, *raised: object) -> None:
        ask(self, "exit")


class Callable(Handle):
    """A handle that can be called: a function or a class."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = ask(self, "call", arguments, named)
        is_class = ("builtins", "type") in object.__getattribute__(self, "_bases")
        return mark_subject(result) if is_class and object.__getattribute__(self, "_subject") else result


class Coroutine(Handle, collections.abc.Coroutine):
    """A handle that can be awaited; the candidate's process runs it to its end."""

    def send(self, value: Any) -> Any:
        raise StopIteration(ask(self, "await"))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        pass

    def __await__(self) -> Generator[Any, Any, Any]:
        return ask(self, "await")
        yield


class NoArgumentMethod:
    """A method of the candidate's object named like a method of data; it may only be called without arguments."""

    def __init__(self, method: Handle, name: str) -> None:
        self._method, self._name = method, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if arguments or named:
            raise TypeError(f"{self._name}() with arguments would run the candidate's own comparison")
        return self._method()  # type: ignore[operator]  # if it is not callable, this raises


def _is_data(kind: type) -> bool:
    """Whether values of a class cross as data, so that no handle is an instance of it."""
    return kind in _DATA or issubclass(kind, BaseException) or any(base.__name__ in _ARRAYS for base in kind.__mro__)


def mark_subject(value: Any) -> Any:
    """Mark a handle as the object under test: the tests use its name, or its class created it."""
    if isinstance(value, Handle):
        object.__setattr__(value, "_subject", True)
    return value


def _exactly(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the candidate's object returned {type(value).__name__} instead of {kind.__name__}")
    return value


def ask(handle: Handle, act: str, *arguments: Any) -> Any:
    """`WirePeer.ask`, after the candidate has applied the tests' changes of state: any act may run its code.

    StopIteration becomes RuntimeError, except from an iterator: it would end a loop of the tests (PEP 479).
    """
    peer = object.__getattribute__(handle, "_peer")
    try:
        if changes := mirror.state_changes():
            peer.ask("follow", None, changes)
        return peer.ask(act, handle, *arguments)
    except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
        if act == "next" and type(error) is StopIteration:
            raise
        raise RuntimeError(f"the candidate raised {type(error).__name__}") from error


def adopt(peer: WirePeer, number: int, description: tuple[Any, ...]) -> Handle:
    """A handle of an object that the candidate described by its ability and class names. Raises Violation."""
    ability, names = description
    if type(names) is not list or not all(type(name) is list and [*map(type, name)] == [str, str] for name in names):
        raise Violation("invalid class names")
    kind = {"callable": Callable, "awaitable": Coroutine}.get(ability, Handle)
    return kind(peer, number, [(module, name) for module, name in names])
