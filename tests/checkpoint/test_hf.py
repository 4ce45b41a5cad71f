"""Loading and saving Hugging Face folders: several files, one file, and one-line errors."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.runtime import screen
from megatron_collab.trainer.megatron import model as policies
from tests import ranks
from tests.helpers import make_model
from tests.ranks import init_parallel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), family="qwen3", tied=False, vocab=300, layers=2)


@pytest.fixture(scope="module")
def config(one_rank: Config, source: Path) -> Config:
    one_rank.model.path = str(source)
    return one_rank


@pytest.fixture
def damaged(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "damaged"))


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.from_hf(json.loads((folder / "config.json").read_text()))


def test_several_files_and_one_contain_the_same_model(
    config: Config, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "LOG_EVERY", 0.0)
    model = policies.load(network_spec(config))
    monkeypatch.setattr(hf, "FILE_BYTES", 60_000)
    hf.save_hf(model, tmp_path / "split", source)
    count = len([*hf.named_shards(model)])
    printed = capsys.readouterr().err
    for title in ("loading", "exporting"):
        assert f"{title} weights: {count}/{count} parameters (100 %)" in printed
    files = sorted((tmp_path / "split").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 90_000 for file in files)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    reloaded = policies.build(network_spec(config), shape_of(source))
    hf.load_hf(reloaded, tmp_path / "split")
    for (name, actual), (_, expected) in zip(hf.named_shards(reloaded), hf.named_shards(model), strict=True):
        assert torch.equal(actual, expected), name


def test_masters_of_fp8_parameters_begin_with_what_is_loaded(config: Config, source: Path) -> None:
    """Not with its FP8 rounding: TransformerEngine keeps a copy for them, which Megatron's optimizer uses."""
    chunks = policies.build(network_spec(config), shape_of(source))
    for _, parameter in hf.named_shards(chunks):
        parameter.get_high_precision_init_val = partial(getattr, torch.zeros_like(parameter), "data")
    hf.load_hf(chunks, source)
    for name, parameter in hf.named_shards(chunks):
        assert torch.equal(parameter.get_high_precision_init_val(), parameter), name


def test_a_folder_is_replaced_and_no_temporary_files_remain(config: Config, source: Path, tmp_path: Path) -> None:
    model = policies.load(network_spec(config))
    target = tmp_path / "hf"
    target.mkdir()
    (target / "stale").write_text("from an earlier run")
    hf.save_hf(model, target, source)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert not (target / "stale").exists()
    assert (target / "tokenizer.json").is_file()


def test_bfloat16_rounds_once_and_is_recorded(config: Config, source: Path, tmp_path: Path) -> None:
    config.model.dtype = "bfloat16"
    try:
        model = policies.load(network_spec(config))
    finally:
        config.model.dtype = "float32"
    hf.save_hf(model, tmp_path / "hf", source)
    expected, exported = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "hf"))
    assert all(torch.equal(exported[name], expected[name].bfloat16()) for name in expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing"),
        ({"model.extra.weight": torch.zeros(2)}, r"model\.extra\.weight is unexpected"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \(3,\), config\.json asks for \(64,\)"),
    ],
)
def test_a_wrong_folder_is_refused(
    config: Config, damaged: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(damaged, change)
    model = policies.build(network_spec(config), shape_of(damaged))
    with pytest.raises(ValueError, match=message):
        hf.load_hf(model, damaged)


def test_a_missing_file_is_named(config: Config, damaged: Path) -> None:
    model = policies.build(network_spec(config), shape_of(damaged))
    (damaged / "model.safetensors").write_text("version https://git-lfs.example/spec/v1\noid sha256:4d7a\nsize 99\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is a pointer of Git LFS"):
        hf.load_hf(model, damaged)
    (damaged / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        hf.load_hf(model, damaged)


def test_computed_buffers_of_old_checkpoints_are_ignored(config: Config, damaged: Path) -> None:
    rewrite(damaged, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    model = policies.build(network_spec(config), shape_of(damaged))
    hf.load_hf(model, damaged)
    expected = load_file(damaged / "model.safetensors")["model.norm.weight"]
    assert torch.equal(dict(hf.named_shards(model))["decoder.final_layernorm.weight"], expected)


@pytest.mark.processes
def test_replicas_take_turns_to_read_and_hand_on_what_they_read(tmp_path: Path, device_type: str) -> None:
    """Over gloo, and on GPUs over NCCL."""
    folder = ranks.make_model(tmp_path / "model", experts=True)
    first, second = ranks.run_ranks(read_in_every_layout, 2, folder, device_type, device_type=device_type)
    assert len(first) == 2
    for reads, other_reads in zip(first, second, strict=True):
        tensors = [name for name, _ in reads + other_reads]
        assert set(tensors) == set(load_file(folder / "model.safetensors"))
        assert len(set(reads + other_reads)) == len(reads + other_reads), "a slice was read twice"
        assert min(len(reads), len(other_reads)) > 0.4 * len(tensors)


def read_in_every_layout(folder: Path, device_type: str) -> list[list[tuple[str, str]]]:
    """As one of two ranks: the slices it reads if both hold all experts, and if each holds half of them."""
    read: list[tuple[str, str]] = []
    results, real = [], hf.HFTensors.read

    def noted(tensors: hf.HFTensors, name: str, index: hf_to_megatron.Index) -> torch.Tensor:
        read.append((name, str(index)))
        return real(tensors, name, index)

    for experts_over in (1, 2):
        config = ranks.make_config(folder, {"parallel.ep": experts_over, "launch.device": device_type})
        with init_parallel(config), pytest.MonkeyPatch.context() as patch:
            read.clear()
            patch.setattr(hf.HFTensors, "read", noted)
            chunks = policies.load(network_spec(config))
            results.append(list(read))
            shape, tensors = shape_of(folder), hf.HFTensors(folder, shape_of(folder))
            entries = {entry.megatron: entry for entry in hf_to_megatron.table(shape)}
            for name, parameter in hf.named_shards(chunks):
                assert torch.equal(parameter.cpu(), tensors.shard(entries[name], shape, 1, 0, parameter.dtype)), name
    return results


@pytest.mark.processes
def test_every_stage_writes_its_own_files(tmp_path: Path, device_type: str) -> None:
    """As large as they may be, numbered as one writer would, and nothing is left of a folder that one has begun."""
    folder = ranks.make_model(tmp_path / "model", tied=False)
    written = ranks.run_ranks(write_in_stages, 2, folder, tmp_path / "out", device_type, device_type=device_type)
    assert min(len(files) for files in written) > 1 and not set(written[0]) & set(written[1])
    names = sorted(written[0] + written[1])
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())["weight_map"]
    expected = load_file(folder / "model.safetensors")
    exported = {name: tensor for file in names for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert exported.keys() == expected.keys() == index.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def write_in_stages(folder: Path, out: Path, device_type: str) -> list[str]:
    """As one of two stages: the files that it writes."""
    written, real = [], hf.save_file

    def noted(tensors: dict[str, torch.Tensor], file: Path, *metadata: dict[str, str]) -> None:
        written.append(file.name)
        real(tensors, file, *metadata)

    config = ranks.make_config(folder, {"parallel.pp": 2, "launch.device": device_type})
    with init_parallel(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "FILE_BYTES", 20_000)
        patch.setattr(hf, "save_file", noted)
        hf.save_hf(policies.load(network_spec(config)), out, folder)
    return written
