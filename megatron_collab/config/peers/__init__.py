"""Options of other systems in the words of this one: what each is called here, or why it is not needed or missing.

One file per system. `options`: their name to our option, or to a mapping (or a list of these) with

- `option`: our option, or several, which get the same value or one each of a list;
- `values`: our value for some of theirs; a text with "=" is settings, null is what happens here anyway;
- `compute`: our value from theirs (`value`), their other options and ours of rows before, from left to right;
- `if`: values of their other options without which the row is not used; an absent option is false;
- `sets`: the value is pairs of a name and a source; `keys`: their option with the names for the `*` of `option`.

A `*` in a name stands for any text, and in `option` for the same text. `not_needed` and `no_counterpart`: a sentence to
names. `renamed`: older names. `programs`: parts of a command line (`match`) or options (`keys`) by which a program is
known, our `command` for it, the `settings` that it amounts to, `defaults` of their options, and `options` that mean
something else in this program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent
_SYSTEMS = ("verl", "slime", "trl", "openrlhf", "collabllm", "launchers")
NOT_NEEDED, NO = "not needed", "no counterpart"


@dataclass(frozen=True)
class Target:
    """What an option of theirs is here; see the module."""

    options: tuple[str, ...] = ()
    values: Mapping[str, str | None] = field(default_factory=dict)
    compute: str | None = None
    condition: Mapping[str, str] = field(default_factory=dict)
    sets: bool = False
    keys: str | None = None

    def names(self) -> list[str]:
        """Every option of ours that the target may set."""
        settings = [part for value in self.values.values() if value and "=" in value for part in value.split()]
        return list(dict.fromkeys([*self.options, *(setting.partition("=")[0] for setting in settings)]))


@dataclass(frozen=True)
class OptionRow:
    """An option of theirs: its targets, or why there are none (`kind`: NOT_NEEDED or NO, with the sentence `why`)."""

    targets: tuple[Target, ...] = ()
    kind: str = ""
    why: str = ""

    def meaning(self) -> str:
        """Our options with their formulas; empty if there are none."""
        formulas = (f" ({target.compute})" if target.compute else "" for target in self.targets)
        pairs = zip(self.targets, formulas, strict=True)
        return " and ".join(name + formula for target, formula in pairs for name in target.names())


@dataclass(frozen=True)
class SystemProgram:
    """A program of a system."""

    match: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    command: str = "train"
    settings: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, OptionRow] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """Another system: its programs, and the rows of its options in the order in which they take effect."""

    name: str
    programs: tuple[SystemProgram, ...]
    rows: Mapping[str, OptionRow]
    renamed: Mapping[str, str]

    def current(self, name: str) -> str:
        """The name that an option has today; `name` without leading dashes and plus signs."""
        plain = plain_name(name)
        return self.renamed.get(plain, plain)

    def row(self, name: str, program: SystemProgram | None = None) -> OptionRow | None:
        """The row of an option, with its `*` replaced; None if the table has none."""
        current = self.current(name)
        for rows in (program.rows if program else {}, self.rows):
            if current in rows:
                return rows[current]
        pattern = next((pattern for pattern in self.rows if "*" in pattern and fnmatchcase(current, pattern)), None)
        return self.rows[pattern] and _starred(self.rows[pattern], pattern, current) if pattern else None

    def answer(self, name: str) -> str:
        """What an option is here, as the end of a sentence; empty if the table has no row for it."""
        rows = [self.row(name), *(program.rows.get(self.current(name)) for program in self.programs)]
        known = [row for row in rows if row]
        if meanings := [row.meaning() for row in known if row.targets]:  # one for each kind of program
            return f"is {' or '.join(dict.fromkeys(meanings))} here"
        kinds = {NOT_NEEDED: "is not needed", NO: "has no counterpart"}
        return f"{kinds[known[0].kind]}: {known[0].why}" if known else ""


def plain_name(name: str) -> str:
    """An option as the tables write it: of an argument --some-name, some_name."""
    return name.lstrip("+-").replace("-", "_")


def normal(value: Any) -> str:
    """A value as `values` and `if` compare it: in lower case, numbers in one spelling."""
    text = str(value).lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def hint(name: str) -> str:
    """ "; verl's NAME is OPTION here" for an option of other systems; empty if no table has it."""
    names_by_answer: dict[str, list[str]] = {}
    for system in systems():
        if answer := system.answer(name):
            names_by_answer.setdefault(answer, []).append(f"{system.name}'s")
    plain = name.lstrip("+")
    return "".join(f"; {', '.join(names)} {plain} {answer}" for answer, names in names_by_answer.items())


@cache
def systems() -> tuple[System, ...]:
    """The tables of all systems."""
    return tuple(_read(_FOLDER / f"{name}.yaml") for name in _SYSTEMS)


def _read(file: Path) -> System:
    table: dict[str, Any] = yaml.load(file.read_bytes(), yaml.CSafeLoader)
    rows = _rows(table["options"])
    for kind, section in ((NOT_NEEDED, "not_needed"), (NO, "no_counterpart")):
        for why, names in table[section].items():
            rows |= {name: OptionRow((), kind, why) for name in _flat(names)}
    return System(table["name"], tuple(map(_program, table["programs"])), rows, table.get("renamed", {}))


def _program(table: Mapping[str, Any]) -> SystemProgram:
    texts = {name: tuple(table.get(name, ())) for name in ("match", "keys", "settings")}
    defaults = {name: str(value) for name, value in table.get("defaults", {}).items()}
    return SystemProgram(
        **texts, command=table.get("command", "train"), defaults=defaults, rows=_rows(table.get("options", {}))
    )


def _rows(options: Mapping[str, Any]) -> dict[str, OptionRow]:
    targets = {name: entry if isinstance(entry, list) else [entry] for name, entry in options.items()}
    return {name: OptionRow(tuple(map(_target, entries))) for name, entries in targets.items()}


def _target(entry: str | Mapping[str, Any]) -> Target:
    table: Mapping[str, Any] = {"option": entry} if isinstance(entry, str) else entry
    options = table.get("option", [])
    return Target(
        (options,) if isinstance(options, str) else tuple(options),
        {normal(value): ours if ours is None else str(ours) for value, ours in table.get("values", {}).items()},
        table.get("compute"),
        {name: normal(value) for name, value in table.get("if", {}).items()},
        table.get("sets", False),
        table.get("keys"),
    )


def _starred(row: OptionRow, pattern: str, name: str) -> OptionRow:
    """The row of a pattern that ends with `*`, for one name."""
    if not row.targets:
        return row
    ending = name.removeprefix(pattern[:-1])
    named = (tuple(option.replace("*", ending) for option in target.options) for target in row.targets)
    return OptionRow(tuple(map(Target, named)))


def _flat(names: list[Any]) -> Iterator[str]:
    for name in names:
        if isinstance(name, list):
            yield from name
        else:
            yield name
