"""A run that goes on from another one: what it gets, and what is refused in one line. Files only."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_collab.checkpoint import storage
from megatron_collab.config import Config, compose
from megatron_collab.launch.fork import fork
from megatron_collab.runtime import hub
from megatron_collab.settings import ConfigError, LoraConfig
from tests.ranks import make_model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 and 20."""
    run = tmp_path / "other"
    settings = config(tmp_path, model=make_model(tmp_path / "model"))
    for step in (10, 20):
        folder = storage.begin(run / "checkpoints", step)
        (folder / "__0_0.distcp").write_text(f"weights of {step}")
        state = {"step": step, "ranks": 1, "state": {"seconds": 9.0, "collector": {"in_flight": [[3, 0, 1]]}}}
        storage.commit(folder, state, storage.checksums(folder.iterdir()))
    (run / "config.json").write_text(json.dumps(asdict(settings)))
    return run


def config(folder: Path, source: str | None = None, model: Path | None = None) -> Config:
    run_config = Config()
    run_config.run.dir, run_config.run.fork = str(folder / "new"), source
    run_config.model.path = str(model or folder / "model")
    return run_config


def test_a_fork_has_the_checkpoint_and_shares_its_files(tmp_path: Path, other: Path) -> None:
    run_config = config(tmp_path, f"{other}@10")
    fork(run_config)
    (checkpoint,) = storage.candidates(tmp_path / "new" / "checkpoints")
    saved = storage.read_state(checkpoint)
    assert saved is not None and (saved["step"], saved["state"]) == (10, {})
    assert storage.damage(checkpoint, saved) == []
    assert (checkpoint / "__0_0.distcp").samefile(other / "checkpoints" / "step_10" / "__0_0.distcp")
    storage.discard(other / "checkpoints", 20, keep=1)
    assert (checkpoint / "__0_0.distcp").read_text() == "weights of 10", "the other run may discard it"
    (checkpoint.parent / "step_30").mkdir()
    fork(run_config)  # when the run is started again
    assert storage.read_state(checkpoint) == saved


def test_without_a_step_it_is_the_newest(tmp_path: Path, other: Path) -> None:
    fork(config(tmp_path, str(other)))
    assert (tmp_path / "new" / "checkpoints" / "step_20").is_dir()
    assert json.loads((tmp_path / "new" / "fork.json").read_text())["step"] == 20


def test_a_run_from_the_hub_may_be_gone_on_with(tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"a/b@c": tmp_path / "model", "a/x@c": make_model(tmp_path / "experts", experts=True)}
    monkeypatch.setattr(hub, "folder", lambda path: folders.get(path, Path(path)))
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "model": {**settings["model"], "path": "a/b@c"}}))
    with pytest.raises(ConfigError, match=r"its architecture differs from model\.path=a/x@c; give a/b@c"):
        fork(config(tmp_path, f"{other}@10", Path("a/x@c")))
    fork(config(tmp_path, f"{other}@10", Path("a/b@c")))
    assert (tmp_path / "new" / "checkpoints" / "step_10").is_dir()


def test_run_from_is_run_fork() -> None:
    assert compose(["experiment=booking", "run.from=a/b@3"]).run.fork == "a/b@3"


@pytest.mark.parametrize(
    ("suffix", "settings", "message"),
    [
        ("@15", {}, "no checkpoint of that step; it keeps those of the steps 20, 10"),
        ("@20", {"train.steps": 20}, "is at step 20 already, and train.steps=20; raise it"),
        ("@20", {"train.stage": "sft"}, "its optimizer is of train.stage=rl; start from its model"),
        (
            "@20",
            {"algo.advantage": "gae"},
            "its run has algo.advantage=grpo, and only one of both has a critic",
        ),
        ("@20", {"algo.dpo.refresh": 5}, "its reference is of algo.dpo.refresh=0; keep it"),
        ("@20", {"model.path": "experts"}, "its architecture differs from model.path="),
        ("/nothing", {}, "contains no checkpoint; give a run"),
    ],
)
def test_what_cannot_be_gone_on_with(
    tmp_path: Path, other: Path, suffix: str, settings: dict[str, object], message: str
) -> None:
    run_config = config(tmp_path, f"{other}{suffix}")
    for name, value in settings.items():
        group, _, option = name.rpartition(".")
        if option == "path":
            value = str(make_model(tmp_path / str(value), experts=True))
        setattr(attrgetter(group)(run_config), option, value)
    with pytest.raises(ConfigError, match=message) as error:
        fork(run_config)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"run.fork={other}{suffix}")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, {"rank": 8}, "trained all weights, not adapters (model.lora.rank=8); start from its model, model.path="),
        ({"rank": 8}, {}, "its adapters have model.lora.rank=8, not None; give the same"),
        ({"rank": 8}, {"rank": 8, "alpha": 32.0}, "its adapters have model.lora.alpha=16.0, not 32.0"),
        ({"rank": 8}, {"rank": 8, "targets": ["q_proj"]}, "its adapters have model.lora.targets="),
        ({"rank": 8}, {"rank": 8, "dropout": 0.1}, ""),
    ],
)
def test_adapters_are_gone_on_with_as_they_are(
    tmp_path: Path, other: Path, before: dict[str, object] | None, after: dict[str, object], message: str
) -> None:
    file = other / "checkpoints" / "step_20" / "state.json"
    if before:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora": asdict(LoraConfig(**before))}))
    run_config = config(tmp_path, f"{other}@20")
    run_config.model.lora = LoraConfig(**after)
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        fork(run_config)


def test_a_folder_with_checkpoints_of_its_own_is_no_fork(tmp_path: Path, other: Path) -> None:
    run_config = config(tmp_path, str(other))
    run_config.run.dir = str(other)
    with pytest.raises(ConfigError, match="already has checkpoints; choose another"):
        fork(run_config)
