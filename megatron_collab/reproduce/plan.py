"""The programs of a study by chain, in the order they run: arguments, folder, and the file that marks one as done."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.config import BuildDatasetConfig, Config, EvaluateConfig, PlayConfig, compose_program
from megatron_collab.data.datasets import steps_of
from megatron_collab.launch.spec import RunSpec, building_spec, evaluation_spec, run_spec
from megatron_collab.reproduce.study import REWARD, Study
from megatron_collab.runtime.process import FINISHED
from megatron_collab.settings import nearest, require

TRAIN, EVALUATE, BUILD = (f"megatron_collab.{name}" for name in ("train", "evaluate", "synthesis.build_dataset"))
PREPARE = "megatron_collab.commands"
SUMMARY = "summary.json"
BUILT, PILOT, CALLS = "build", "pilot", "calls"  # folders: built conversations, a task's pilot, the pilot's calls
FOLDER = "$FOLDER"  # placeholder in a study's settings: the folder of the chain
# The class of the options of each program, and what settles them.
_PROGRAMS: Mapping[str, tuple[type[PlayConfig], Callable[[Any], RunSpec]]] = {
    TRAIN: (Config, run_spec),
    EVALUATE: (EvaluateConfig, evaluation_spec),
    BUILD: (BuildDatasetConfig, building_spec),
}


@dataclass(frozen=True)
class StudyOptions:
    """Options of the command line. `settings` come last in every program's arguments.

    `seeds`: repetitions of each problem; `train_seeds`: trainings of each arm. `build`: build training data instead of
    using published ones. `pilot`: conversations per task that the forecast is based on. `record`, `replay`: folder to
    which calls of language models are recorded, or from which they are answered.
    """

    out: Path
    tasks: Sequence[str]
    arms: Sequence[str]
    model: str
    seeds: int = 3
    train_seeds: int = 1
    build: bool = False
    pilot: int = 4
    record: Path | None = None
    replay: Path | None = None
    settings: Sequence[str] = ()


class Chain(NamedTuple):
    """The programs that share a folder: those of a task and a training seed.

    `title`: also its folder in --out. `seed`: run.seed of its programs; None: its default, in a study of one training.
    """

    task: str
    title: str
    seed: int | None


@dataclass(frozen=True)
class Stage:
    """One program and its settings. If `calls` is set, it records its model calls there or replays them.

    `config`: of the program's class. `rows`: summary of the rows that it is trained on; the file exists when the
    program starts. `first`: it runs before all others, which are planned from its output: a world, problems or
    a pilot. `reads`: names of the programs of its chain whose output it reads; a name without a program is ignored.
    """

    chain: Chain
    name: str
    module: str
    folder: Path
    arguments: tuple[str, ...]
    config: Any = field(default=None, compare=False)
    calls: Path | None = None
    rows: Path | None = None
    first: bool = False
    reads: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.chain.title}/{self.name}"

    @property
    def spec(self) -> RunSpec:
        """The settled settings of a run. Raises ConfigError."""
        return _PROGRAMS[self.module][1](self.config)

    @property
    def prepares(self) -> bool:
        """Whether it only writes rows: then it is no run and calls no model."""
        return self.module == PREPARE

    @property
    def calls_models(self) -> bool:
        """Whether its settings name a language model for users, judges or the assistant."""
        if self.prepares or (self.module == TRAIN and self.config.train.stage != "rl"):
            return False
        config, assistant = self.config, self.config.assistant.model if self.module != TRAIN else None
        return bool(config.user.model or config.users or config.reward.judge.model or assistant)

    @property
    def done(self) -> bool:
        return (self.folder / (SUMMARY if self.prepares else FINISHED)).is_file()

    def steps(self, rows: int | None = None) -> int:
        """Steps of a training, for that many rows (None: as many as its summary counts)."""
        train = self.config.train
        if self.rows is None or train.epochs is None:
            return train.steps
        row_count: int = json.loads(self.rows.read_text())["kept"]["train"] if rows is None else rows
        return steps_of(train.epochs, row_count, train.prompts_per_step)

    def command(self) -> list[str]:
        """The arguments of Python."""
        return ["-m", self.module, *self.arguments]


def chains(study: Study, options: StudyOptions, task: str) -> list[Chain]:
    """The chains of a task, one for each training seed.

    In a study of several trainings, or of which the first seed is set, each has its folder, also if only one is
    planned, so that others can be added.
    """
    if study.train_seeds == options.train_seeds == 1 and study.first_seed is None:
        return [Chain(task, task, None)]
    first = study.first_seed or 0
    return [Chain(task, f"{task}/seed{seed}", seed) for seed in range(first, first + options.train_seeds)]


def stages(study: Study, options: StudyOptions) -> list[Stage]:
    """All programs: those of all chains that are `first`, then by chain the training and evaluation of each arm.

    Raises ConfigError for settings that their program would refuse, and for columns that no evaluation measures.
    """
    planned = list[Stage]()
    for task in options.tasks:
        seeded = any(chain.seed is not None for chain in chains(study, options, task))
        for setting in options.settings:
            message = f"{setting}: the training seeds set it; leave it out, or give --first-seed"
            require(not (seeded and setting.startswith("run.seed=")), message)
        for number, chain in enumerate(chains(study, options, task)):
            planned += _ChainPlan(study, options, chain, options.pilot if number == 0 else 0)
    for stage in planned:
        if not stage.prepares and (play := stage.spec.play) and stage.module == EVALUATE:
            _check_columns(study, stage.chain.task, play.reward.metrics)
    return sorted(planned, key=lambda stage: not stage.first)


def _check_columns(study: Study, task: str, measured: Collection[str]) -> None:
    for metric in (column.metric for column in study.tasks[task].columns):
        message = f"STUDY={study.name}: tasks.{task}.columns: metric={metric}: is not measured"
        hint = f"{nearest(metric, measured)}; give it a weight, reward.weights.{metric}=0"
        require(metric == REWARD or metric in measured, message + hint)


def evaluation_of(arm: str) -> str:
    """The name of the stage that evaluates an arm."""
    return f"{arm}_eval"


def seed_names(seeds: int, eval_set: str = "") -> list[str]:
    """Names in data.eval of an evaluated set: the same problems, sampled again for each seed."""
    return [f"{eval_set}{'_' if eval_set else ''}seed{number}" for number in range(seeds)]


class _ChainPlan:
    """The programs of one chain. `pilot`: conversations of the task's pilot, 0 if there is none in this chain."""

    def __init__(self, study: Study, options: StudyOptions, chain: Chain, pilot: int) -> None:
        self.study, self.options, self.chain, self.pilot = study, options, chain, pilot
        self.task, self.folder = study.tasks[chain.task], options.out / chain.title
        self._builds = options.build or self.task.build
        self._held_out = 0.0 if self.task.eval_sources else self.task.eval_share
        arms = [*self._makers(), *options.arms]
        self._trained = list(dict.fromkeys(trained for arm in arms for trained in study.chain(arm)))

    def __iter__(self) -> Iterator[Stage]:
        independent = [arm for arm in self._trained if self._independent(arm)]
        earlier = list[str]()
        for stage in self._first(independent):
            yield replace(stage, first=True, reads=tuple(earlier))
            earlier.append(stage.name)
        needed = list(dict.fromkeys(rows for arm in self._trained if (rows := self.study.arms[arm].rows)))
        if needed and self._builds:
            goals = f"{self.folder}/rows_opened/train.jsonl" if self.task.opened else self.task.source
            yield self._stage(BUILT, BUILD, *self.study.build, f"data.eval={goals}")
            for rows in needed:
                yield replace(self._rows(rows, f"{self.folder}/{BUILT}/built", 0.0), reads=(BUILT,))
        for arm in self.study.arms:
            if arm in self._trained and arm not in independent:
                models = (
                    self._trained_arm(self.study.arms[arm].start),
                    self._trained_arm(self.study.arms[arm].teacher),
                )
                reads = f"rows_{self.study.arms[arm].rows}", *(model or "" for model in models)
                yield replace(self._training(arm), reads=reads)
            if arm in self.options.arms:
                yield replace(self._evaluation(arm), reads=(self._trained_arm(arm) or "",))

    def _makers(self) -> list[str]:
        """Arms that make the task's world or model: they train on none of its rows, and all others depend on them."""
        if not any(FOLDER in text for text in (self.task.source, self.options.model)):
            return []
        return [name for name, arm in self.study.arms.items() if arm.train and self._independent(name)]

    def _independent(self, name: str) -> bool:
        """Whether an arm is trained neither on the task's rows nor from another arm: it may make the world."""
        arm = self.study.arms[name]
        return arm.rows is None and arm.start is None

    def _first(self, independent: Sequence[str]) -> Iterator[Stage]:
        yield from map(self._training, independent)
        if self.task.opened and (self._builds or not self.task.eval_sources):
            yield self._rows("opened", self.task.source, self._held_out)
        for name, source in self.task.eval_sources.items() if self.task.opened else ():
            yield self._rows("opened", source, 0.0, _rows_eval(name))
        for rows in dict.fromkeys(self.study.arms[arm].rows for arm in self._trained) if not self._builds else ():
            if rows:
                yield self._rows(rows, self.task.source, self._held_out)
        if self.pilot:
            yield self._stage(PILOT, EVALUATE, f"model.path={self.options.model}", self._sets(1, self.pilot))

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
        limited = any(setting.startswith("train.steps=") for setting in (*overrides, *options.settings))
        settings = (
            *self.study.settings,
            *self.task.settings,
            *overrides,
            *options.settings,
            *([f"train.epochs={epochs:g}"] if rows and not limited else []),
            *last,
            *([f"run.seed={self.chain.seed}"] if self.chain.seed is not None else []),
            f"run.dir={folder}",
        )
        arguments = tuple(map(self._expand, settings))
        config = compose_program(_PROGRAMS[module][0], arguments)
        summary = self.folder / f"rows_{rows}" / SUMMARY if rows else None
        stage = Stage(self.chain, name, module, folder, arguments, config, None, summary)
        if not (stage.calls_models and (options.record or options.replay or name == PILOT)):
            return stage
        root = options.record or options.replay
        calls = root / stage.title if root else folder / CALLS
        recording = f"llm.{'replay' if options.replay else 'record'}={calls}"
        return replace(stage, arguments=(*arguments, recording), calls=calls)

    def _rows(self, to: str, source: str, eval_share: float, name: str = "") -> Stage:
        out = self.folder / (name or f"rows_{to}")
        options = ("--to", to, "--out", str(out), "--eval-share", str(eval_share))
        return Stage(self.chain, out.name, PREPARE, out, ("prepare-data", self._expand(source), *options))

    def _training(self, name: str) -> Stage:
        arm = self.study.arms[name]
        data = (f"data.train={self.folder}/rows_{arm.rows}/train.jsonl",) if arm.rows else ()
        model = () if self._independent(name) else (f"model.path={self._model(arm.start)}",)
        teacher = (f"algo.teacher.model={self._model(arm.teacher)}",) if arm.teacher else ()
        return self._stage(name, TRAIN, *model, *data, *arm.train, *teacher, rows=arm.rows, epochs=arm.epochs)

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
        sets = [
            f"{{source: '{source}', name: {name}, {settings}}}"
            for eval_set, source in self._problems().items()
            for name in seed_names(seeds, eval_set)
        ]
        return f"data.eval=[{', '.join(sets)}]"

    def _problems(self) -> Mapping[str, str]:
        """The files of the evaluated sets, by name."""
        sources = self.task.eval_sources
        if not self.task.opened:
            return sources
        files = {name: f"{self.folder}/{_rows_eval(name)}/train.jsonl" for name in sources}
        return files or {"": f"{self.folder}/rows_opened/eval.jsonl"}

    def _model(self, arm: str | None) -> str:
        """The Hugging Face folder that an arm has trained, or the model that it starts from."""
        trained = self._trained_arm(arm)
        return f"{self.folder}/{trained}/hf" if trained else self.options.model

    def _trained_arm(self, arm: str | None) -> str | None:
        """The arm, or the next one that it starts from, that is trained; None if it is the study's model."""
        while arm is not None and not self.study.arms[arm].train:
            arm = self.study.arms[arm].start
        return arm

    def _expand(self, text: str) -> str:
        return text.replace(FOLDER, str(self.folder))


def _rows_eval(eval_set: str) -> str:
    """The folder with the opened problems of an evaluated set."""
    return f"rows_eval_{eval_set}" if eval_set else "rows_eval"
