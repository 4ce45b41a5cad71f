"""The programs of a study in the order they run: arguments, folder, and the file that marks one as done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from megatron_collab.config import BuildDatasetConfig, Config, EvaluateConfig, PlayConfig, compose_program
from megatron_collab.launch.spec import RunSpec, building_spec, evaluation_spec, run_spec
from megatron_collab.reproduce.study import Study
from megatron_collab.runtime.process import FINISHED

TRAIN, EVALUATE, BUILD = (f"megatron_collab.{name}" for name in ("train", "evaluate", "synthesis.build_dataset"))
PREPARE = "megatron_collab.commands"
SUMMARY = "summary.json"
BUILT, PILOT, CALLS = "build", "pilot", "calls"  # folders: a task's built conversations, its pilot, the pilot's calls
FOLDER = "$FOLDER"  # placeholder in a study's settings: the folder of the task
# The class of the options of each program, and what settles them.
_PROGRAMS: Mapping[str, tuple[type[PlayConfig], Callable[[Any], RunSpec]]] = {
    TRAIN: (Config, run_spec),
    EVALUATE: (EvaluateConfig, evaluation_spec),
    BUILD: (BuildDatasetConfig, building_spec),
}


@dataclass(frozen=True)
class StudyOptions:
    """Options of the command line. `settings` come last in every program's arguments.

    `build`: build training data instead of using published ones. `pilot`: conversations per task that the forecast
    is based on. `record`, `replay`: folder to which calls of language models are recorded, or from which they are
    answered.
    """

    out: Path
    tasks: Sequence[str]
    arms: Sequence[str]
    model: str
    seeds: int = 3
    build: bool = False
    pilot: int = 4
    record: Path | None = None
    replay: Path | None = None
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Stage:
    """One program and its settings. If `calls` is set, it records its model calls there or replays them.

    `config`: of the program's class. `rows`: summary of the rows that it is trained on for `epochs`; the file exists
    when the program starts. `first`: other programs are planned from its output, which is a made world, problems or a
    pilot.
    """

    task: str
    name: str
    module: str
    folder: Path
    arguments: tuple[str, ...]
    config: Any = field(default=None, compare=False)
    calls: Path | None = None
    rows: Path | None = None
    epochs: float = 1.0
    first: bool = False

    @property
    def title(self) -> str:
        return f"{self.task}/{self.name}"

    @property
    def spec(self) -> RunSpec:
        """The settled settings of a run. Raises ConfigError."""
        return _PROGRAMS[self.module][1](self.config)

    @property
    def prepares(self) -> bool:
        """Whether it only writes rows: then it is no run and calls no model."""
        return self.module == PREPARE

    @property
    def done(self) -> bool:
        return (self.folder / (SUMMARY if self.prepares else FINISHED)).is_file()

    def steps(self, rows: int | None = None) -> int | None:
        """Training steps in its epochs, for that many rows (None: as many as its summary counts).

        None if nothing is trained, or if its arguments set train.steps.
        """
        if self.rows is None or any(argument.startswith("train.steps=") for argument in self.arguments):
            return None
        row_count: int = json.loads(self.rows.read_text())["kept"]["train"] if rows is None else rows
        return ceil(self.epochs * row_count / self.config.train.prompts_per_step)

    def command(self) -> list[str]:
        """The arguments of Python; its rows must exist."""
        steps = self.steps()
        return ["-m", self.module, *self.arguments, *([f"train.steps={steps}"] if steps else [])]


def stages(study: Study, options: StudyOptions) -> list[Stage]:
    """All programs of the study: those that are `first` of all tasks, then by task each arm's training and evaluation.

    Raises ConfigError for settings that cannot be composed.
    """
    planned = [stage for name in options.tasks for stage in _TaskPlan(study, options, name)]
    return sorted(planned, key=lambda stage: not stage.first)


def evaluation_of(arm: str) -> str:
    """The name of the stage that evaluates an arm."""
    return f"{arm}_eval"


def seed_names(seeds: int) -> list[str]:
    """Names of the evaluated sets: the same problems, sampled anew for each seed."""
    return [f"seed{number}" for number in range(seeds)]


def _asks(config: Any, module: str) -> bool:
    """Whether the settings name a language model for users, judges or the assistant."""
    if module == TRAIN and config.train.stage != "rl":
        return False
    assistant = config.assistant.model if module != TRAIN else None
    return bool(config.user.model or config.users or config.reward.judge.model or assistant)


class _TaskPlan:
    """The programs of one task."""

    def __init__(self, study: Study, options: StudyOptions, name: str) -> None:
        self.study, self.options, self.name = study, options, name
        self.task, self.folder = study.tasks[name], options.out / name
        self._builds = options.build or self.task.build
        self._held_out = 0.0 if self.task.eval_source else self.task.eval_share
        arms = [*self._makers(), *options.arms]
        self._trained = list(dict.fromkeys(trained for arm in arms for trained in study.chain(arm)))

    def __iter__(self) -> Iterator[Stage]:
        independent = [arm for arm in self._trained if self.study.arms[arm].rows is None]
        for stage in self._first(independent):
            yield replace(stage, first=True)
        needed = list(dict.fromkeys(rows for arm in self._trained if (rows := self.study.arms[arm].rows)))
        if needed and self._builds:
            yield self._stage(BUILT, BUILD, *self.study.build, f"data.eval={self.folder}/rows_opened/train.jsonl")
            for rows in needed:
                yield self._rows(rows, f"{self.folder}/{BUILT}/built", 0.0)
        for arm in self.study.arms:
            if arm in self._trained and arm not in independent:
                yield self._training(arm)
            if arm in self.options.arms:
                yield self._evaluation(arm)

    def _makers(self) -> list[str]:
        """Arms that make the task's world or model: they train on none of its rows, and all others depend on them."""
        if not any(FOLDER in text for text in (self.task.source, self.options.model)):
            return []
        return [name for name, arm in self.study.arms.items() if arm.train and arm.rows is None]

    def _first(self, independent: Sequence[str]) -> Iterator[Stage]:
        """`independent`: arms that are trained on other data than the task's rows and may make its world."""
        yield from map(self._training, independent)
        if self._builds or not self.task.eval_source:
            yield self._rows("opened", self.task.source, self._held_out)
        if self.task.eval_source:
            yield self._rows("opened", self.task.eval_source, 0.0, "rows_eval")
        for rows in dict.fromkeys(self.study.arms[arm].rows for arm in self._trained) if not self._builds else ():
            if rows:
                yield self._rows(rows, self.task.source, self._held_out)
        if self.options.pilot:
            yield self._stage(PILOT, EVALUATE, f"model.path={self.options.model}", self._sets(1, self.options.pilot))

    def _stage(
        self,
        name: str,
        module: str,
        *overrides: str,
        rows: str | None = None,
        epochs: float = 1.0,
        last: Sequence[str] = (),
    ) -> Stage:
        """`last`: settings that those of the command line do not change."""
        folder = self.folder / name
        options = self.options
        settings = (
            *self.study.settings,
            *self.task.settings,
            *overrides,
            *options.settings,
            *last,
            f"run.dir={folder}",
        )
        arguments = tuple(map(self._expand, settings))
        config = compose_program(_PROGRAMS[module][0], arguments)
        calls = None
        if _asks(config, module) and (options.record or options.replay or name == PILOT):
            root = options.record or options.replay
            calls = root / self.name / name if root else folder / CALLS
            arguments = (*arguments, f"llm.{'replay' if options.replay else 'record'}={calls}")
        summary = self.folder / f"rows_{rows}" / SUMMARY if rows else None
        return Stage(self.name, name, module, folder, arguments, config, calls, summary, epochs)

    def _rows(self, to: str, source: str, eval_share: float, name: str = "") -> Stage:
        out = self.folder / (name or f"rows_{to}")
        options = ("--to", to, "--out", str(out), "--eval-share", str(eval_share))
        return Stage(self.name, out.name, PREPARE, out, ("prepare-data", self._expand(source), *options))

    def _training(self, name: str) -> Stage:
        arm = self.study.arms[name]
        data = (f"data.train={self.folder}/rows_{arm.rows}/train.jsonl",) if arm.rows else ()
        model = (f"model.path={self._model(arm.start)}",) if arm.rows else ()
        return self._stage(name, TRAIN, *model, *data, *arm.train, rows=arm.rows, epochs=arm.epochs)

    def _evaluation(self, name: str) -> Stage:
        arm = self.study.arms[name]
        model = self._model(name if arm.train else arm.start)
        return self._stage(
            evaluation_of(name),
            EVALUATE,
            f"model.path={model}",
            self._sets(self.options.seeds, self.task.eval_tasks),
            last=arm.evaluate,  # they define the arm, such as base without a system prompt
        )

    def _sets(self, seeds: int, tasks: int) -> str:
        options = {"tasks": tasks, **self.study.evaluate}
        settings = ", ".join(f"{name}: {value}" for name, value in options.items())
        problems = "rows_eval/train.jsonl" if self.task.eval_source else "rows_opened/eval.jsonl"
        source = f"source: '{self.folder}/{problems}'"
        sets = (f"{{{source}, name: {name}, {settings}}}" for name in seed_names(seeds))
        return f"data.eval=[{', '.join(sets)}]"

    def _model(self, arm: str | None) -> str:
        """The Hugging Face folder that an arm has trained, or the model that it starts from."""
        while arm is not None:
            if self.study.arms[arm].train:
                return f"{self.folder}/{arm}/hf"
            arm = self.study.arms[arm].start
        return self.options.model

    def _expand(self, text: str) -> str:
        return text.replace(FOLDER, str(self.folder))
