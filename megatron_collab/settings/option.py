"""Declaration of an option: default, help, allowed values, and whether a resumed run may change it.

Constraints between several options are checked in launch/validate.py.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron_collab.settings.hint import nearest
from megatron_collab.settings.kind import Kind, is_blank

MANY = 10_000_000  # default upper bound of steps, tokens, seconds, …: more is a typing error
_KEY = "declared"  # in the metadata of a field


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line that names the setting and a fix."""


def require(holds: bool, message: str) -> None:
    """Raises ConfigError(message) unless `holds`."""
    if not holds:
        raise ConfigError(message)


class Shown:
    """Settings in messages: `f"{Shown(config).run.dir}"` is run.dir=VALUE; an unknown one raises AttributeError."""

    def __init__(self, value: Any, name: str = "") -> None:
        self._value, self._name = value, name

    def __getattr__(self, name: str) -> Shown:
        return Shown(getattr(self._value, name), f"{self._name}.{name}" if self._name else name)

    def __str__(self) -> str:
        return f"{self._name}={str(self._value).lower() if isinstance(self._value, bool) else self._value}"


# attribute of Declared: its wording, and the comparison of a value with the bound
_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


@dataclass(frozen=True)
class Declared:
    """Help and allowed values of an option; for a dict or a list, of every entry.

    `choices`: the allowed values; if `extensible`, package.module:Class is also allowed. Numbers must be finite and
    within the bounds, texts of the `kind` and, unless `blank`, not blank. `may_change`: a resumed run may change the
    value; `entries_may_change`: and add or remove keys. `instead_of`: the option that says the same in another unit; of
    the two the one that is set last holds (config/load.py).
    """

    help: str
    kind: Kind | None = None
    blank: bool = False
    choices: tuple[str, ...] = ()
    extensible: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    may_change: bool = False
    entries_may_change: bool = False
    instead_of: str = ""

    def allowed(self, separator: str = " | ") -> str:
        """The allowed values in words, e.g. "at least 0 and below 1"; empty if every value of the type is allowed."""
        if self.choices:
            return separator.join([*self.choices, *(["package.module:Class"] if self.extensible else [])])
        if self.kind:
            return self.kind.name
        bounds = ((words, getattr(self, name)) for name, (words, _) in _BOUNDS.items())
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)

    def fault(self, value: Any) -> str | None:
        """The reason why `value` is rejected; None if it is allowed."""
        if isinstance(value, int | float):
            if not math.isfinite(value):
                return f"must be finite and {self.allowed()}".removesuffix(" and ")
            bounds = ((getattr(self, name), holds) for name, (_, holds) in _BOUNDS.items())
            within = all(bound is None or holds(value, bound) for bound, holds in bounds)
            return None if within else f"must be {self.allowed()}"
        if isinstance(value, str) and not self.blank and is_blank(value):
            return "is blank; give a value"
        if isinstance(value, str) and self.kind:
            return self.kind.fault(value) or None
        if value is None or not self.choices or value in self.choices or (self.extensible and ":" in value):
            return None
        return f"choose one of {self.allowed(', ')}{nearest(value, self.choices)}"


def option(default: Any, help: str, **declaration: Any) -> Any:
    """A field of a dataclass of options; `declaration`: other fields of `Declared`.

    If a number has only a lower bound, its upper bound is MANY.
    """
    if {"ge", "gt"} & declaration.keys() and not {"le", "lt"} & declaration.keys():
        declaration["le"] = MANY
    metadata = {_KEY: Declared(help, **declaration)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


mutable = partial(option, may_change=True)  # a resumed run may change the value
# A time limit in seconds: what takes less than a tenth of a second needs none.
seconds = partial(mutable, ge=0.1)


def declared(options: Any, prefix: str = "") -> Iterator[tuple[str, Any, Declared]]:
    """Dotted name, value and declaration of each option of a dataclass, or of its class: then the value is the default.

    The declaration is empty if the field was not declared with `option`.
    """
    for spec in fields(options):
        if isinstance(options, type):
            value = spec.default_factory() if callable(spec.default_factory) else spec.default
        else:
            value = getattr(options, spec.name)
        if is_dataclass(value):
            yield from declared(value, f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name, value, spec.metadata.get(_KEY, Declared(""))


def check_declared(options: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first value of the dataclass `options` that its declaration rejects.

    A text is rejected if it is blank, unless it is '' by default. Free entries of a dict may be blank, its keys not.
    """
    kind: type = type(options)
    for name, value, rule in declared(options, prefix):
        if value == "" and name.removeprefix(prefix) in _blank_by_default(kind):  # not set
            continue
        entries = [(name, entry) for entry in (value if isinstance(value, list) else [value])]
        if isinstance(value, dict):
            for key in map(str, value):
                fault = "is blank; give a name" if is_blank(key) else rule.kind and rule.kind.key_fault(key)
                require(not fault, f"{name}.{_shown(key)}: {fault}")
            unchecked = dict if rule.kind or rule.choices else dict | str
            entries = [(f"{name}.{key}", entry) for key, entry in value.items() if not isinstance(entry, unchecked)]
        for setting, entry in entries:
            fault = rule.fault(entry)
            require(fault is None, f"{setting}={_shown(entry)}: {fault}")


@cache
def _blank_by_default(kind: type) -> frozenset[str]:
    """The options of a dataclass that are '' by default, by their dotted names."""
    return frozenset(name for name, default, _ in declared(kind) if default == "")


def check_written(options: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first file or folder of the dataclass `options` that this machine cannot write."""
    for name, value, rule in declared(options, prefix):
        if value and rule.kind and rule.kind.write_fault:
            check_path(name, value, rule.kind)


def check_path(setting: str, path: Path | str, kind: Kind) -> None:
    """Raises ConfigError, which names `setting`, if this machine cannot write `path`, of a written `kind`."""
    assert kind.write_fault
    label, fault = f"{setting}={_shown(path)}", Declared("", kind).fault(str(path))
    require(fault is None, f"{label}: {fault}")
    fault = kind.write_fault(str(path))
    require(not fault, f"{label}: cannot be used ({fault}); choose another {setting}")


def _shown(value: Any) -> str:
    """The value in one line, quoted if it is blank or has control characters, without the user of an address."""
    text = re.sub(r"(?<=://)[^/?#]*@", "***@", str(value))
    return repr(text) if is_blank(text) or not text.isprintable() else text
