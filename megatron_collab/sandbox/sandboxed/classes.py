"""Maps class names of the other process to classes of this one. No name causes an import or runs code."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

_STEERING = ("unittest", "_pytest", "sandboxed")  # packages whose classes steer the tests or what runs them
_stand_ins: dict[tuple[str, str], type[BaseException]] = {}


def names_of(kind: type) -> list[list[str]]:
    """Module and name of a class and of all its bases except `object`."""
    return [[str(base.__module__), str(base.__qualname__)] for base in kind.__mro__[:-1]]


def definition(module: str, name: str) -> Any:
    """The object of this qualified name in a module, or None if the module is not loaded or has none.

    The path leads through classes only, not through what a module imports, and runs no code.
    """
    source: Any = sys.modules.get(module)
    first, *parts = name.split(".")
    target = vars(source).get(first) if issubclass(type(source), types.ModuleType) else None
    for part in parts:
        target = vars(target).get(part) if _is_class(target) else None
    return target


def find_class(module: str, name: str) -> Any:
    """The class that is defined under this name, or None if it is none or steers the tests.

    The class decides, not the name: a module may hold another one's class under any name.
    """
    kind = definition(module, name)
    genuine = _is_class(kind) and (kind.__module__, kind.__qualname__) == (module, name)
    return kind if genuine and not any(map(_steers, kind.__mro__)) else None


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)  # not isinstance, which believes a handle's __class__


def _steers(kind: type) -> bool:
    """Whether what runs the tests would take an exception of this class for something else than a failure."""
    place = (str(kind.__module__), kind.__qualname__)
    return place[0].partition(".")[0] in _STEERING or place == ("asyncio.exceptions", "CancelledError")


def exception_type(names: Sequence[tuple[str, str]]) -> type[BaseException]:
    """The class of the first name if it is loaded here, else a stand-in of that name that derives from the next.

    Exceptions that steer, as unittest's SkipTest or asyncio's CancelledError, always get a stand-in.
    """
    if not names:
        return Exception
    (module, name), *bases = names
    kind = find_class(module, name)
    if kind is not None and issubclass(kind, BaseException):
        return kind
    if (module, name) not in _stand_ins:
        _stand_ins[module, name] = type(name, (exception_type(bases),), {"__module__": module})
    return _stand_ins[module, name]
