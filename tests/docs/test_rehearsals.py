"""Runs on GPUs that how-tos show: their settings can work, by the plan they fit their GPUs, and all GPUs sample."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_collab.launch.servers import idle_gpus
from megatron_collab.planning.memory import GIB, peak, plan_memory, read_run

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
COMMAND = r"^ +(?:\.venv/bin/)?megatron-collab {} ((?:.*\\\n)*.*)$"
OPTION = re.compile(r"[\w.]+=.+")


def shown(page: str, command: str) -> list[list[str]]:
    """The options of every such command on the page."""
    commands = re.findall(COMMAND.format(command), (HOWTO / page).read_text(), re.MULTILINE)
    return [[word for word in shlex.split(options, comments=True) if OPTION.match(word)] for options in commands]


RUNS = [*shown("cluster.md", "rehearse"), *shown("gpu-node.md", "train")]
EVERY_RUN = [pytest.param(run, marks=[pytest.mark.slow] * (len(run) > 1)) for run in RUNS]  # slow: other models


def test_all_are_found() -> None:
    assert len(RUNS) == 4


@pytest.mark.processes
@pytest.mark.parametrize("options", EVERY_RUN, ids=str)
def test_a_run_that_is_shown_fits(options: list[str]) -> None:
    config, shape = read_run(options)
    assert not idle_gpus(config)
    needed = [peak(stage) for stage in plan_memory(config, shape)]
    assert len(needed) == config.parallel.pp and max(needed) < 72 * GIB  # of 79.6, with temporaries and workspaces
