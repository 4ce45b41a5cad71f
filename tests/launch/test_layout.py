"""Layouts and precisions that cannot work: one line that names the setting and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch import layout
from megatron_collab.models import parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device
from megatron_collab.settings import ConfigError
from megatron_collab.settings.option import check_declared
from tests.helpers import configured

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FP8 = {"model.fp8": "hybrid", "model.fp8_recipe": "tensorwise"}


def configure(settings: dict[str, Any]) -> Config:
    return configured(Config(), settings)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine on a Hopper device."""
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=True, detail=""))
    monkeypatch.setattr(device, "capability", lambda: (9, 0))


def refused(settings: dict[str, Any], shape: dict[str, Any] | None = None) -> str:
    config = configure(settings)
    with pytest.raises(ConfigError) as error:
        check_declared(config)
        layout.check_layout(config)
        layout.check_layout_on_machine(config)
        if shape:
            layout.check_layout_of_model(config, ModelShape.from_hf(shape))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.fp8": "e5m2"}, "model.fp8=e5m2: choose one of hybrid, e4m3"),
        ({"model.fp8_recipe": "mx"}, "model.fp8_recipe=mx: choose one of delayed, tensorwise, blockwise, mxfp8"),
        ({"parallel.recompute": "some"}, "parallel.recompute=some: choose one of none, selective, full"),
        ({"model.fp8": "hybrid"}, "model.fp8=hybrid: needs TransformerEngine ("),  # missing, or without a device
        ({"model.fp8_params": True}, "model.fp8_params=true: needs model.fp8"),
        ({"model.fp8_recipe": "tensorwise"}, "model.fp8_recipe=tensorwise: needs model.fp8; set model.fp8=hybrid"),
        ({"model.fp8_skip_first": 1}, "model.fp8_skip_first=1: needs model.fp8"),
        ({"parallel.cp": 2, "launch.nproc_per_node": 2}, "parallel.cp=2: needs TransformerEngine ("),
        (
            {"parallel.cp": 2, "launch.nproc_per_node": 2, "model.dtype": "float32"},
            "parallel.cp=2: needs model.dtype=bfloat16, not float32; set parallel.cp=1",
        ),
        (
            {"parallel.tp": 2, "parallel.pp": 2, "launch.nproc_per_node": 2},
            "does not divide the 2 ranks (launch.nodes=1 x launch.nproc_per_node=2); set launch.nproc_per_node so that "
            "they are a multiple of 4",
        ),
        ({"parallel.sequence_parallel": True}, "parallel.sequence_parallel=true: needs parallel.tp > 1"),
        ({"parallel.vpp": 2}, "parallel.vpp=2: needs parallel.pp > 1; set parallel.vpp=1"),
        (
            {"parallel.ep": 2, "parallel.pp": 2, "launch.nproc_per_node": 2},
            "parallel.ep=2: does not divide the 1 ranks of a pipeline stage",
        ),
        (
            {
                "parallel.tp": 2,
                "parallel.sequence_parallel": True,
                "launch.nproc_per_node": 2,
                "train.tokens_per_micro_batch": 101,
            },
            "train.tokens_per_micro_batch=101: must be a multiple of 2 with this layout and precision; set 102",
        ),
    ],
    ids=str,
)
def test_what_no_model_can_be_trained_with(settings: dict[str, Any], message: str) -> None:
    assert message in refused(settings)


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", [device.Device("cuda", "nccl"), device.Device("cpu", "gloo")])
def test_bfloat16_on_gpus_needs_the_layers_that_are_planned(
    monkeypatch: pytest.MonkeyPatch, backend: device.Device, dtype: str, installed: bool
) -> None:
    monkeypatch.setattr(device, "select", lambda setting: backend)
    monkeypatch.setattr(device, "probe", lambda name: SimpleNamespace(available=installed, detail="not installed"))
    settings = {"model.dtype": dtype}
    if installed or dtype == "float32" or backend.type == "cpu":
        layout.check_layout_on_machine(configure(settings))
    else:
        assert refused(settings) == (
            "model.dtype=bfloat16: on GPUs needs TransformerEngine (not installed); run make setup GPU=1, or set "
            "model.dtype=float32"
        )


