"""Runs the programs of a study one after the other within its budget, and updates its page after each."""

from __future__ import annotations

import json
import logging
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron_collab.config import ConfigError, require
from megatron_collab.reproduce import forecast
from megatron_collab.reproduce.page import page
from megatron_collab.reproduce.plan import PILOT, Stage, StudyOptions
from megatron_collab.reproduce.results import json_rows, results_of
from megatron_collab.reproduce.study import Study
from megatron_collab.runtime import files
from megatron_collab.runtime.process import EXIT_STOPPED, die_with_parent

logger = logging.getLogger(__name__)

STAGES, PAGE, RESULTS = "stages.json", "page.md", "results.json"


def shell_command(stage: Stage) -> str:
    """The command of a stage as typed in a shell, without train.steps if the rows it is computed from do not exist."""
    arguments = (
        stage.command() if stage.rows is None or stage.rows.is_file() else ["-m", stage.module, *stage.arguments]
    )
    return shlex.join(["python", *arguments])


def run(study: Study, options: StudyOptions, stages: Sequence[Stage], budget: float | None) -> int:
    """Returns the exit code of the first program that fails, or 3 if `budget` (USD, all programs together) is spent.

    When the pilots are done, a forecast is printed.

    Raises ConfigError if the folder holds another study, or one that is running.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(options.out / ".lock", timeout=0):
            _check_same(options.out, stages)
            return _run(study, options, stages, budget)
    except Timeout:
        raise ConfigError(f"--out={options.out}: this study is running; choose another folder") from None


def _run(study: Study, options: StudyOptions, stages: Sequence[Stage], budget: float | None) -> int:
    for number, stage in enumerate(stages, 1):
        if not stage.first and stages[number - 2].first:
            _print_forecast(options, stages, budget)
        label = f"{number}/{len(stages)} {stage.title}"
        if stage.done:
            logger.info(f"{label}: done")
            continue
        limits = []
        if budget is not None and not stage.prepares:
            remaining = budget - sum(_spent(other) or 0.0 for other in stages)
            if remaining <= 0:
                return _out_of_budget(study, options, stages, label, budget)
            limits = [f"llm.budget_usd={remaining + (_spent(stage) or 0.0)}"]  # includes its earlier starts
        logger.info(f"{label}: {shell_command(stage)}")
        started = time.monotonic()
        code = _program([*stage.command(), *limits])
        _record(options.out, stage, (time.monotonic() - started) / 60)
        _write(study, options, stages)
        if code:
            if budget is not None and sum(_spent(other) or 0.0 for other in stages) >= budget:
                return _out_of_budget(study, options, stages, label, budget)
            logger.error(f"{label}: ended with exit code {code}; rerun the command to continue from here")
            return code
    _write(study, options, stages)
    logger.info(f"{options.out / PAGE}: our results next to the published ones")
    return 0


def _print_forecast(options: StudyOptions, stages: Sequence[Stage], budget: float | None) -> None:
    done = [stage for stage in stages if stage.name == PILOT]
    if not done or options.replay:
        return
    pilots = {stage.task: forecast.read(stage) for stage in done}
    costs = forecast.program_costs(stages, pilots)
    total = forecast.total(costs.values())
    for title, cost in {**costs, "all": total}.items():
        logger.info(f"forecast of {title}: {cost}")
    spent = sum(_spent(stage) or 0.0 for stage in stages)
    if budget is not None and spent + total.usd > budget:
        hint = "the study ends when it is used up; rerun with a larger one to continue"
        logger.info(f"--budget={budget:g}: {spent:.4g} USD spent, about {total.usd:.4g} still needed; {hint}")


def _out_of_budget(study: Study, options: StudyOptions, stages: Sequence[Stage], label: str, budget: float) -> int:
    spent = sum(_spent(stage) or 0.0 for stage in stages)
    reason = f"--budget={budget:g} is used up: {spent:.4g} USD; rerun with a larger one to continue from here"
    logger.error(f"{label}: {reason}")
    _write(study, options, stages)
    return EXIT_STOPPED


def _program(arguments: Sequence[str]) -> int:
    """Run a program and return its exit code. It gets the signals of this process, and ends if this process ends."""
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, preexec_fn=die_with_parent)
    before = {number: signal.signal(number, lambda received, _: process.send_signal(received)) for number in _FORWARDED}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _check_same(out: Path, stages: Sequence[Stage]) -> None:
    """Raises ConfigError if a finished program had other settings: the table would mix two studies."""
    for stage in stages:
        before = _read_programs(out).get(stage.title, {}).get("arguments")
        message = f"--out={out}: {stage.title} was run with other settings; choose another folder, or remove this one"
        require(
            before is None or not stage.done or _result_arguments(before) == _result_arguments(stage.arguments), message
        )


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
    programs = _read_programs(options.out)
    costs = [
        (stage.title, programs[stage.title]["minutes"], _spent(stage)) for stage in stages if stage.title in programs
    ]
    files.replace(options.out / PAGE, page(study, options, results, costs))
    files.replace(options.out / RESULTS, json.dumps([*json_rows(study, results)], indent=1))
