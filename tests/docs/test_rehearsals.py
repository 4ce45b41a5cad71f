"""The rehearsals that the how-to of clusters shows: their settings can work, and by the plan they fit their GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_collab.planning.memory import GIB, peak, plan_memory, read_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "cluster.md"
COMMAND = re.compile(r"^ +megatron-collab rehearse ((?:.*\\\n)*.*)$", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)[\w.]+=\S+")
SHOWN = [OPTION.findall(found) for found in COMMAND.findall(PAGE.read_text())]


def test_all_are_found() -> None:
    assert len(SHOWN) == 3


@pytest.mark.parametrize("options", SHOWN, ids=str)
def test_a_rehearsal_that_is_shown_fits(options: list[str]) -> None:
    config, shape = read_run(options)
    needed = [peak(stage) for stage in plan_memory(config, shape)]
    assert len(needed) == config.parallel.pp and max(needed) < 72 * GIB  # of 80, with temporaries and workspaces
