"""How an option is declared, once: default, help, allowed values, and whether a run may go on with another one.

What several options must fulfil together is checked in launch/validate.py.
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

MANY = 10_000_000  # steps, tokens, seconds, …: more of anything is a slip, where the option does not say otherwise
_KEY = "declared"  # in the metadata of a field


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line that names it and the way out."""


def require(holds: bool, message: str, config: Any = None) -> None:
    """Raises ConfigError(message) unless the condition holds; <run.dir> in it becomes run.dir=VALUE of `config`."""

    def given(found: re.Match[str]) -> str:
        value = operator.attrgetter(found[1])(config)
        return f"{found[1]}={str(value).lower() if isinstance(value, bool) else value}"

    if not holds:
        raise ConfigError(re.sub(r"<(\w+\.[\w.]+)>", given, message) if config else message)


# attribute of Declared: in words, and the comparison of a value with it
_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


@dataclass(frozen=True)
class Declared:
    """What an option may be. Of an option that is a dict or a list, every entry.

    `choices` are the allowed values; where it is `extensible`, so is `package.module:Class`. Numbers keep to the
    bounds, and are finite. `may_change`: a run may go on with another value; `comes`: with more or fewer entries too.
    """

    help: str
    choices: tuple[str, ...] = ()
    extensible: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    may_change: bool = False
    comes: bool = False

    def allowed(self, separator: str = " | ") -> str:
        """The allowed values in words, as "at least 0 and below 1"; empty where every value of the type is."""
        if self.choices:
            return separator.join([*self.choices, *(["package.module:Class"] if self.extensible else [])])
        bounds = ((words, getattr(self, name)) for name, (words, _) in _BOUNDS.items())
        return " and ".join(f"{words} {bound}" for words, bound in bounds if bound is not None)

    def fault(self, value: Any) -> str | None:
        """Why this value is refused; None where it is allowed."""
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
    """A field of a dataclass of options; the other arguments are the fields of `Declared`.

    A number with a lower bound alone is at most MANY.
    """
    if {"ge", "gt"} & declaration.keys() and not {"le", "lt"} & declaration.keys():
        declaration["le"] = MANY
    metadata = {_KEY: Declared(help, **declaration)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


mutable = partial(option, may_change=True)  # a run may go on with another value


def declared(options: Any, prefix: str = "") -> Iterator[tuple[str, Any, Declared]]:
    """Dotted name, value (a class's default) and declaration (empty if not by `option`) of a dataclass's options."""
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
    """Raises ConfigError for the first value of the dataclass `options` that its declaration refuses, or that is ''."""
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
