"""A run resumed from a checkpoint is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import json
import random
import resource
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megatron_collab.checkpoint import hf, storage, torch_dist
from megatron_collab.checkpoint.checkpointer import Checkpoints
from megatron_collab.checkpoint.stored import StoredWeights
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.runtime import process
from megatron_collab.runtime.process import RunStopped
from megatron_collab.trainer.megatron.layers import RMSNorm
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.helpers import selected
from tests.ranks import init_parallel, learn, make_config, make_model, make_samples, run_ranks

pytestmark = pytest.mark.processes


LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2, "model.dtype": "bfloat16"},
    "vpp2": {"parallel.pp": 2, "parallel.vpp": 2},
    "dp2": {"algo.advantage": "gae", "algo.critic_lr": 1e-3},
}
# NAME: (the layout that saved, the layout that resumes from it)
RESHARDED: dict[str, tuple[str, dict[str, object]]] = {
    "tp2-pp2": ("tp2", {"parallel.pp": 2}),
    "tp2-dp2": ("tp2", {}),
    "tp2-vpp2": ("tp2", LAYOUTS["vpp2"]),
    "vpp2-tp2": ("vpp2", LAYOUTS["tp2"]),
    "dp2-tp2": ("dp2", LAYOUTS["dp2"] | LAYOUTS["tp2"]),
}
STATE = {"version": 3, "curve": [0.5, 1.0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Checkpoints and results of both lives of every layout."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(folder / "model")
    resharded = [name for (name,) in selected(request, "name") if name in RESHARDED]
    for life in ("first", "second"):
        run_ranks(live_in_every_layout, 2, folder, life, resharded)
    return folder


def live_in_every_layout(folder: Path, life: str, resharded: Sequence[str]) -> None:
    """As one of two ranks: writes the files described in `live` and, in the second life, in `fill_the_disk`.

    `resharded`: names of RESHARDED, for the second life.
    """
    for layout, settings in LAYOUTS.items():
        with init_parallel(make_config(folder, settings)):
            live(folder, layout, layout, settings, life)
    if life == "second":
        for name in resharded:
            source, settings = RESHARDED[name]
            with init_parallel(make_config(folder, settings)):
                live(folder, source, name, settings, life)
        with init_parallel(make_config(folder, LAYOUTS["tp2"])):
            fill_the_disk(folder)


def build(folder: Path, settings: Mapping[str, object]) -> PolicyTrainer:
    return PolicyTrainer(trainer_spec(make_config(folder / "model", {**settings, "algo.kl_coef": 0.0})))


def live(folder: Path, source: str, name: str, settings: Mapping[str, object], life: str) -> None:
    """The first life trains six steps and saves after each of the first three; the second loads and trains the others.

    The second may have another layout than its checkpoint. Each rank writes NAME-LIFE-rankN.npz, parameters, optimizer
    state and random draws at the end, and all write NAME-LIFE.json, the metrics of the last three steps.
    """
    actor = build(folder, settings)
    with Checkpoints(folder / source, keep=2, timeout=60.0) as checkpoints:
        if life == "first":
            assert checkpoints.load_latest(actor.trainables) is None
            seed_everything(dist.get_rank())
            for step in range(3):
                learn(actor, Batch(make_samples(9, step)))
                checkpoints.save(step + 1, actor.trainables, STATE if dist.get_rank() == 0 else {})
        else:
            actor.step, state = checkpoints.load_latest(actor.trainables)
            assert (actor.step, state) == (3, STATE)
        metrics = [learn(actor, Batch(make_samples(9, step))) for step in range(3, 6)]
    (folder / f"{name}-{life}.json").write_text(json.dumps(metrics))
    np.savez(folder / f"{name}-{life}-rank{dist.get_rank()}.npz", **snapshot(actor))


def fill_the_disk(folder: Path) -> None:
    """Save when the disk is full only for rank 1; the error of rank N is in full-rankN.txt."""
    actor = build(folder, LAYOUTS["tp2"])
    learn(actor, Batch(make_samples(9, 0)))
    checkpoints = Checkpoints(folder / "full", keep=2, timeout=60.0)
    checkpoints.save(1, actor.trainables, {})
    checkpoints.finish()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    checkpoints.save(2, actor.trainables, {})
    try:
        checkpoints.finish()
    except RunStopped as error:
        (folder / f"full-rank{dist.get_rank()}.txt").write_text(str(error))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def snapshot(actor: PolicyTrainer) -> dict[str, np.ndarray]:
    tensors = {}
    for network, trainable in actor.trainables.items():
        tensors |= {f"{network} model {name}": shard for name, shard in hf.named_shards(trainable.chunks)}
        for index, optimizer in enumerate(trainable.optimizer.chained_optimizers):
            for number, state in enumerate(optimizer.optimizer.state.values()):
                tensors |= {f"{network} optimizer {index} {number} {name}": value for name, value in state.items()}
    draws = {"python": random.random(), "numpy": np.random.random(), "torch": torch.rand(2).numpy()}
    return {name: value.detach().float().cpu().numpy() for name, value in tensors.items()} | draws


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_is_undisturbed_bit_for_bit(folder: Path, layout: str) -> None:
    first, second = (json.loads((folder / f"{layout}-{life}.json").read_text()) for life in ("first", "second"))
    assert second == first
    for rank in range(2):
        undisturbed, resumed = (np.load(folder / f"{layout}-{life}-rank{rank}.npz") for life in ("first", "second"))
        assert resumed.files == undisturbed.files
        assert {"python", "numpy", "torch"} < set(resumed.files) and len(resumed.files) > 30
        assert any(name.startswith("critic") for name in resumed.files) == (layout == "dp2")
        for name in undisturbed.files:
            np.testing.assert_array_equal(resumed[name], undisturbed[name], err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("tp2-dp2", "tp2-vpp2"))) for name in RESHARDED]
)
def test_another_layout_goes_on_from_it(folder: Path, name: str) -> None:
    undisturbed, resharded = (
        json.loads((folder / file).read_text())
        for file in (f"{name.partition('-')[0]}-first.json", f"{name}-second.json")
    )
    for metrics, expected in zip(resharded, undisturbed, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_checkpoints_are_discarded(folder: Path, layout: str) -> None:
    assert {file.name for file in (folder / layout).iterdir()} == {"step_2", "step_3", "latest"}
    assert (folder / layout / "latest").read_text() == "step_3"


def test_all_ranks_learn_that_one_could_not_write(folder: Path) -> None:
    messages = [(folder / f"full-rank{rank}.txt").read_text() for rank in range(2)]
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        f"{folder / 'full'}: rank 1 could not write the checkpoint: [Errno 27] File too large;"
    )
    assert {file.name for file in (folder / "full").iterdir()} == {"step_1", "latest"}


@pytest.fixture(scope="module")
def saved(folder: Path, one_rank: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PolicyTrainer]:
    """Checkpoints of steps 1 and 2, and the actor that saved them."""
    actor = build(folder, {})
    with open_in(tmp_path_factory.mktemp("saved")) as checkpoints:
        for step in (1, 2):
            learn(actor, Batch(make_samples(4, step)))
            checkpoints.save(step, actor.trainables, {"saved": step})
    return checkpoints.folder, actor


def open_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=2, timeout=60.0)


@pytest.fixture
def copied(saved: tuple[Path, PolicyTrainer], tmp_path: Path) -> Iterator[tuple[Checkpoints, PolicyTrainer]]:
    with open_in(Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))) as checkpoints:
        yield checkpoints, saved[1]


def weights(actor: PolicyTrainer) -> dict[str, np.ndarray]:
    return {name: shard.detach().clone().numpy() for name, shard in hf.named_shards(actor.policy.chunks)}


def test_training_continues_while_a_checkpoint_is_written(copied: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, actor = copied
    before, trained = weights(actor), threading.Event()

    def begin_late(folder: Path, step: int) -> Path:
        assert trained.wait(60.0)
        return begin(folder, step)

    begin = storage.begin
    monkeypatch.setattr(storage, "begin", begin_late)
    checkpoints.save(3, actor.trainables, {"saved": 3})
    assert not (checkpoints.folder / "step_3").exists()
    first = learn(actor, Batch(make_samples(4, 3)))
    trained.set()
    actor.step, state = checkpoints.load_latest(actor.trainables)
    assert (actor.step, state) == (3, {"saved": 3})
    stored = StoredWeights(checkpoints.folder / "step_3")
    np.testing.assert_equal({name: stored.read(name).numpy() for name in before}, before)
    np.testing.assert_equal(weights(actor), before)
    assert learn(actor, Batch(make_samples(4, 3))) == first  # the optimizer's state is restored, too


@pytest.mark.parametrize("room", [10_000, 20_000, 40_000])  # torch.save fails in several ways
def test_a_full_disk_ends_the_run_with_one_line(copied: tuple, room: int) -> None:
    checkpoints, actor = copied
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        checkpoints.save(3, actor.trainables, {"saved": 3})
        with pytest.raises(
            RunStopped, match=r"rank 0 could not write the checkpoint: .*File too large; free disk space"
        ) as error:
            checkpoints.save(4, actor.trainables, {"saved": 4})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert {file.name for file in checkpoints.folder.iterdir()} == {"step_1", "step_2", "latest"}
    assert checkpoints.load_latest(actor.trainables) == (2, {"saved": 2})


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (flip, "__0_0.distcp", "__0_0.distcp is corrupt"),
        (shorten, "__0_0.distcp", "__0_0.distcp has "),
        (Path.unlink, "common.pt", "common.pt is missing"),
        (Path.unlink, "state.json", "no valid state.json"),
        (shorten, "state.json", "no valid state.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_loaded(
    copied: tuple, capsys: pytest.CaptureFixture[str], damage: object, name: str, message: str
) -> None:
    checkpoints, actor = copied
    damage(checkpoints.folder / "step_2" / name)  # type: ignore[operator]
    assert checkpoints.load_latest(actor.trainables) == (1, {"saved": 1})
    warning = capsys.readouterr().err
    assert f"step_2: is damaged ({message}" in warning and warning.count("\n") == 1


def test_a_run_does_not_start_over_if_no_checkpoint_is_intact(copied: tuple) -> None:
    checkpoints, actor = copied
    for step in (1, 2):
        flip(checkpoints.folder / f"step_{step}" / "__0_0.distcp")
    with pytest.raises(RunStopped, match="contains no intact checkpoint"):
        checkpoints.load_latest(actor.trainables)


def test_checkpoints_without_recorded_files_are_loaded_unchecked(copied: tuple) -> None:
    checkpoints, actor = copied
    file = checkpoints.folder / "step_2" / "state.json"
    state = json.loads(file.read_text())
    del state["files"]
    file.write_text(json.dumps(state))
    assert checkpoints.load_latest(actor.trainables) == (2, {"saved": 2})


def test_a_kill_between_the_two_renames(copied: tuple) -> None:
    checkpoints, actor = copied
    (checkpoints.folder / "latest").write_text("step_1")
    assert checkpoints.load_latest(actor.trainables) == (1, {"saved": 1})
    (checkpoints.folder / "latest").unlink()
    assert checkpoints.load_latest(actor.trainables) == (2, {"saved": 2})


def test_a_half_written_folder_is_no_checkpoint(copied: tuple) -> None:
    checkpoints, actor = copied
    (checkpoints.folder / "step_2").rename(checkpoints.folder / "step_3.tmp")
    assert checkpoints.load_latest(actor.trainables) == (1, {"saved": 1})
    checkpoints.save(3, actor.trainables, {"saved": 3})
    checkpoints.finish()
    assert {file.name for file in checkpoints.folder.iterdir()} == {"step_1", "step_3", "latest"}
    assert checkpoints.load_latest(actor.trainables) == (3, {"saved": 3})


def test_a_step_saved_again_replaces_its_checkpoint(copied: tuple) -> None:
    checkpoints, actor = copied
    checkpoints.save(2, actor.trainables, {"saved": "again"})
    assert checkpoints.load_latest(actor.trainables) == (2, {"saved": "again"})


def test_ranks_move_while_they_save_and_load(copied: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat at every tensor and at every flushed piece."""
    checkpoints, actor = copied
    monkeypatch.setattr(storage, "_READ_BYTES", 1 << 30)  # then checksums give one heartbeat per file
    tensors = len(weights(actor))
    before, synced = process.beats, []
    checkpoints.load_latest(actor.trainables)
    assert process.beats - before >= tensors
    monkeypatch.setattr(torch_dist, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(torch_dist.os, "fsync", synced.append)
    before = process.beats
    checkpoints.save(3, actor.trainables, {"saved": 3})
    checkpoints.finish()
    size = (checkpoints.folder / "step_3" / "__0_0.distcp").stat().st_size
    assert len(synced) >= size // 20_000 > 10
    assert process.beats - before >= tensors + size // 20_000
    monkeypatch.undo()
    assert checkpoints.load_latest(actor.trainables) == (3, {"saved": 3})


def test_an_empty_folder_loads_nothing(copied: tuple, tmp_path: Path) -> None:
    assert open_in(tmp_path / "empty").load_latest(copied[1].trainables) is None


class EngineNorm(RMSNorm):
    """With the extra state of TransformerEngine's norms (its ops/op.py), which local norms lack."""

    loaded: ClassVar[list[torch.Tensor]] = []

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.loaded.append(state)


def test_runs_with_transformer_engine_and_without_resume_each_other(copied: tuple) -> None:
    """Its layers and its Adam (pytorch/optimizers/fused_adam.py) are recognized by their entries in a checkpoint."""
    checkpoints, actor = copied
    norms = [module for module in actor.chunks[0].modules() if type(module) is RMSNorm]
    inner = actor.policy.optimizer.chained_optimizers[0].optimizer
    try:
        for norm in norms:
            norm.__class__ = EngineNorm
        inner.defaults["bias_correction"] = True
        checkpoints.load_latest(actor.trainables)
        expected = weights(actor)
        assert len(EngineNorm.loaded) == len(norms) > 2
        assert all(group["bias_correction"] and type(group["step"]) is int for group in inner.param_groups)
        for group in inner.param_groups:  # present in torch's Adam, missing in the other
            del group["amsgrad"]
        checkpoints.save(3, actor.trainables, {"saved": 3})
        checkpoints.finish()
    finally:
        for group in inner.param_groups:
            group["amsgrad"] = False
        inner.defaults.pop("bias_correction", None)
        for norm in norms:
            norm.__class__ = RMSNorm
    stored = FileSystemReader(checkpoints.folder / "step_3").read_metadata().state_dict_metadata
    assert any("final_layernorm._extra_state" in key for key in stored)
    assert checkpoints.load_latest(actor.trainables) == (3, {"saved": 3})
    assert not any(group["amsgrad"] for group in inner.param_groups)
    np.testing.assert_equal(weights(actor), expected)
    assert learn(actor, Batch(make_samples(4, 3)))["grad_norm"] > 0
