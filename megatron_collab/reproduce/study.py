"""A study (studies/*.yaml): its tasks, the assistants ("arms") compared on them, and the published results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron_collab.runtime import files
from megatron_collab.settings import ConfigError, nearest, require
from megatron_collab.settings.documents import parse_yaml
from megatron_collab.statistics import Estimate

_LONGEST = 1 << 20  # bytes of a study
STUDIES = Path(__file__).parent / "studies"
ROWS = ("sft", "dpo", "rl")  # kinds of training rows (`prepare-data --to`)
REWARD = "reward"  # the metric of a column that is the reward itself


@dataclass(frozen=True)
class Column:
    """A column of the table: factor * mean score of a metric + offset, the unit of the published table.

    `metric` may be `reward`. `set`: the evaluated set of the task, by default its first. `prompts`: settings that must
    name files with the authors' prompts; otherwise the column is the mean score itself, on our own scale.
    """

    metric: str
    name: str
    factor: float = 1.0
    offset: float = 0.0
    prompts: Sequence[str] = ()
    set: str = ""

    @property
    def key(self) -> str:
        """METRIC, or SET/METRIC if it names its set: its key in the task's reference."""
        return f"{self.set}/{self.metric}" if self.set else self.metric

    def lacks(self, settings: Sequence[str]) -> list[str]:
        """The settings of `prompts` that are not set to a file in `settings` (name=value; the last value counts)."""
        values = dict(setting.partition("=")[::2] for setting in settings)
        return [name for name in self.prompts if not Path(values.get(name) or "null").is_file()]

    def scaled(self, estimate: Estimate, published: bool, *, offset: bool = True) -> Estimate:
        """The estimate in the unit of the column. A difference has no `offset`."""
        return estimate.scaled(self.factor, self.offset * offset) if published else estimate


@dataclass(frozen=True)
class StudyTask:
    """Source of the problems, and what is measured.

    `source` has the goals, and the rows that arms are trained on; with `build`, conversations about the goals are built
    instead. The first `eval_tasks` problems of `eval_source`, or of each of `eval_sets` (by name), are evaluated.
    Without either, they are those of the share `eval_share` of `source` that is held out. `opened`: the user opens the
    evaluated and the built conversations; otherwise they begin with the messages of the source.

    `reference`: JSON file in $FOLDER with predicted rows, {title: {key of a column: mean score}}.
    """

    title: str
    source: str
    columns: Sequence[Column]
    settings: Sequence[str] = ()
    eval_source: str | None = None
    eval_sets: Mapping[str, str] = field(default_factory=dict)
    eval_share: float = 0.2
    eval_tasks: int = 200
    build: bool = False
    opened: bool = True
    reference: str | None = None

    @property
    def eval_sources(self) -> Mapping[str, str]:
        """The sources of the evaluated sets, by name; a single set has no name. Empty if a share is held out."""
        return {"": self.eval_source} if self.eval_source else self.eval_sets


@dataclass(frozen=True)
class Arm:
    """An assistant: the model of the arm `start` (None: of the study), trained with the settings `train` if any.

    `rows`: kind of training rows (see ROWS), used for `epochs`; None: the data that `train` names. `teacher`: the arm
    whose model teaches it (algo.teacher.model).
    """

    title: str
    start: str | None = None
    rows: str | None = None
    epochs: float = 1.0
    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()
    published: Mapping[str, Sequence[float]] = field(default_factory=dict)
    teacher: str | None = None


@dataclass(frozen=True)
class Study:
    """`settings` apply to every program, `build` to the one that builds conversations, `evaluate` to evaluated sets.

    Every arm is trained with `train_seeds` seeds (run.seed), of which the first is `first_seed`, or 0.
    The programs of a single training have no seed unless `first_seed` is set.
    """

    name: str
    title: str
    model: str
    tasks: Mapping[str, StudyTask]
    arms: Mapping[str, Arm]
    settings: Sequence[str] = ()
    train_seeds: int = 1
    first_seed: int | None = None
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    build: Sequence[str] = ()
    equal: Sequence[str] = ()
    different: Sequence[str] = ()

    def chain(self, name: str) -> list[str]:
        """The arms that are trained on the way to this one, with this one last."""
        arm = self.arms[name]
        before = [trained for needed in (arm.teacher, arm.start) if needed for trained in self.chain(needed)]
        return list(dict.fromkeys([*before, name] if arm.train else before))


def known() -> list[str]:
    return sorted(file.stem for file in STUDIES.glob("*.yaml"))


def read(name_or_file: str) -> Study:
    """The study with that name in studies/, or in that file. Raises ConfigError if there is none."""
    file = Path(name_or_file) if name_or_file.endswith((".yaml", ".yml")) else STUDIES / f"{name_or_file}.yaml"
    message = f"STUDY={name_or_file}: no such study; choose one of {', '.join(known())}, or give FILE.yaml"
    require(file.is_file(), message)
    try:
        content = parse_yaml(files.read_text(file, _LONGEST))
        tasks = {name: _task(entry) for name, entry in content.pop("tasks").items()}
        arms = {name: _arm(entry) for name, entry in content.pop("arms").items()}
        study = _typed(Study, name=file.stem, tasks=tasks, arms=arms, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"STUDY={name_or_file}: {file} is not a study: {' '.join(str(error).split())}") from error
    for name, arm in arms.items():
        for key, needed in (("from", arm.start), ("teacher", arm.teacher)):
            message = f"STUDY={name_or_file}: arms.{name}.{key}={needed}: no arm above it has that name"
            require(needed is None or needed in list(arms)[: list(arms).index(name)], message)
        message = f"STUDY={name_or_file}: arms.{name}.rows={arm.rows}: choose one of {', '.join(ROWS)}"
        require(arm.rows is None or arm.rows in ROWS, message)
        require(arm.epochs > 0, f"STUDY={name_or_file}: arms.{name}.epochs={arm.epochs}: must be more than 0")
    require(bool(tasks and arms), f"STUDY={name_or_file}: {file} has no tasks or no arms; give it some")
    for name, task in tasks.items():
        _check_sets(f"STUDY={name_or_file}: tasks.{name}", task)
    message = f"STUDY={name_or_file}: train_seeds={study.train_seeds}, first_seed={study.first_seed}"
    require(study.train_seeds >= 1 and (study.first_seed or 0) >= 0, f"{message}: must be at least 1 and 0")
    return study


def _check_sets(label: str, task: StudyTask) -> None:
    require(task.eval_tasks >= 1, f"{label}.eval_tasks={task.eval_tasks}: must be 1 or more")
    require(0 < task.eval_share < 1, f"{label}.eval_share={task.eval_share}: must be between 0 and 1")
    require(not (task.eval_source and task.eval_sets), f"{label}: has eval_source and eval_sets; leave one of them out")
    message = f"{label}.opened=false: there is no set to evaluate; give eval_source or eval_sets"
    require(task.opened or bool(task.eval_sources), message)
    for column in task.columns:
        message = f"{label}.columns: set={column.set}: not in eval_sets{nearest(column.set, task.eval_sets)}"
        require(not column.set or column.set in task.eval_sets, message)


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
            texts = list(value) if get_args(hint) == (str,) and isinstance(value, list) else []
            texts += value.values() if get_args(hint) == (str, str) and isinstance(value, dict) else []
            if not (isinstance(value, expected) and all(isinstance(text, str) for text in texts)):
                raise TypeError(f"{name}={value!r:.60} has another type")
    return kind(**values)
