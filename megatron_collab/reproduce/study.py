"""A study (studies/*.yaml): its tasks, the assistants ("arms") compared on them, and the published results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from megatron_collab.config import ConfigError, nearest, require
from megatron_collab.runtime import files
from megatron_collab.statistics import Estimate

STUDIES = Path(__file__).parent / "studies"


@dataclass(frozen=True)
class Column:
    """A column of the table: factor * mean score of a metric + offset, the unit of the published table.

    `prompts`: settings that must name files of the user's, with the authors' prompts, for the published scale. Else the
    column is the mean score itself, on our own scale.
    """

    metric: str
    name: str
    factor: float = 1.0
    offset: float = 0.0
    prompts: Sequence[str] = ()

    def lacks(self, settings: Sequence[str]) -> list[str]:
        """Those of `prompts` that the settings (name=value, the last one counts) do not set to a file."""
        values = dict(setting.partition("=")[::2] for setting in settings)
        return [name for name in self.prompts if not Path(values.get(name) or "null").is_file()]

    def scaled(self, estimate: Estimate, published: bool, *, offset: bool = True) -> Estimate:
        """In the unit of the column; a difference has no `offset`."""
        return estimate.scaled(self.factor, self.offset * offset) if published else estimate


@dataclass(frozen=True)
class StudyTask:
    """Source of the problems, and what is measured.

    `source` has the goals, and the rows that arms are trained on unless conversations are built (`build`). At most
    `eval_tasks` problems are evaluated: those of `eval_source` if it is set, else those of a held-out share
    (`eval_share`) of the conversations of `source`.
    """

    title: str
    source: str
    columns: Sequence[Column]
    settings: Sequence[str] = ()
    eval_source: str | None = None
    eval_share: float = 0.2
    eval_tasks: int = 200
    build: bool = False


@dataclass(frozen=True)
class Arm:
    """An assistant: the model of the arm `start` (None: of the study), trained with the settings `train` if any.

    `rows`: kind of training rows (`prepare-data --to`), used for `epochs`; None: the data that `train` names.
    """

    title: str
    start: str | None = None
    rows: str | None = None
    epochs: float = 1.0
    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()
    published: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """`settings` apply to every program, `build` to the one that builds conversations, `evaluate` to evaluated sets."""

    name: str
    title: str
    model: str
    tasks: Mapping[str, StudyTask]
    arms: Mapping[str, Arm]
    settings: Sequence[str] = ()
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    build: Sequence[str] = ()
    equal: Sequence[str] = ()
    different: Sequence[str] = ()

    def chain(self, name: str) -> list[str]:
        """The arms that are trained on the way to this one, with this one last."""
        arm = self.arms[name]
        before = self.chain(arm.start) if arm.start else []
        return [*before, name] if arm.train else before


def known() -> list[str]:
    return sorted(file.stem for file in STUDIES.glob("*.yaml"))


def read(name_or_file: str) -> Study:
    """The study with that name in studies/, or in that file. Raises ConfigError if there is none."""
    file = Path(name_or_file) if name_or_file.endswith((".yaml", ".yml")) else STUDIES / f"{name_or_file}.yaml"
    message = f"STUDY={name_or_file}: no such study; choose one of {', '.join(known())}, or give FILE.yaml"
    require(file.is_file(), message)
    try:
        content = yaml.safe_load(files.read_text(file))
        tasks = {name: _task(entry) for name, entry in content.pop("tasks").items()}
        arms = {name: _arm(entry) for name, entry in content.pop("arms").items()}
        study = _typed(Study, name=file.stem, tasks=tasks, arms=arms, **content)
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"STUDY={name_or_file}: {file} is not a study: {' '.join(str(error).split())}") from error
    for name, arm in arms.items():
        message = f"STUDY={name_or_file}: arms.{name}.from={arm.start}: no arm above it has that name"
        require(arm.start is None or arm.start in list(arms)[: list(arms).index(name)], message)
    require(bool(tasks and arms), f"STUDY={name_or_file}: {file} has no tasks or no arms; give it some")
    return study


def select(names: str | None, among: Mapping[str, Any], option: str) -> list[str]:
    """The names in `names` (A,B) in the study's order; all if it is None. Raises ConfigError if one is unknown."""
    if names is None:
        return list(among)
    selection = [name.strip() for name in names.split(",") if name.strip()]
    for name in selection:
        require(name in among, f"{option}={name}: the study has {', '.join(among)}{nearest(name, among)}")
    require(bool(selection), f"{option}: is empty; the study has {', '.join(among)}")
    return [name for name in among if name in selection]


def _task(entry: dict[str, Any]) -> StudyTask:
    return _typed(StudyTask, **{**entry, "columns": [_typed(Column, **column) for column in entry["columns"]]})


def _arm(entry: dict[str, Any]) -> Arm:
    entry = dict(entry)
    return _typed(Arm, start=entry.pop("from", None), **entry)


_KINDS: dict[Any, Any] = {Sequence: list, Mapping: dict, float: (int, float)}  # in YAML


def _typed[Kind](kind: type[Kind], **values: Any) -> Kind:
    """An instance of the dataclass `kind`. Raises TypeError if a value has another type than its field."""
    for name, hint in get_type_hints(kind).items():
        if name in values:
            value, expected = values[name], _KINDS.get(get_origin(hint) or hint, hint)
            texts = value if get_args(hint) == (str,) and isinstance(value, list) else []
            if not (isinstance(value, expected) and all(isinstance(text, str) for text in texts)):
                raise TypeError(f"{name}={value!r:.60} has another type")
    return kind(**values)
