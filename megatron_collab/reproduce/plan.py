"""The programs that a study is, in the order they are run: arguments, folder, and what says that one is done."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from megatron_collab.config import Config, compose
from megatron_collab.reproduce.study import Study
from megatron_collab.runtime.process import FINISHED

TRAIN, EVALUATE, BUILD = (f"megatron_collab.{name}" for name in ("train", "evaluate", "build_dataset"))
PREPARE = "megatron_collab.commands"
SUMMARY = "summary.json"
BUILT, PILOT, CALLS = "build", "pilot", "calls"  # folders: of a task's conversations, of its pilot, of that one's calls
FOLDER = "$FOLDER"  # in what a study says: the folder of the task
_UNUSED = ("data.train=unused", "model.path=unused")  # what only training needs


@dataclass(frozen=True)
class Given:
    """What the command line says. `settings` come last, for every program.

    `build`: training data are made, not published. `pilot`: conversations of a task by which its cost is said.
    `record`, `replay`: where each program records its calls to language models, and from where it takes them.
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
    """One program, and its settings; where `calls` is given, of a run that records its calls there, or replays them.

    `rows`: the summary of the rows that it is trained on for `epochs`, there when it starts. `first`: what the others
    are planned by: a made world, problems, a pilot.
    """

    task: str
    name: str
    module: str
    folder: Path
    arguments: tuple[str, ...]
    config: Config = field(default_factory=Config, compare=False)
    calls: Path | None = None
    rows: Path | None = None
    epochs: float = 1.0
    first: bool = False

    @property
    def title(self) -> str:
        return f"{self.task}/{self.name}"

    @property
    def prepares(self) -> bool:
        """Whether it only writes rows: it is no run, and asks no model."""
        return self.module == PREPARE

    @property
    def done(self) -> bool:
        return (self.folder / (SUMMARY if self.prepares else FINISHED)).is_file()

    def steps(self, rows: int | None = None) -> int | None:
        """The steps that its epochs are, of so many rows (none: of those that are there).

        None where nothing is trained, or its settings say how many.
        """
        if self.rows is None or any(argument.startswith("train.steps=") for argument in self.arguments):
            return None
        kept: int = json.loads(self.rows.read_text())["kept"]["train"] if rows is None else rows
        return ceil(self.epochs * kept / self.config.train.prompts_per_step)

    def command(self) -> list[str]:
        """The arguments of Python, once its rows are there."""
        steps = self.steps()
        return ["-m", self.module, *self.arguments, *([f"train.steps={steps}"] if steps else [])]


def stages(study: Study, given: Given) -> list[Stage]:
    """All programs of the study: of every task what comes first, then task by task each arm, trained and evaluated.

    Raises ConfigError for settings that cannot be composed.
    """
    planned = [stage for name in given.tasks for stage in _Planned(study, given, name)]
    return sorted(planned, key=lambda stage: not stage.first)


def evaluation_of(arm: str) -> str:
    """The name of the stage that evaluates an arm."""
    return f"{arm}_eval"


def seed_names(seeds: int) -> list[str]:
    """The names of the sets that are evaluated: the same problems, each time sampled anew."""
    return [f"seed{number}" for number in range(seeds)]


def _asks(config: Config, module: str) -> bool:
    """Whether the settings name a language model that users, judges or the assistant ask."""
    if module == TRAIN and config.train.stage != "rl":
        return False
    assistant = config.assistant.model if module != TRAIN else None
    return bool(config.user.model or config.users or config.reward.judge.model or assistant)


