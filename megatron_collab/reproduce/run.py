"""Runs the programs of a study within its budget, and updates its page after each evaluation."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron_collab.reproduce import forecast
from megatron_collab.reproduce.page import page
from megatron_collab.reproduce.plan import EVALUATE, PILOT, Stage, StudyOptions
from megatron_collab.reproduce.results import effort_of, json_rows, results_of
from megatron_collab.reproduce.schedule import Programs, side_by_side
from megatron_collab.reproduce.study import Study
from megatron_collab.runtime import files, signals
from megatron_collab.runtime.process import EXIT_STOPPED
from megatron_collab.settings import ConfigError, require

logger = logging.getLogger(__name__)

STAGES, PAGE, RESULTS = "stages.json", "page.md", "results.json"


def shell_command(stage: Stage) -> str:
    """The command of a stage as typed in a shell."""
    return shlex.join(["python", *stage.command()])


def run(study: Study, options: StudyOptions, stages: Sequence[Stage], budget: float | None, jobs: int = 1) -> int:
    """Run the programs, at most `jobs` at once, each after those whose output it reads.

    When the pilots are done, a forecast is printed. Returns the exit code of the first program that fails, or 3 if
    `budget` (USD, all programs together) is spent. Each program gets all that is left of `budget`, which needs jobs=1.

    Raises ConfigError if the folder holds another study, or one that is running.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(options.out / ".lock", timeout=0):
            _check_same(options.out, stages)
            _name_unmoved(options.out, stages)
            return asyncio.run(_StudyRun(study, options, stages, budget, jobs).run())
    except Timeout:
        raise ConfigError(f"--out={options.out}: this study is running; choose another folder") from None


class _StudyRun:
    """A study while it runs. All of it is in one thread, so that its files have one writer."""

    def __init__(
        self, study: Study, options: StudyOptions, stages: Sequence[Stage], budget: float | None, jobs: int
    ) -> None:
        self.study, self.options, self.stages, self.budget, self.jobs = study, options, stages, budget, jobs
        self.programs = Programs()

    async def run(self) -> int:
        with self.programs.forwarding():
            if code := await self._run_all([stage for stage in self.stages if stage.first]):
                return code
            _print_forecast(self.options, self.stages, self.budget)
            if code := await self._run_all([stage for stage in self.stages if not stage.first]):
                return code
        _write(self.study, self.options, self.stages)
        logger.info(f"{self.options.out / PAGE}: the results")
        return 0

    async def _run_all(self, stages: Sequence[Stage]) -> int:
        prerequisites = {
            stage: [other for other in stages if other.chain == stage.chain and other.name in stage.reads]
            for stage in stages
        }
        return await side_by_side(prerequisites, self.jobs, self._run)

    async def _run(self, stage: Stage) -> int:
        """Run a program unless it is done. Returns its exit code, or the code of the reason not to start it."""
        label = f"{self.stages.index(stage) + 1}/{len(self.stages)} {stage.title}"
        if self.programs.received:
            return signals.exit_code(self.programs.received)
        if stage.done:
            logger.info(f"{label}: done")
            return 0
        limits = []
        if self.budget is not None and not stage.prepares:
            remaining = self.budget - self._spent()
            if remaining <= 0:
                return self._out_of_budget(label)
            limits = [f"llm.budget_usd={remaining + (_spent(stage) or 0.0)}"]  # includes its earlier starts
        log = stage.folder.with_name(f"{stage.folder.name}.log") if self.jobs > 1 else None
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        logger.info(f"{label}: {shell_command(stage)}{f' >> {log}' if log else ''}")
        started = time.monotonic()
        code = await self.programs.run([*stage.command(), *limits], log)
        if code < 0 and self.programs.received:  # it ended before it could handle the signal
            code = signals.exit_code(self.programs.received)
        _record(self.options.out, stage, (time.monotonic() - started) / 60)
        if stage.module == EVALUATE and not stage.first:  # no other program changes the tables, which take seconds
            _write(self.study, self.options, self.stages)
        if code and self.budget is not None and self._spent() >= self.budget:
            return self._out_of_budget(label)
        if code:
            place = f" (see {log})" if log else ""
            logger.error(f"{label}: ended with exit code {code}{place}; rerun the command to continue from here")
        return code

    def _spent(self) -> float:
        return sum(_spent(stage) or 0.0 for stage in self.stages)

    def _out_of_budget(self, label: str) -> int:
        reason = f"--budget={self.budget:g} is used up: {self._spent():.4g} USD"
        logger.error(f"{label}: {reason}; rerun with a larger one to continue from here")
        _write(self.study, self.options, self.stages)
        return EXIT_STOPPED


