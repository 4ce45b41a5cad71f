"""Declaration of an option: default, help, allowed values, and whether a resumed run may change it.

Constraints between several options are checked in launch/validate.py.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

from megatron_collab.config.hint import nearest

MANY = 10_000_000  # default upper bound of steps, tokens, seconds, …: more is a typing error
_KEY = "declared"  # in the metadata of a field


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line that names the setting and a fix."""


def require(holds: bool, message: str, config: Any = None) -> None:
    """Raises ConfigError(message) unless `holds`; with `config`, <run.dir> in the message becomes run.dir=VALUE."""

    def expand(match: re.Match[str]) -> str:
        value = operator.attrgetter(match[1])(config)
        return f"{match[1]}={str(value).lower() if isinstance(value, bool) else value}"

    if not holds:
        raise ConfigError(re.sub(r"<(\w+\.[\w.]+)>", expand, message) if config else message)


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
    within the bounds. `may_change`: a resumed run may change the value; `entries_may_change`: and add or remove keys.
    """

    help: str
    choices: tuple[str, ...] = ()
    extensible: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    may_change: bool = False
    entries_may_change: bool = False

    def allowed(self, separator: str = " | ") -> str:
        """The allowed values in words, e.g. "at least 0 and below 1"; empty if every value of the type is allowed."""
        if self.choices:
            return separator.join([*self.choices, *(["package.module:Class"] if self.extensible else [])])
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
    """Raises ConfigError for the first value of the dataclass `options` that its declaration rejects, or that is ''."""
    defaults = {name: default for name, default, _ in declared(type(options), prefix)}
    for name, value, rule in declared(options, prefix):
        require(value != "" or defaults[name] == "", f"{name}=: is empty; give a value")
        if isinstance(value, dict):
            entries = [(f"{name}.{key}", entry) for key, entry in value.items() if not isinstance(entry, dict)]
        else:
            entries = [(name, entry) for entry in (value if isinstance(value, list) else [value])]
        for setting, entry in entries:
            fault = rule.fault(entry)
            require(fault is None, f"{setting}={entry}: {fault}")
