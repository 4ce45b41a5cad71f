"""The models of a run's folder, their names, and the folder of converted checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_collab.config import Config, EvaluateConfig
from megatron_collab.runtime import device, gpu_environment
from megatron_collab.settings import ConfigError
from megatron_collab.talk import models
from megatron_collab.talk.models import RunModel, find_model, hf_folder, models_of
from megatron_collab.talk.settings import WHOLE, GpuShare, run_settings
from tests.talk.conftest import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 40 steps with checkpoints of steps 20 and 40."""
    config = Config()
    config.run.dir, config.model.path, config.train.steps = str(tmp_path / "run"), str(tmp_path / "model"), 40
    folder = write_run(tmp_path / "run", config)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for step in (20, 40):
        (folder / "checkpoints" / f"step_{step}").mkdir()
        (folder / "checkpoints" / f"step_{step}" / "state.json").write_text("{}")
    return folder


def finish(folder: Path) -> None:
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "result.json").write_text("{}")


def places(folder: Path) -> dict[str, str]:
    return {model.name: model.folder.name for model in models_of(folder)}


def test_models_are_the_first_one_and_the_checkpoints(folder: Path) -> None:
    assert places(folder) == {"before": "model", "step_20": "step_20", "step_40": "step_40"}
    assert [model.step for model in models_of(folder)] == [0, 20, 40]


def test_the_exported_model_is_that_of_a_finished_run(folder: Path) -> None:
    finish(folder)
    assert places(folder)["step_40"] == "hf" and not find_model(folder, "after").is_checkpoint
    (folder / "result.json").unlink()  # it goes on with more steps
    assert places(folder)["step_40"] == "step_40"


def test_an_exported_model_needs_no_checkpoint_and_no_first_model(folder: Path, tmp_path: Path) -> None:
    finish(folder)
    (tmp_path / "model" / "config.json").unlink()
    assert find_model(folder, "40").folder == folder / "hf"
    with pytest.raises(ConfigError, match="which no longer exists; restore it"):
        find_model(folder, "20")


def test_a_model_is_found_by_its_names(folder: Path) -> None:
    (folder / "best.json").write_text(json.dumps({"step": 20}))
    names = {name: find_model(folder, name).name for name in ("before", "20", "step_40", "after", "best")}
    assert [*names.values()] == ["before", "step_20", "step_40", "step_40", "step_20"]


def test_a_model_that_does_not_exist_is_refused(folder: Path) -> None:
    for name, reason in {
        "30": "has no model 30; it has before, step_20, step_40",
        "best": r"keeps no best checkpoint \(train.keep_best\); it has before, step_20, step_40",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            find_model(folder, name)


def test_a_run_without_a_checkpoint_has_only_its_first_model(tmp_path: Path) -> None:
    config = Config()
    config.run.dir, config.model.path = str(tmp_path), str(tmp_path)
    folder = write_run(tmp_path / "run", config)
    with pytest.raises(ConfigError, match="has no checkpoint yet; take before"):
        find_model(folder, "after")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; give the folder of a training run"):
        models_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"program": EvaluateConfig.program}))
    with pytest.raises(ConfigError, match="holds a run of `megatron-collab evaluate`, which trains no model"):
        models_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ConfigError, match="its settings name no model"):
        models_of(tmp_path)


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were converted, each to a folder with one file."""
    names: list[str] = []

    def convert(model: RunModel, folder: Path) -> None:
        names.append(model.name)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "CONVERTED", tmp_path / "converted")
    monkeypatch.setattr(models, "_convert", convert)
    return names


def convert_steps(folder: Path, steps: Sequence[int]) -> None:
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(exist_ok=True)
        if not (checkpoint / "state.json").exists():
            (checkpoint / "state.json").write_text("{}")
        with hf_folder(find_model(folder, str(step)), print) as converted:
            os.utime(converted, (step, step))  # as if it was used so long ago


def test_a_checkpoint_is_converted_once_and_again_if_it_is_another(folder: Path, conversions: list[str]) -> None:
    convert_steps(folder, [20, 20])
    assert conversions == ["step_20"]
    state = folder / "checkpoints" / "step_20" / "state.json"
    os.utime(state, (1, 1))  # saved again by a repeated run
    convert_steps(folder, [20])
    assert conversions == ["step_20", "step_20"]


def test_converted_models_do_not_pile_up_but_stay_while_they_are_used(folder: Path, conversions: list[str]) -> None:
    with hf_folder(find_model(folder, "20"), print) as used:
        os.utime(used, (1, 1))
        convert_steps(folder, range(30, 30 + 2 * models.MOST_CONVERTED))
        assert used.is_dir(), "others were removed instead"
        assert len([path for path in models.CONVERTED.iterdir() if path.is_dir()]) <= models.MOST_CONVERTED + 1
    convert_steps(folder, [100])
    assert not used.exists()


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("share", "models", "tp", "judges", "gpus", "expected"),
    [
        (WHOLE, 2, 1, 0, None, (2, 0)),
        (WHOLE, 2, 4, 0, 8, (2, 0)),
        (WHOLE, 2, 3, 2, 8, (2, 0)),
        (WHOLE, 2, 4, 1, 8, (1, 0)),
        (WHOLE, 2, 8, 0, 8, (1, 0)),
        (GpuShare(1, 2), 1, 4, 0, 8, (1, 4)),
        (GpuShare(1, 2), 1, 3, 1, 8, (1, 4)),
        (GpuShare(1, 2), 1, 4, 1, 8, (1, 0)),
        (GpuShare(1, 2), 2, 2, 0, 9, (2, 4)),
        (GpuShare(1, 2), 1, 8, 0, 8, (1, 0)),
        (GpuShare(1, 2), 1, 1, 0, 1, (1, 0)),
    ],
)
def test_processes_share_the_gpus_of_a_node(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    share: GpuShare,
    models: int,
    tp: int,
    judges: int,
    gpus: int | None,
    expected: tuple[int, int],
) -> None:
    """Each model and judge has its own GPUs if there are enough; else all processes share the first ones."""
    monkeypatch.setattr(device, "select", lambda name: torch.device("cpu" if gpus is None else device.GPU))
    monkeypatch.setattr(device, "count", lambda: gpus)
    monkeypatch.setattr(gpu_environment, "enter", lambda: None)
    judge = [f"servers.judge={{model: {folder.parent / 'model'}, replicas: {judges}}}"] if judges else []
    settings, first_gpu = run_settings(folder, models, [f"rollout.server.tp={tp}", *judge], share)
    assert (settings.rollout.server.replicas, first_gpu) == expected