class _Planned:
    """The programs of one task."""

    def __init__(self, study: Study, given: Given, name: str) -> None:
        self.study, self.given, self.name = study, given, name
        self.task, self.folder = study.tasks[name], given.out / name
        self._builds = given.build or self.task.build
        self._held_out = 0.0 if self.task.eval_source else self.task.eval_share
        needed = [*self._makers(), *given.arms]
        self._trained = list(dict.fromkeys(trained for arm in needed for trained in study.chain(arm)))

    def __iter__(self) -> Iterator[Stage]:
        own = [arm for arm in self._trained if self.study.arms[arm].rows is None]
        for stage in self._first(own):
            yield replace(stage, first=True)
        needed = list(dict.fromkeys(rows for arm in self._trained if (rows := self.study.arms[arm].rows)))
        if needed and self._builds:
            yield self._stage(BUILT, BUILD, *self.study.build, f"data.eval={self.folder}/rows_opened/train.jsonl")
            for rows in needed:
                yield self._rows(rows, f"{self.folder}/{BUILT}/built", 0.0)
        for arm in self.study.arms:
            if arm in self._trained and arm not in own:
                yield self._training(arm)
            if arm in self.given.arms:
                yield self._evaluation(arm)

    def _makers(self) -> list[str]:
        """Arms on which all others depend: they are trained on no rows of the task, whose world or model they make."""
        if not any(FOLDER in made for made in (self.task.source, self.given.model)):
            return []
        return [name for name, arm in self.study.arms.items() if arm.train and arm.rows is None]

    def _first(self, own: Sequence[str]) -> Iterator[Stage]:
        """`own`: arms that are trained on other data than the task's, which may make its world."""
        yield from map(self._training, own)
        if self._builds or not self.task.eval_source:
            yield self._rows("opened", self.task.source, self._held_out)
        if self.task.eval_source:
            yield self._rows("opened", self.task.eval_source, 0.0, "rows_eval")
        for rows in dict.fromkeys(self.study.arms[arm].rows for arm in self._trained) if not self._builds else ():
            if rows:
                yield self._rows(rows, self.task.source, self._held_out)
        if self.given.pilot:
            yield self._stage(PILOT, EVALUATE, f"model.path={self.given.model}", self._sets(1, self.given.pilot))

    def _stage(self, name: str, module: str, *own: str, rows: str | None = None, epochs: float = 1.0) -> Stage:
        folder = self.folder / name
        given = self.given
        settings = (*self.study.settings, *self.task.settings, *own, *given.settings, f"run.dir={folder}")
        arguments = tuple(map(self._put, settings))
        config = compose([*(() if module == TRAIN else _UNUSED), *arguments])
        calls = None
        if _asks(config, module) and (given.record or given.replay or name == PILOT):
            root = given.record or given.replay
            calls = root / self.name / name if root else folder / CALLS
            arguments = (*arguments, f"llm.{'replay' if given.replay else 'record'}={calls}")
        summary = self.folder / f"rows_{rows}" / SUMMARY if rows else None
        return Stage(self.name, name, module, folder, arguments, config, calls, summary, epochs)

    def _rows(self, to: str, source: str, eval_share: float, name: str = "") -> Stage:
        out = self.folder / (name or f"rows_{to}")
        options = ("--to", to, "--out", str(out), "--eval-share", str(eval_share))
        return Stage(self.name, out.name, PREPARE, out, ("prepare-data", self._put(source), *options))

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
            *arm.evaluate,
            self._sets(self.given.seeds, self.task.eval_tasks),
        )

    def _sets(self, seeds: int, tasks: int) -> str:
        options = {"tasks": tasks, **self.study.evaluate}
        said = ", ".join(f"{name}: {value}" for name, value in options.items())
        problems = "rows_eval/train.jsonl" if self.task.eval_source else "rows_opened/eval.jsonl"
        source = f"source: '{self.folder}/{problems}'"
        sets = (f"{{{source}, name: {name}, {said}}}" for name in seed_names(seeds))
        return f"data.eval=[{', '.join(sets)}]"

    def _model(self, arm: str | None) -> str:
        """The Hugging Face folder of what an arm has trained, or began with."""
        while arm is not None:
            if self.study.arms[arm].train:
                return f"{self.folder}/{arm}/hf"
            arm = self.study.arms[arm].start
        return self.given.model

    def _put(self, text: str) -> str:
        return text.replace(FOLDER, str(self.folder))
