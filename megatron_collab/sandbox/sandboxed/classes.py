"""Maps class names of the other process to classes of this one. No name causes an import or runs code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_STEERING = ("unittest", "sandboxed")
_stand_ins: dict[tuple[str, str], type[BaseException]] = {}


def names_of(kind: type) -> list[list[str]]:
    """Module and name of a class and of all its bases except `object`."""
    return [[str(base.__module__), str(base.__qualname__)] for base in kind.__mro__[:-1]]


def find_class(module: str, name: str) -> Any:
    """The object `name` of a module, or None if the module is not loaded or has none; runs no code of the module."""
    target = sys.modules.get(module)
    for part in name.split("."):
        target = vars(target).get(part) if target is not None and hasattr(target, "__dict__") else None
    return target


def exception_type(names: Sequence[tuple[str, str]]) -> type[BaseException]:
    """The class of the first name if it is loaded here, else a stand-in of that name that derives from the next.

    Exceptions of unittest, e.g. SkipTest, would steer the tests, and those of the sandbox what runs them: both always
    get a stand-in.
    """
    if not names:
        return Exception
    (module, name), *bases = names
    kind = find_class(module, name)
    if isinstance(kind, type) and issubclass(kind, BaseException) and module.partition(".")[0] not in _STEERING:
        return kind
    if (module, name) not in _stand_ins:
        _stand_ins[module, name] = type(name, (exception_type(bases),), {"__module__": module})
    return _stand_ins[module, name]
