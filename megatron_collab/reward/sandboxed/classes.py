"""Classes by their names: which class here is meant by one over there. No name has anything imported or run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_STEERING = ("unittest", "sandboxed")
_stand_ins: dict[tuple[str, str], type[BaseException]] = {}


def names_of(kind: type) -> list[list[str]]:
    """Module and name of a class and all that it derives from, but `object`."""
    return [[str(each.__module__), str(each.__qualname__)] for each in kind.__mro__[:-1]]


def find_class(module: str, name: str) -> Any:
    """What a module that is loaded already calls `name`, or None; no code of the module's runs."""
    found = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return found


def exception_type(names: Sequence[tuple[str, str]]) -> type[BaseException]:
    """The class of the first name if it is loaded here, else one of its name that derives from the next.

    One of unittest's would steer the tests, as SkipTest does, and one of ours what runs them: those get such a
    stand-in always.
    """
    if not names:
        return Exception
    (module, name), *bases = names
    found = find_class(module, name)
    if isinstance(found, type) and issubclass(found, BaseException) and module.partition(".")[0] not in _STEERING:
        return found
    if (module, name) not in _stand_ins:
        _stand_ins[module, name] = type(name, (exception_type(bases),), {"__module__": module})
    return _stand_ins[module, name]