@pytest.mark.parametrize(
    ("recipe", "capability", "allowed"),
    [
        ("delayed", (8, 9), True),
        ("delayed", (8, 0), False),
        ("tensorwise", (9, 0), True),
        ("tensorwise", (8, 6), False),
        ("blockwise", (9, 0), True),
        ("blockwise", (10, 0), True),
        ("blockwise", (8, 9), False),
        ("mxfp8", (10, 0), True),
        ("mxfp8", (10, 3), True),
        ("mxfp8", (9, 0), False),
        ("mxfp8", (12, 0), False),
        ("delayed", None, False),
    ],
)
def test_recipes_of_fp8_need_their_devices(
    engine: None, monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int] | None, allowed: bool
) -> None:
    monkeypatch.setattr(device, "capability", lambda: capability)
    settings = {"model.fp8": "hybrid", "model.fp8_recipe": recipe}
    if allowed:
        layout.check_layout_on_machine(configure(settings))
        return
    line = refused(settings)
    assert line.startswith(f"model.fp8_recipe={recipe}: needs a device of compute capability")
    assert f"found {'{}.{}'.format(*capability) if capability else 'none'}; choose another recipe" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**FP8, "model.dtype": "float32"}, "model.fp8=hybrid: needs model.dtype=bfloat16, not float32"),
        (
            {"model.fp8": "hybrid", "model.fp8_skip_first": 1},
            "model.fp8_recipe=delayed: keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise",
        ),
        (
            {**FP8, "model.fp8_recipe": "mxfp8", "model.fp8_params": True},
            "model.fp8_params=true: with model.fp8_recipe=mxfp8",
        ),
        (
            {**FP8, "model.fp8_recipe": "delayed", "model.fp8_params": True, "algo.kl_coef": 0.1},
            "model.fp8_params=true: with model.fp8_recipe=delayed the reference, the first policy, is never",
        ),
        (
            {**FP8, "model.fp8_recipe": "delayed", "model.fp8_params": True, "algo.kl_coef": 0.0, "model.lora.rank": 8},
            "model.fp8_params=true: with model.fp8_recipe=delayed the weights that model.lora.rank=8 freezes are never",
        ),
        ({**FP8, "model.fp8_skip_last": -1}, "model.fp8_skip_last=-1: "),
        ({**FP8, "train.tokens_per_micro_batch": 100}, "must be a multiple of 16"),
    ],
    ids=str,
)
def test_what_fp8_cannot_go_with(engine: None, settings: dict[str, Any], message: str) -> None:
    assert message in refused(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.lora.rank": 0}, "model.lora.rank=0: must be at least 1 and at most 4096"),
        (
            {"model.lora.targets": ["q_proj", "w1"]},
            "model.lora.targets=w1: choose one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        ({"model.lora.targets": ["query_proj"]}, "model.lora.targets=query_proj: choose one of q_proj, k_proj, "),
        ({"model.lora.targets": []}, "model.lora.targets=[]: nothing would be trained"),
        ({"model.lora.targets": ["q_proj", "q_proj"]}, "model.lora.targets: q_proj is named twice; name it once"),
        ({"model.lora.dropout": 1.0}, "model.lora.dropout=1.0: must be at least 0 and below 1"),
        ({"model.lora.serve": "adapters"}, "model.lora.serve=adapters: there are no adapters; set model.lora.rank"),
    ],
    ids=str,
)
def test_adapters_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    assert message in refused(settings)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        (
            {"parallel.tp": 8, "launch.nproc_per_node": 8},
            DENSE,
            "parallel.tp=8: does not divide the model's 4 attention heads",
        ),
        ({"parallel.pp": 6, "launch.nproc_per_node": 6}, DENSE, "parallel.pp=6: the model has only 5 layers"),
        (
            {"parallel.pp": 2, "parallel.vpp": 3, "launch.nproc_per_node": 2},
            DENSE,
            "parallel.pp=2 x parallel.vpp=3: the model has only 5 layers; choose at most 5 stages",
        ),
        (
            {"parallel.ep": 2, "launch.nproc_per_node": 2},
            DENSE,
            "parallel.ep=2: the model has no experts; set parallel.ep=1",
        ),
        (
            {"parallel.ep": 4, "launch.nproc_per_node": 4},
            EXPERTS,
            "parallel.ep=4: does not divide the model's 6 experts",
        ),
        (
            {"parallel.tp": 2, "launch.nproc_per_node": 2},
            EXPERTS,
            "parallel.tp=2: a model with experts also needs parallel.sequence_parallel=true",
        ),
        (FP8, DENSE | {"hidden_size": 72}, "model.fp8=hybrid: the hidden size on a rank, 72, is not a multiple of 16"),
        (
            {"model.fp8": "hybrid", "model.fp8_recipe": "delayed", "model.fp8_params": True, "algo.kl_coef": 0.0},
            EXPERTS,
            "model.fp8_params=true: the experts' scales of model.fp8_recipe=delayed cannot be read from a checkpoint",
        ),
        (FP8, EXPERTS, "model.fp8=hybrid: the width of an expert on a rank, 24, is not a multiple of 16"),
        (
            {"model.lora.rank": 8, "model.lora.targets": ["gate_proj", "up_proj"]},
            EXPERTS | {"mlp_only_layers": [0]},
            "model.lora.targets=['gate_proj', 'up_proj']: layer 1 would have no adapters, since experts get none",
        ),
        (
            {**FP8, "parallel.pp": 2, "launch.nproc_per_node": 2, "model.fp8_skip_first": 3},
            DENSE,
            "model.fp8_skip_first=3: a pipeline stage has 2 layers; choose at most 2",
        ),
    ],
    ids=str,
)
def test_what_does_not_suit_the_model(
    engine: None, settings: dict[str, Any], shape: dict[str, Any], message: str
) -> None:
    assert message in refused(settings, shape)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.ep": 2, "launch.nproc_per_node": 2}, EXPERTS),
        ({"parallel.pp": 2, "parallel.vpp": 2, "launch.nproc_per_node": 2}, DENSE),
        ({"parallel.cp": 2, "launch.nproc_per_node": 2}, DENSE),
        ({"parallel.tp": 4, "parallel.pp": 2, "launch.nproc_per_node": 4, "launch.nodes": 2}, DENSE),
        ({**FP8, "model.fp8_params": True, "model.fp8_skip_last": 2}, DENSE),
        ({**FP8, "model.fp8_params": True, "model.lora.rank": 8}, DENSE),
        ({"model.lora.rank": 8, "model.lora.targets": ["q_proj", "up_proj"]}, EXPERTS),
        ({**FP8, "model.fp8_recipe": "delayed", "model.fp8_params": True, "algo.kl_coef": 0.0}, DENSE),
    ],
    ids=str,
)
def test_what_works_is_let_through(engine: None, settings: dict[str, Any], shape: dict[str, Any]) -> None:
    config = configure(settings)
    layout.check_layout(config)
    layout.check_layout_on_machine(config)
    layout.check_layout_of_model(config, ModelShape.from_hf(shape))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (1, 1)),
        ({"parallel.tp": 4}, (1, 1)),
        ({"parallel.tp": 4, "parallel.sequence_parallel": True}, (1, 4)),
        ({"parallel.cp": 2}, (4, 4)),
        ({"parallel.cp": 2, "parallel.tp": 4, "parallel.sequence_parallel": True}, (4, 8)),
        (FP8, (1, 16)),
        ({**FP8, "model.fp8_recipe": "blockwise"}, (1, 16)),
        ({**FP8, "model.fp8_recipe": "blockwise", "parallel.tp": 2, "parallel.sequence_parallel": True}, (1, 256)),
        ({**FP8, "model.fp8_recipe": "mxfp8", "parallel.tp": 2, "parallel.sequence_parallel": True}, (1, 64)),
    ],
    ids=str,
)
def test_lengths_are_multiples_of(settings: dict[str, Any], expected: tuple[int, int]) -> None:
    config = configure(settings)
    assert parallel_layout.alignment(config.parallel, config.model) == expected
