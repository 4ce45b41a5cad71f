"""A run that starts again from a checkpoint is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_collab.actor import model as policies
from megatron_collab.actor.actor import Actor
from megatron_collab.actor.checkpoint import Checkpoints
from megatron_collab.config import Config
from megatron_collab.types import Batch
from tests.actor.checkpoint_worker import LAYOUTS
from tests.actor.ranks import make_config, make_model, make_samples, run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(folder / "model")
    run_ranks("checkpoint_worker", 2, ["first", str(folder)], groups=len(LAYOUTS))
    run_ranks("checkpoint_worker", 2, ["second", str(folder)], groups=len(LAYOUTS) + 1)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_is_undisturbed_bit_for_bit(folder: Path, layout: str) -> None:
    first, second = (json.loads((folder / f"{layout}-{life}.json").read_text()) for life in ("first", "second"))
    assert second == first
    for rank in range(2):
        undisturbed, resumed = (np.load(folder / f"{layout}-{life}-rank{rank}.npz") for life in ("first", "second"))
        assert resumed.files == undisturbed.files
        assert {"python", "numpy", "torch"} < set(resumed.files) and len(resumed.files) > 30
        for name in undisturbed.files:
            np.testing.assert_array_equal(resumed[name], undisturbed[name], err_msg=name)


def test_another_layout_goes_on_from_it(folder: Path) -> None:
    undisturbed, resharded = (
        json.loads((folder / name).read_text()) for name in ("tp2-first.json", "resharded-second.json")
    )
    for found, expected in zip(resharded, undisturbed, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_checkpoints_are_discarded(folder: Path, layout: str) -> None:
    assert {file.name for file in (folder / layout).iterdir()} == {"step_2", "step_3", "latest"}
    assert (folder / layout / "latest").read_text() == "step_3"


@pytest.fixture(scope="module")
def saved(folder: Path, one_rank: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Actor]:
    """Checkpoints of steps 1 and 2, and the actor that saved them."""
    config = make_config(folder / "model", {"algo.kl_coef": 0.0})
    policy, _ = policies.load(config)
    actor = Actor(config, policy)
    checkpoints = Checkpoints(tmp_path_factory.mktemp("saved"), keep=2)
    for step in (1, 2):
        actor.update(Batch(make_samples(4, step)))
        checkpoints.save(step, actor, {"saved": step})
    return checkpoints.folder, actor


@pytest.fixture
def copied(saved: tuple[Path, Actor], tmp_path: Path) -> tuple[Checkpoints, Actor]:
    return Checkpoints(Path(shutil.copytree(saved[0], tmp_path / "checkpoints")), keep=2), saved[1]


def test_a_torn_checkpoint_is_ignored_with_a_message(copied: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints, actor = copied
    (checkpoints.folder / "step_2" / "state.json").unlink()
    assert checkpoints.load_latest(actor) == (1, {"saved": 1})
    assert actor.step == 1
    assert "step_2: has no state.json" in capsys.readouterr().err


def test_killed_between_the_two_renames(copied: tuple) -> None:
    checkpoints, actor = copied
    (checkpoints.folder / "latest").write_text("step_1")
    assert checkpoints.load_latest(actor) == (1, {"saved": 1})
    (checkpoints.folder / "latest").unlink()
    assert checkpoints.load_latest(actor) == (2, {"saved": 2})


def test_a_half_written_folder_is_no_checkpoint(copied: tuple) -> None:
    checkpoints, actor = copied
    (checkpoints.folder / "step_2").rename(checkpoints.folder / "step_3.tmp")
    assert checkpoints.load_latest(actor) == (1, {"saved": 1})
    checkpoints.save(3, actor, {"saved": 3})
    assert {file.name for file in checkpoints.folder.iterdir()} == {"step_1", "step_3", "latest"}
    assert checkpoints.load_latest(actor) == (3, {"saved": 3})


def test_a_step_is_saved_again_over_what_was_there(copied: tuple) -> None:
    checkpoints, actor = copied
    checkpoints.save(2, actor, {"saved": "again"})
    assert checkpoints.load_latest(actor) == (2, {"saved": "again"})


def test_nothing_saved_is_nothing_loaded(copied: tuple, tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "empty", keep=1).load_latest(copied[1]) is None
