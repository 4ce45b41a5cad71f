"""Writes docs/reference/options.md from the schema of the options: `python tools/make_docs.py`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from megatron_collab.config import (
    CONF,
    AllOptions,
    BuildDatasetConfig,
    Config,
    EvaluateConfig,
    UsersFromLogsConfig,
    groups,
)
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.sources import TrainingSource
from megatron_collab.reward import metrics
from megatron_collab.rollout import users
from megatron_collab.settings.option import Declared, declared
from megatron_collab.settings.schema import ServedConfig

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ROOT / "docs" / "reference" / "options.md"

_INTRODUCTION = """# Options

Written by `python tools/make_docs.py`; do not edit by hand.

An option is set on the command line as `NAME=VALUE`, or in a file of `conf/`. The last column names the programs that
have it, `all` for train, evaluate, build-dataset and users-from-logs. `megatron-collab PROGRAM --help` prints those of
a program, `megatron-collab train experiment=NAME --cfg` every value of a run and where it comes from. An option marked
`*` may change when a run resumes; the change is written to the run's `history.jsonl`. Any other change would mix two
runs and is refused.

A program ignores the options of other programs, so that the command of a training can be repeated with `evaluate`. Only
`assistant` and `build`, which a training would seem to have, are refused on its command line, `build` on that of
`evaluate`.
"""

_PROGRAMS = {
    program.program: {name for name, _, _ in declared(program)}
    for program in (Config, EvaluateConfig, BuildDatasetConfig, UsersFromLogsConfig)
}

_GROUPS = """
## Groups of settings: `conf/`

`experiment=NAME`, `algo=NAME` and `reward=NAME` each load one file. Options on the command line override it.

| setting | what it is |
|---|---|
"""

_SOURCES = """
## Settings of a source

`data.train` and `data.eval` are one source, or a list: `data.train='[{source: PATH, weight: 2}, PATH]'`.

"""

_EVALUATION = """
## Entries of `data.eval`

Of each set where `data.eval` is a list; see [Evaluate](../howto/evaluate.md).


"""

_SERVERS = """
## Entries of `servers`

Further models that the run serves, by names of your choice; see [Servers](../howto/servers.md).

"""

_METRICS = """
## Settings of metrics

`reward.metrics.NAME.SETTING=VALUE`, where NAME is a metric in `reward.weights`. What the metrics measure:
[Metrics](metrics.md).
"""

_USERS = """
## Settings of users

`user.options.SETTING=VALUE`, or `options` of one of `users`. What users do:
[Conversations](../explanation/conversations.md).
"""


def options_page() -> str:
    """docs/reference/options.md: options by group, the groups of conf/, then settings of sources, metrics and users."""
    page = _INTRODUCTION
    by_group = itertools.groupby(declared(AllOptions), key=lambda option: option[0].partition(".")[0])
    for group, options in by_group:
        page += f"\n## `{group}`\n\n| option | default | | programs |\n|---|---|---|---|\n"
        page += "".join(_row(*cells, _programs_of(name)) for name, cells in _cells(options))
    page += _GROUPS
    for group, names in groups().items():
        page += "".join(_row(f"`{group}={name}`", _comment(group, name)) for name in names)
    page += _SOURCES + _table(declared(TrainingSource))
    page += _EVALUATION + _table(declared(EvaluationSet))
    page += _SERVERS + _table(declared(ServedConfig))
    page += _METRICS
    for name in sorted(metrics.METRICS):
        if settings := list(declared(metrics.find_metric(name).Options)):
            page += f"\n### `{name}`\n\n" + _table(settings)
    page += _USERS
    for name in sorted(users.USERS):
        if settings := list(declared(users.find_user(name).Options)):
            page += f"\n### `{name}`\n\n" + _table(settings)
    return page


def _table(options: Iterable[tuple[str, Any, Declared]]) -> str:
    return "| option | default | |\n|---|---|---|\n" + "".join(_row(*cells) for _, cells in _cells(options))


def _cells(options: Iterable[tuple[str, Any, Declared]]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Of each option its name, and the cells of its row."""
    for name, default, rule in options:
        shown = "required" if default == MISSING else f"`{_value(default)}`"
        allowed = f" ({rule.allowed()})" if rule.allowed() else ""
        yield name, (f"`{name}`{' *' if rule.may_change else ''}", shown, f"{rule.help}{allowed}")


def _programs_of(option: str) -> str:
    names = [program for program, options in _PROGRAMS.items() if option in options]
    return "all" if len(names) == len(_PROGRAMS) else ", ".join(names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _value(default: Any) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)


def _comment(group: str, name: str) -> str:
    """The first sentence of the comment at the top of a file of conf/, up to an indented command."""
    text = (CONF / group / f"{name}.yaml").read_text().removeprefix("# @package _global_\n")
    lines = itertools.takewhile(lambda line: re.match(r"# \S", line), text.splitlines())
    return " ".join(line.removeprefix("# ") for line in lines).partition(". ")[0].rstrip(":.")


if __name__ == "__main__":
    OPTIONS.write_text(options_page())