def _print_forecast(options: StudyOptions, stages: Sequence[Stage], budget: float | None) -> None:
    done = [stage for stage in stages if stage.name == PILOT]
    if not done or options.replay:
        return
    pilots = {stage.chain.task: forecast.read(stage) for stage in done}
    costs = forecast.program_costs(stages, pilots)
    total = forecast.total(costs.values())
    for title, cost in {**costs, "all": total}.items():
        logger.info(f"forecast of {title}: {cost}")
    spent = sum(_spent(stage) or 0.0 for stage in stages)
    if budget is not None and spent + total.usd > budget:
        hint = "the study ends when it is used up; rerun with a larger one to continue"
        logger.info(f"--budget={budget:g}: {spent:.4g} USD spent, about {total.usd:.4g} still needed; {hint}")


def _check_same(out: Path, stages: Sequence[Stage]) -> None:
    """Raises ConfigError if a finished program had other settings: the table would mix two studies."""
    programs = _read_programs(out)
    for stage in stages:
        if stage.done and (before := programs.get(stage.title)):
            same = _result_arguments(before["arguments"]) == _result_arguments(stage.arguments)
            message = "was run with other settings; choose another folder, or remove this one"
            require(same, f"--out={out}: {stage.title} {message}")


def _name_unmoved(out: Path, stages: Sequence[Stage]) -> None:
    """Log which programs of a task have no folder of a training seed, as those of an earlier version, and run again."""
    chains = {stage.chain.task: stage.chain for stage in reversed(stages)}  # the first of each task
    for task, chain in chains.items():
        names = [stage.name for stage in stages if stage.chain == chain and (out / task / stage.name).is_dir()]
        if names and not (out / chain.title).exists():
            hint = f"move them into {out / chain.title} by hand if their seed is {chain.seed}, else they run again"
            logger.warning(f"{out / task}: {', '.join(names)}: in no folder of a training seed; {hint}")


def _result_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments that affect results: all but limits, budgets and recordings (llm.*)."""
    return [argument for argument in arguments if not argument.startswith("llm.")]


def _spent(stage: Stage) -> float | None:
    """USD of all starts of a program so far; None if it has called no model."""
    file = stage.folder / "spend.json"
    return float(json.loads(file.read_text())["usd"]) if file.is_file() else None


def _read_programs(out: Path) -> dict[str, dict[str, Any]]:
    """Arguments and minutes (of all starts) of each program."""
    file = out / STAGES
    programs: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    return programs


def _record(out: Path, stage: Stage, minutes: float) -> None:
    programs = _read_programs(out)
    before = programs.get(stage.title, {}).get("minutes", 0.0)
    programs[stage.title] = {"arguments": stage.arguments, "minutes": before + minutes}
    files.replace(out / STAGES, json.dumps(programs, indent=1))


def _write(study: Study, options: StudyOptions, stages: Sequence[Stage]) -> None:
    pairs = [(task, arm) for task in options.tasks for arm in options.arms]
    results = {pair: results_of(study, options, *pair) for pair in pairs}
    efforts = {pair: effort_of(study, options, *pair) for pair in pairs}
    programs = _read_programs(options.out)
    costs = [
        (stage.title, programs[stage.title]["minutes"], _spent(stage)) for stage in stages if stage.title in programs
    ]
    files.replace(options.out / PAGE, page(study, options, results, efforts, costs))
    rows = json_rows(study, options, results, efforts)
    files.replace(options.out / RESULTS, json.dumps([*rows], indent=1))
