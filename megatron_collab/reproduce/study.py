"""A study: the tasks, the assistants ("arms") that are compared on them, and what was published; studies/*.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_collab.config import ConfigError, nearest, require

STUDIES = Path(__file__).parent / "studies"


@dataclass(frozen=True)
class Column:
    """A number of the table: factor * mean score of a metric + offset, as the published table has it."""

    metric: str
    name: str
    factor: float = 1.0
    offset: float = 0.0

    def value(self, mean: float) -> float:
        return self.factor * mean + self.offset


@dataclass(frozen=True)
class StudyTask:
    """Where problems come from and what is measured.

    `source` has the goals and, unless conversations are to be built about them (`build`), the rows that arms are
    trained on. `eval_tasks` problems are evaluated at most: those of `eval_source`, or those of a share of the
    conversations of `source` (`eval_share`), which are held out.
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
    """An assistant: the model that the arm `start` (none: the study) leads to, trained by `train` where that is given.

    `rows`: what it is trained on, as `prepare-data --to` says, for `epochs`; none: what `train` names.
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
    """`settings` are of every program, `build` of that which makes conversations, `evaluate` of the evaluated sets."""

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
        """The arms that are trained on the way to this one, itself last."""
        arm = self.arms[name]
        before = self.chain(arm.start) if arm.start else []
        return [*before, name] if arm.train else before


def known() -> list[str]:
    return sorted(file.stem for file in STUDIES.glob("*.yaml"))


def read(given: str) -> Study:
    """The study of that name in studies, or in that file. Raises ConfigError."""
    file = Path(given) if given.endswith((".yaml", ".yml")) else STUDIES / f"{given}.yaml"
    message = f"STUDY={given}: there is none of that name; studies: {', '.join(known())}, or a file FILE.yaml"
    require(file.is_file(), message)
    try:
        found = yaml.safe_load(file.read_text())
        tasks = {name: _task(entry) for name, entry in found.pop("tasks").items()}
        arms = {name: _arm(entry) for name, entry in found.pop("arms").items()}
        study = Study(file.stem, tasks=tasks, arms=arms, **found)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"STUDY={given}: {file} is no study: {' '.join(str(error).split())}") from error
    for name, arm in arms.items():
        message = f"STUDY={given}: arms.{name}.from={arm.start}: no other arm above it is called so"
        require(arm.start is None or arm.start in list(arms)[: list(arms).index(name)], message)
    return study


def chosen(names: str | None, among: Mapping[str, Any], option: str) -> list[str]:
    """The names given as A,B, in the study's order; all where none are. Raises ConfigError."""
    if names is None:
        return list(among)
    given = [name.strip() for name in names.split(",") if name.strip()]
    for name in given:
        require(name in among, f"{option}={name}: the study has {', '.join(among)}{nearest(name, among)}")
    require(bool(given), f"{option}: names none; the study has {', '.join(among)}")
    return [name for name in among if name in given]


def _task(entry: dict[str, Any]) -> StudyTask:
    return StudyTask(**{**entry, "columns": tuple(Column(**column) for column in entry["columns"])})


def _arm(entry: dict[str, Any]) -> Arm:
    entry = dict(entry)
    return Arm(start=entry.pop("from", None), **entry)
