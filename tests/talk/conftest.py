"""A small run of the booking world: its checkpoints are real, its settings those of a run with rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_collab.config import Config, recorded
from megatron_collab.launch import validate
from tests.e2e.test_booking import Program

SFT = ["experiment=booking_sft", "train.steps=60", "train.checkpoint_every=30", "optim.warmup_steps=10"]
SFT += ["launch.nproc_per_node=1", "parallel.tp=1"]


def write_run(folder: Path, config: Config) -> Path:
    """A run's folder with these settings, which has no checkpoint yet."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A supervised run's checkpoints in the folder of a run that has users, tasks and metrics."""
    root = tmp_path_factory.mktemp("talk")
    program = Program([*SFT, f"run.dir={root}/sft", f"data.dir={root}/world"], root / "sft.log")
    try:
        program.finish()
    finally:
        program.end()
    model = f"model.path={root}/world/model"
    config = validate.load(["experiment=booking", f"run.dir={root}/rl", f"data.dir={root}/world", model])
    folder = write_run(root / "rl", config)
    for step in (30, 60):
        (folder / "checkpoints" / f"step_{step}").symlink_to(root / "sft" / "checkpoints" / f"step_{step}")
    return folder
