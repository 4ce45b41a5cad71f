"""Which checkpoints of a run are kept, and how they are named. Files only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_collab.checkpoint import storage
from megatron_collab.settings import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 to 50."""
    for step in range(10, 60, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_50\n")
    return tmp_path


def mark_best(run: Path, step: int) -> None:
    (run / "best.json").write_text(json.dumps({"metric": "eval/accuracy", "value": 0.5, "step": step}))


def steps(run: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step_")) for folder in (run / "checkpoints").glob("step_*"))


def test_the_best_checkpoint_is_kept_beside_the_newest(run: Path) -> None:
    mark_best(run, 20)
    storage.discard(run / "checkpoints", 50, keep=2)
    assert steps(run) == [20, 40, 50]
    mark_best(run, 50)
    storage.discard(run / "checkpoints", 50, keep=1)
    assert steps(run) == [50]


def test_a_checkpoint_is_found_by_all_its_names(run: Path) -> None:
    mark_best(run, 20)
    folder = run / "checkpoints"
    for path, step in {
        run: 50,
        folder: 50,
        folder / "step_30": 30,
        Path(f"{run}@30"): 30,
        Path(f"{run}@best"): 20,
        Path(f"{folder}@best"): 20,
    }.items():
        assert storage.find_checkpoint(path) == folder / f"step_{step}", path


def test_only_the_last_part_of_a_path_names_a_step_and_a_folder_of_that_name_wins(tmp_path: Path) -> None:
    runs = [tmp_path / "me@host" / "run", tmp_path / "run@30", tmp_path / "run"]
    for run in runs:
        for step in (30, 40):
            (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    for name, checkpoint in {
        "me@host/run": "me@host/run/checkpoints/step_40",
        "me@host/run@30": "me@host/run/checkpoints/step_30",
        "me@host/run/checkpoints/step_30": "me@host/run/checkpoints/step_30",
        "run@30": "run@30/checkpoints/step_40",
        "run@30@30": "run@30/checkpoints/step_30",
        "run@40": "run/checkpoints/step_40",
    }.items():
        assert storage.find_checkpoint(tmp_path / name) == tmp_path / checkpoint, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("@35", "no checkpoint of that step; it keeps those of the steps 50, 40, 30, 20, 10"),
        ("@best", "keeps no best checkpoint; train with train.keep_best"),
        ("@", "contains no checkpoint; give a run, RUN@STEP"),
        ("/nothing", "contains no checkpoint; give a run, RUN@STEP"),
        ("/nothing@3", "no checkpoint of that step; it has no checkpoints"),
    ],
)
def test_a_missing_checkpoint_is_reported_in_one_line(run: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        storage.find_checkpoint(Path(f"{run}{name}"))
    assert "\n" not in str(error.value)
