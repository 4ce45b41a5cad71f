"""The output of `--help` and `--cfg`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omegaconf import MISSING

from megatron_collab.config import CONF, CallConfig, groups, settings
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.sources import TrainingSource
from megatron_collab.reward import metrics
from megatron_collab.rollout import users
from megatron_collab.rollout.tools import toolbox
from megatron_collab.settings import declared

_PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_][\w./+-]*", re.IGNORECASE)  # needs no quotes for Hydra


def help_text(description: str | None, program: type[CallConfig]) -> str:
    """All settings of a program: options, groups, and the settings of sources, metrics, users and tools."""
    lines = [
        inspect.cleandoc(description or ""),
        "",
        "Options [default]; those marked * may change when a run resumes:",
    ]
    lines += _options(program)
    lines += ["", "Groups of settings, e.g. experiment=booking:"]
    for group, names in groups().items():
        lines += [_line(f"{group}={name}", _comment(group, name)) for name in names]
    source, entries = "data.train='[{source: PATH, weight: 2}]'", "data.eval='[{source: FILE, name: NAME}]'"
    metric_title = "Metrics, weighted by reward.weights.NAME; their settings are reward.metrics.NAME.SETTING:"
    user_title = "Users of the tasks, by a task's column user or by user.name; their settings are user.options.SETTING:"
    tools = (_line(name, toolbox.find_tool(name)(None).schemas[0]["description"]) for name in sorted(toolbox.TOOLS))
    sections = [  # by an option
        ("data.train", f"Settings of a source, e.g. {source}:", _options(TrainingSource)),
        ("data.eval", f"Entries of data.eval if it is a list, e.g. {entries}:", _options(EvaluationSet)),
        ("reward.weights", metric_title, _kinds(metrics.METRICS, metrics.find_metric)),
        ("user.name", user_title, _kinds(users.USERS, users.find_user)),
        ("rollout.tools", "Tools, as rollout.tools=[NAME]:", tools),
    ]
    options = {name for name, _, _ in declared(program)}
    for option, title, section in sections:
        lines += ["", title, *section] if option in options else []
    return "\n".join(lines)


def _kinds(names: Iterable[str], find: Callable[[str], Any]) -> Iterator[str]:
    """Lines of metrics or users with their settings."""
    for name in sorted(names):
        kind = find(name)
        yield _line(name, _summary(kind))
        yield from _options(kind.Options, "  .")


def composed_settings(overrides: Sequence[str], program: type[CallConfig]) -> str:
    """Every option of `program` as an override with the source of its value; required ones not set are marked."""
    lines = []
    for name, value, source in settings(overrides, program):
        text = f"{name}={'???' if value == MISSING else _value(value)}"
        lines.append(f"{text:60}  # {'required, not set' if value == MISSING else source}")
    return "\n".join(lines)


def _options(options: type, prefix: str = "") -> Iterator[str]:
    for name, default, rule in declared(options):
        allowed = f" ({rule.allowed()})" if rule.allowed() else ""
        shown = "required" if default == MISSING else _value(default)
        yield _line(f"{prefix}{name}{' *' if rule.may_change else ''}", f"{rule.help}{allowed} [{shown}]")


def _line(name: str, text: str) -> str:
    return f"  {name:34} {text}".rstrip()


def _value(value: Any) -> str:
    """The value in Hydra's syntax."""
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)


def _comment(group: str, name: str) -> str:
    """The first sentence of the comment at the beginning of a file in conf/."""
    lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
    text = " ".join(line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
    return text.partition(". ")[0].rstrip(":.")


def _summary(kind: type) -> str:
    """The first paragraph of the docstring of a class, or of its module if that is named like the class."""
    module = inspect.getmodule(kind)
    name = module.__name__.rpartition(".")[2].replace("_", "") if module else ""
    text = (module.__doc__ if kind.__name__.lower().startswith(name) else kind.__doc__) or ""
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
