"""Runs the programs of a study one after the other, within its budget, and keeps its page up to date."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron_collab import patches
from megatron_collab.config import ConfigError, require
from megatron_collab.reproduce.page import page
from megatron_collab.reproduce.plan import PILOT, Given, Stage
from megatron_collab.reproduce.results import measured
from megatron_collab.reproduce.study import Study
from megatron_collab.runtime import files
from megatron_collab.runtime.process import EXIT_STOPPED, die_with_parent

STAGES, PAGE, RESULTS = "stages.json", "page.md", "results.json"


def shown(stage: Stage) -> str:
    """Its command, as one would type it; what follows from rows that are not there yet is left out."""
    arguments = (
        stage.command() if stage.rows is None or stage.rows.is_file() else ["-m", stage.module, *stage.arguments]
    )
    return shlex.join(["python", *arguments])


def run(study: Study, given: Given, stages: Sequence[Stage], budget: float | None, gpu: Sequence[float]) -> int:
    """The exit code: of the first program that fails, 3 where `budget` (USD, of all programs together) is spent.

    Once the pilots are done a forecast is printed, for GPUs of so many TFLOP/s and TB/s (`gpu`).

    Raises ConfigError where the folder holds another study, or one that is running.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(given.out / ".lock", timeout=0):
            _check_same(given.out, stages)
            return _run(study, given, stages, budget, gpu)
    except Timeout:
        raise ConfigError(f"--out={given.out}: this study is running; choose another folder") from None


def _run(study: Study, given: Given, stages: Sequence[Stage], budget: float | None, gpu: Sequence[float]) -> int:
    for number, stage in enumerate(stages, 1):
        if not stage.first and stages[number - 2].first:
            _say_forecast(given, stages, budget, gpu)
        where = f"{number}/{len(stages)} {stage.title}"
        if stage.done:
            print(f"{where}: done", flush=True)
            continue
        limits = []
        if budget is not None and not stage.prepares:
            left = budget - sum(_spent(other) or 0.0 for other in stages)
            if left <= 0:
                return _out_of_budget(study, given, stages, where, budget)
            limits = [f"llm.budget_usd={left + (_spent(stage) or 0.0)}"]  # its earlier starts count
        print(f"{where}: {shown(stage)}", flush=True)
        started = time.monotonic()
        code = _program([*stage.command(), *limits])
        _record(given.out, stage, (time.monotonic() - started) / 60)
        _write(study, given, stages)
        if code:
            if budget is not None and sum(_spent(other) or 0.0 for other in stages) >= budget:
                return _out_of_budget(study, given, stages, where, budget)
            print(f"{where}: ended with exit code {code}; the same command goes on from here", file=sys.stderr)
            return code
    _write(study, given, stages)
    print(f"{given.out / PAGE}: our table beside the published one")
    return 0


def _say_forecast(given: Given, stages: Sequence[Stage], budget: float | None, gpu: Sequence[float]) -> None:
    done = [stage for stage in stages if stage.name == PILOT]
    if not done or given.replay:
        return
    patches.apply("megatron")  # which planning imports, and takes seconds
    from megatron_collab.models import hf_config
    from megatron_collab.planning.duration import Gpu
    from megatron_collab.planning.memory import described
    from megatron_collab.reproduce import forecast

    shape = hf_config.read(described(done[0].config.model.path))
    pilots = {stage.task: forecast.read(stage) for stage in done}
    found = forecast.expected(stages, pilots, shape, Gpu(*(1e12 * speed for speed in gpu)))
    for one in (*found, forecast.total(found)):
        hours = "" if one.hours is None else f", {one.hours:.1f} h"
        print(f"expected of {one.title}: {one.cost}{hours}", flush=True)
    spent = sum(_spent(stage) or 0.0 for stage in stages)
    more = forecast.total(found).cost.usd
    if budget is not None and spent + more > budget:
        said = "once it is spent the study ends, and the same command with a larger one goes on"
        print(f"--budget={budget:g}: {spent:.4g} USD are spent and about {more:.4g} to come; {said}", flush=True)


def _out_of_budget(study: Study, given: Given, stages: Sequence[Stage], where: str, budget: float) -> int:
    spent = sum(_spent(stage) or 0.0 for stage in stages)
    said = f"--budget={budget:g} is used up: {spent:.4g} USD; the same command with a larger one goes on from here"
    print(f"megatron-collab: {where}: {said}", file=sys.stderr)
    _write(study, given, stages)
    return EXIT_STOPPED


def _program(arguments: Sequence[str]) -> int:
    """The exit code of a program, to which signals of this process go, and which ends with it."""
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, preexec_fn=die_with_parent)
    before = {number: signal.signal(number, lambda given, _: process.send_signal(given)) for number in _FORWARDED}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _check_same(out: Path, stages: Sequence[Stage]) -> None:
    """ConfigError where a program is done that this study runs otherwise: its table would be of two studies."""
    for stage in stages:
        before = _recorded(out).get(stage.title, {}).get("arguments")
        message = f"--out={out}: {stage.title} is done under other settings; choose another folder, or remove that one"
        require(before is None or not stage.done or _own(before) == _own(stage.arguments), message)


def _own(arguments: Sequence[str]) -> list[str]:
    """Those that decide what comes out: not limits, budgets and where calls are recorded."""
    return [argument for argument in arguments if not argument.startswith("llm.")]


def _spent(stage: Stage) -> float | None:
    """USD of all starts of a program so far; None where it has asked no model."""
    file = stage.folder / "spend.json"
    return float(json.loads(file.read_text())["usd"]) if file.is_file() else None


def _recorded(out: Path) -> dict[str, dict[str, Any]]:
    """By program its arguments and the minutes of all its starts."""
    file = out / STAGES
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _record(out: Path, stage: Stage, minutes: float) -> None:
    found = _recorded(out)
    before = found.get(stage.title, {}).get("minutes", 0.0)
    found[stage.title] = {"arguments": stage.arguments, "minutes": before + minutes}
    files.replace(out / STAGES, json.dumps(found, indent=1))


def _write(study: Study, given: Given, stages: Sequence[Stage]) -> None:
    pairs = [(task, arm) for task in given.tasks for arm in given.arms]
    found = {pair: measured(given.out, study, *pair, given.seeds) for pair in pairs}
    ran = _recorded(given.out)
    took = [(stage.title, ran[stage.title]["minutes"], _spent(stage)) for stage in stages if stage.title in ran]
    files.replace(given.out / PAGE, page(study, given, found, took))
    rows: list[dict[str, Any]] = []
    for (task, arm), values in found.items():
        for column, value in zip(study.tasks[task].columns, values or (), strict=False):
            rows.append({"task": task, "arm": arm, "column": column.name, **(asdict(value) if value else {})})
    files.replace(given.out / RESULTS, json.dumps(rows, indent=1))
