"""How an option is declared, once: default, help, allowed values, and whether a run may go on with another one.

`check_declared` is the validator that reads the declarations; what several options must fulfil together is checked in
launch/validate*.py.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn

_KEY = "declared"  # in the metadata of a field


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line that names it and the way out."""


def require(holds: bool, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds."""
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True)
class Declared:
    """What an option may be. Of an option that is a dict or a list, every entry.

    `choices` are the allowed values; where it is `extensible`, so is `package.module:Class`. Numbers keep to the
    bounds, and are finite. `may_change`: a run may go on with another value.
    """

    help: str
    choices: tuple[str, ...] = ()
    extensible: bool = False
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    may_change: bool = False

    def allowed(self) -> str:
        """The allowed values in words, as "from 0 to 1"; empty where every value of the type is."""
        if self.choices:
            return " | ".join([*self.choices, *(["package.module:Class"] if self.extensible else [])])
        low, high = self.ge if self.gt is None else self.gt, self.le if self.lt is None else self.lt
        if low is None or high is None:
            texts = {"{} or greater": self.ge, "greater than {}": self.gt, "at most {}": self.le, "below {}": self.lt}
            return next((text.format(bound) for text, bound in texts.items() if bound is not None), "")
        return f"{'from' if self.gt is None else 'above'} {low} to {'' if self.lt is None else 'below '}{high}"

    def fault(self, value: Any) -> str | None:
        """Why this value is refused; None where it is allowed."""
        if value is None or isinstance(value, bool):
            return None
        if isinstance(value, int | float):
            if not math.isfinite(value):
                return f"must be a finite number {self.allowed()}".rstrip()
            bounds = (
                (self.ge, lambda bound: value >= bound),
                (self.gt, lambda bound: value > bound),
                (self.le, lambda bound: value <= bound),
                (self.lt, lambda bound: value < bound),
            )
            return (
                None if all(bound is None or holds(bound) for bound, holds in bounds) else f"must be {self.allowed()}"
            )
        if not self.choices or value in self.choices or (self.extensible and ":" in str(value)):
            return None
        also = ", or package.module:Class" if self.extensible else ""
        return f"choose one of {', '.join(self.choices)}{also}{nearest(str(value), self.choices)}"


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    extensible: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    may_change: bool = False,
) -> Any:
    """A field of a dataclass of options, with its declaration (see `Declared`)."""
    metadata = {_KEY: Declared(help, tuple(choices), extensible, ge, gt, le, lt, may_change)}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(options: Any, prefix: str = "") -> Iterator[tuple[str, Any, Declared]]:
    """Dotted name, value and declaration of every option in a dataclass: the defaults of a class, an instance's values.

    Fields that are not made by `option` have an empty declaration.
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
    """Raises ConfigError for the first value of the dataclass `options` that its declaration refuses."""
    for name, value, rule in declared(options, prefix):
        entries: Iterable[tuple[str, Any]] = [(name, value)]
        if isinstance(value, dict):
            entries = [(f"{name}.{key}", entry) for key, entry in value.items() if not isinstance(entry, dict)]
        elif isinstance(value, list):
            entries = [(name, entry) for entry in value]
        for setting, entry in entries:
            fault = rule.fault(entry)
            require(fault is None, f"{setting}={entry}: {fault}")


def nearest(value: str, options: Iterable[str], cutoff: float = 0.5) -> str:
    """ "; the nearest is NAME" for a mistyped `value`; empty where no option is similar."""
    found = difflib.get_close_matches(value, list(options), n=1, cutoff=cutoff)
    return f"; the nearest is {found[0]}" if found else ""


class ArgumentParser(argparse.ArgumentParser):
    """Refuses in one line, with exit code 2, where argparse would also print the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"megatron-collab: {message} (all options: --help)\n")
