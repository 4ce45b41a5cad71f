"""A small run of the booking world: its checkpoints are real, its settings those of a run with rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_collab.config import Config, recorded
from megatron_collab.launch import validate
from tests.program import Supervised


def write_run(folder: Path, config: Config) -> Path:
    """A run's folder with these settings, which has no checkpoint yet."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, supervised: Supervised) -> Path:
    """The supervised run's checkpoints in the folder of a run that has users, tasks and metrics."""
    root = tmp_path_factory.mktemp("talk")
    world = supervised.root / "world"
    model = f"model.path={world}/model"
    config = validate.load(["experiment=booking", f"run.dir={root}/rl", f"data.dir={world}", model])
    folder = write_run(root / "rl", config)
    for step in (20, 60):
        (folder / "checkpoints" / f"step_{step}").symlink_to(supervised.run / "checkpoints" / f"step_{step}")
    return folder
