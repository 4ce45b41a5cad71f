"""Variants of model folders: the log-probs of what is loaded equal transformers', or the folder is refused.

Bound of the difference: float32, of sums in another order. A wrong tensor or rotation gives more than 0.1.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file, save_file

from megatron_collab.checkpoint import hf
from megatron_collab.checkpoint.hf import HFTensors
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models import hf_config
from megatron_collab.settings import ConfigError
from megatron_collab.trainer.megatron import model as policies
from tests.helpers import make_model

# BOUND, in nats: float32 kernels of two kinds of CPU gave differences of up to 9e-6 and 2.5e-5.
SEQUENCES, LENGTH, BOUND = 4, 64, 5e-5
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ABSENT = object()  # in place of a field of config.json
SMALL = {"layers": 2, "hidden": 32, "ffn": 48, "head_dim": 8, "vocab": 300}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Change = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


def settings(**change: object) -> Change:
    """Other fields of config.json."""

    def rewrite(folder: Path) -> None:
        file = folder / "config.json"
        described = json.loads(file.read_text()) | change
        file.write_text(json.dumps({name: value for name, value in described.items() if value is not ABSENT}))

    return rewrite


def weights(change: Callable[[Tensors], Tensors], name: str = SINGLE, **metadata: Any) -> Change:
    """Other tensors, in the file `name`."""

    def rewrite(folder: Path) -> None:
        changed = {name: tensor.contiguous() for name, tensor in change(load_file(folder / SINGLE)).items()}
        save_file(changed, folder / name, **({"metadata": {"format": "pt"}} | metadata))

    return rewrite


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def split(folder: Path, keep: bool = False, omitted: str = "") -> None:
    """The weights as two files with an index, which lacks `omitted`; `keep`: beside other weights in a single file."""
    tensors = load_file(folder / SINGLE)
    names, places = list(tensors), {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    places.pop(omitted, None)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / SINGLE).unlink()
    if keep:
        save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / SINGLE, {"format": "pt"})


def index_of_single(folder: Path) -> None:
    places = dict.fromkeys(load_file(folder / SINGLE), SINGLE)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def in_dtypes(matrices: torch.dtype, vectors: torch.dtype, **metadata: Any) -> Change:
    def convert(tensors: Tensors) -> Tensors:
        return {name: tensor.to(matrices if tensor.dim() > 1 else vectors) for name, tensor in tensors.items()}

    return weights(convert, **metadata)


def with_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return weights(lambda tensors: tensors | {HEAD: change(tensors[EMBEDDING].clone())})


def renamed(before: str, after: str) -> Change:
    return weights(lambda tensors: {name.replace(before, after): tensor for name, tensor in tensors.items()})


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    save_file({"lora_A.weight": torch.ones(2, 32)}, folder / "adapter_model.safetensors")


# Family, arguments of make_model, and the change.
EQUAL: dict[str, tuple[str, dict[str, object], Change]] = {
    "tied": ("qwen2", {"tied": True}, settings()),
    "a tied copy of the embedding": ("qwen2", {"tied": True}, with_head(lambda head: head)),
    "tie absent, untied": ("llama", {}, settings(tie_word_embeddings=ABSENT)),
    "the default head_dim of qwen3": (
        "qwen3",
        {"hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 128},
        settings(head_dim=ABSENT),
    ),
    "head_dim null": ("llama", {}, settings(head_dim=None)),
    "head_dim apart from hidden_size": ("llama", {"head_dim": 32}, settings()),
    "head_dim absent, experts": ("qwen3_moe", {}, settings(head_dim=ABSENT)),
    "one key head": ("llama", {"kv_heads": 1}, settings()),
    "key heads absent": ("llama", {"kv_heads": 4}, settings(num_key_value_heads=ABSENT)),
    "key heads null": ("qwen2", {"kv_heads": 4}, settings(num_key_value_heads=None)),
    "epsilon": ("llama", {}, settings(rms_norm_eps=0.01)),
    "activation absent": ("llama", {}, settings(hidden_act=ABSENT)),
    "theta in the group": ("qwen2", {}, settings(rope_parameters=ROPE)),
    "theta absent": ("qwen2", {}, settings(rope_parameters=ABSENT)),
    "old fields": ("qwen2", {}, settings(rope_parameters=ABSENT, rope_theta=500.0, rope_scaling=None)),
    "theta in two places": ("qwen2", {}, settings(rope_parameters=ROPE, rope_theta=1e6)),
    "theta beside a group without it": ("llama", {}, settings(rope_parameters=LINEAR, rope_theta=500.0)),
    "a group without type": ("llama", {}, settings(rope_parameters={"rope_theta": 500.0})),
    "two types": ("llama", {}, settings(rope_parameters={**ROPE, "type": "linear", "factor": 4.0})),
    "two groups": ("llama", {}, settings(rope_parameters=ROPE, rope_scaling=LINEAR)),
    "two groups and theta": ("llama", {}, settings(rope_parameters=ROPE, rope_theta=700.0, rope_scaling=LINEAR)),
    "two groups, plain wins": ("llama", {}, settings(rope_parameters=YARN, rope_scaling={"type": "default"})),
    "two groups, one empty": ("llama", {}, settings(rope_parameters=YARN, rope_scaling={})),
    "linear of old": (
        "llama",
        {},
        settings(rope_parameters=ABSENT, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}),
    ),
    "yarn": ("llama", {}, settings(rope_parameters=YARN)),
    "yarn of old": ("qwen2", {}, settings(rope_parameters=ABSENT, rope_theta=1e4, rope_scaling=YARN)),
    "yarn, attention_factor": ("llama", {}, settings(rope_parameters=YARN | {"attention_factor": 0.6})),
    "yarn, mscale": ("llama", {}, settings(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2})),
    "yarn, one mscale": ("llama", {}, settings(rope_parameters=YARN | {"mscale": 1.3})),
    "yarn, betas": ("llama", {}, settings(rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0})),
    "yarn, betas null": ("llama", {}, settings(rope_parameters=YARN | {"beta_fast": None, "beta_slow": None})),
    "yarn, not truncated": ("llama", {}, settings(rope_parameters=YARN | {"truncate": False})),
    "yarn, truncate null": ("llama", {}, settings(rope_parameters=YARN | {"truncate": None})),
    "yarn, full context": (
        "llama",
        {},
        settings(rope_parameters={k: v for k, v in YARN.items() if not k.startswith("original")}),
    ),
    "yarn, context above the group": (
        "llama",
        {},
        settings(rope_parameters=YARN, original_max_position_embeddings=32),
    ),
    "mrope called default": ("qwen2", {}, settings(rope_parameters=ROPE | {"mrope_section": [2, 1, 1]})),
    "a window without a switch": ("qwen3", {}, settings(sliding_window=16, use_sliding_window=ABSENT)),
    "a window of the whole context": ("mistral", {}, settings(sliding_window=ABSENT)),
    "two numbers of experts": ("qwen3_moe", {}, settings(num_experts=2, num_local_experts=4)),
    "experts in some layers": ("qwen3_moe", {"decoder_sparse_step": 2}, settings()),
    "a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}, settings()),
    "weights of experts as they are": ("qwen3_moe", {"norm_topk_prob": False}, settings(norm_topk_prob=ABSENT)),
    "fields of other families": (
        "llama",
        {},
        settings(final_logit_softcapping=30.0, embedding_multiplier=12.0, pretraining_tp=2, attention_bias=False),
    ),
    "code": ("llama", {}, settings(auto_map={"AutoModelForCausalLM": "modeling.Own"})),
    "dtype of old": ("llama", {}, settings(dtype=ABSENT, torch_dtype="float16")),
    "no generation config": ("llama", {}, lambda folder: (folder / "generation_config.json").unlink()),
    "many ends": ("llama", {}, written("generation_config.json", json.dumps({"eos_token_id": list(range(99))}))),
    "norms in float32": ("llama", {}, in_dtypes(torch.bfloat16, torch.float32)),
    "float16": ("llama", {}, in_dtypes(torch.float16, torch.float16)),
    "float64": ("llama", {}, in_dtypes(torch.float64, torch.float64)),
    "both halves": ("qwen2", {}, in_dtypes(torch.bfloat16, torch.float16)),
    "no metadata": ("llama", {}, in_dtypes(torch.float32, torch.float32, metadata=None)),
    "files": ("qwen3_moe", {}, split),
    "an index that lacks a tensor": ("llama", {}, partial(split, omitted=NORM)),
    "an index of one file": ("llama", {}, index_of_single),
    "Mistral's format too": ("mistral", {}, weights(lambda t: {NORM: t[NORM] * 9}, "consolidated.safetensors")),
    "more rows than tokens": ("qwen2", {"vocab": 461}, settings()),
    "computed buffers": (
        "llama",
        {},
        weights(lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ),
}
REFUSED: dict[str, tuple[str, dict[str, object], Change, str]] = {
    "tied by the settings alone": (
        "qwen2",
        {},
        settings(tie_word_embeddings=True),
        r"tie_word_embeddings=true in config\.json, but lm_head\.weight differs from .*; set it to false",
    ),
    "tied, one number apart": (
        "qwen2",
        {"tied": True},
        with_head(lambda head: head.index_add_(0, torch.tensor([299]), torch.ones(1, 32) * 1e-3)),
        r"lm_head\.weight differs",
    ),
    "tied, another dtype": ("qwen2", {"tied": True}, with_head(torch.Tensor.bfloat16), r"lm_head\.weight differs"),
    "untied without a head": (
        "qwen2",
        {"tied": True},
        settings(tie_word_embeddings=False),
        r"lm_head\.weight is missing; .* or set tie_word_embeddings=true",
    ),
    "tie absent, tied": ("qwen2", {"tied": True}, settings(tie_word_embeddings=ABSENT), r"lm_head\.weight is missing"),
    "tied to the head": ("llama", {"tied": True}, renamed(EMBEDDING, HEAD), r"embed_tokens\.weight is missing"),
    "a stale index": ("llama", {}, partial(split, keep=True), r"model\.safetensors, which transformers loads, and mod"),
    "a stale file": ("llama", {}, weights(lambda t: t, "model-1.safetensors"), r"and model-1\.safetensors, which SGL"),
    "an index without its files": (
        "llama",
        {},
        written(INDEX, json.dumps({"weight_map": {NORM: "model-1.safetensors"}})),
        r"and model-1\.safetensors, which SGLang loads; remove the stale one, and model\.safetensors\.index\.json if",
    ),
    "an adapter": ("llama", {}, adapter, r"and adapter_model\.safetensors, which SGLang loads"),
    "another head_dim than the default": ("qwen3", {}, settings(head_dim=ABSENT), "q_proj.weight has shape"),
    "key heads absent": ("qwen2", {"kv_heads": 4}, settings(num_key_value_heads=ABSENT), "num_key_value_heads=32"),
    "dynamic": ("llama", {}, settings(rope_parameters=LINEAR | {"rope_type": "dynamic"}), "rope_type='dynamic' is not"),
    "mrope": ("qwen2", {}, settings(rope_parameters=ROPE | {"rope_type": "mrope"}), "rope_type='mrope' is not"),
    "rope by layer": (
        "qwen2",
        {},
        settings(rope_parameters={"full_attention": ROPE}, layer_types=["full_attention"] * 2),
        r"rope_parameters\.full_attention is only for some layers",
    ),
    "half rotated": ("llama", {}, settings(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not"),
    "a window": ("mistral", {}, settings(sliding_window=16), "sliding_window=16 is not supported by mistral"),
    "a window, switch off": ("mistral", {}, settings(sliding_window=16, use_sliding_window=False), "sliding_window=16"),
    "the default window": (
        "mistral",
        {},
        settings(sliding_window=ABSENT, max_position_embeddings=9999),
        "sliding_window=4096 is not supported by mistral",
    ),
    "a window switched on": ("qwen3", {}, settings(use_sliding_window=True), "use_sliding_window=True is not"),
    "activation": ("llama", {}, settings(hidden_act="gelu"), "hidden_act='gelu' is not"),
    "biases": ("llama", {}, settings(attention_bias=True), "attention_bias=True is not"),
    "nested settings": (
        "qwen2",
        {},
        settings(text_config={"vocab_size": 300}),
        "text_config={'vocab_size': 300} is not",
    ),
    "weights elsewhere": ("llama", {}, settings(transformers_weights="x.safetensors"), "transformers_weights='x.safet"),
    "another vocabulary": ("llama", {}, settings(vocab_size=290), r"embed_tokens\.weight has shape \(300, 32\)"),
    "a layer less": ("llama", {}, settings(num_hidden_layers=1), "model.layers.1.* is unexpected"),
    "a layer more": ("llama", {}, settings(num_hidden_layers=3), "model.layers.2.* is missing"),
    "another prefix": ("llama", {}, renamed("model.", ""), "embed_tokens.weight is unexpected"),
    "other names": ("llama", {}, renamed("norm.weight", "norm.gamma"), "layernorm.gamma is unexpected"),
    "whole numbers": ("llama", {}, in_dtypes(torch.float32, torch.int32), "has dtype I32"),
    "fp8": ("llama", {}, in_dtypes(torch.float8_e4m3fn, torch.float32), "has dtype F8_E4M3"),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, object], Path], Path]:
    """Copies a model of the family, made once for the same arguments, to a folder."""
    models: dict[str, Path] = {}

    def copy(family: str, arguments: dict[str, object], folder: Path) -> Path:
        key = repr((family, arguments))
        if key not in models:
            models[key] = make_model(tmp_path_factory.mktemp("made"), family=family, **(SMALL | arguments))
        return Path(shutil.copytree(models[key], folder))

    return copy


@pytest.mark.processes
@pytest.mark.parametrize("name", EQUAL)
@torch.no_grad()
def test_what_transformers_loads_is_loaded(
    one_rank: Config, make: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    family, arguments, change = EQUAL[name]
    change(folder := make(family, arguments, tmp_path / "model"))
    tokens = torch.randint(3, 290, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    one_rank.model.path = str(folder)
    policy = hf.unwrap(policies.load(network_spec(one_rank))[0]).eval()
    bounds = torch.arange(0, tokens.numel() + 1, LENGTH, dtype=torch.int32)
    packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)
    hidden = policy(
        tokens.reshape(1, -1), torch.arange(LENGTH).repeat(SEQUENCES)[None], None, packed_seq_params=packing
    )
    logits = (hidden @ policy.head.T).unflatten(1, tokens.shape)[0]
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert (logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_differ_is_refused(make: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """By the reader of the shape and that of the tensors, which all commands share."""
    family, arguments, change, message = REFUSED[name]
    change(folder := make(family, arguments, tmp_path / "model"))
    with pytest.raises(ConfigError, match=message) as refusal:
        HFTensors(folder, hf.read_shape(folder))
    assert "\n" not in str(refusal.value)


def test_values_of_mixed_dtypes_are_kept(make: Callable[..., Path], tmp_path: Path) -> None:
    dtypes = {
        "a": (in_dtypes(torch.bfloat16, torch.bfloat16), torch.bfloat16),
        "b": (in_dtypes(torch.bfloat16, torch.float32), torch.float32),
        "c": (in_dtypes(torch.bfloat16, torch.float16), torch.float32),
    }
    for name, (change, dtype) in dtypes.items():
        change(folder := make("llama", {}, tmp_path / name))
        assert HFTensors(folder, hf.read_shape(folder)).dtype is dtype


def test_defaults_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for family, defaults in hf_config._DEFAULTS.items():
        values = {field.name: field.default for field in fields(CONFIG_MAPPING[family])}
        assert {name: values[name] for name in defaults} == defaults
        assert values["tie_word_embeddings"] is False and not values.get("norm_topk_prob", False)
        assert values.get("sliding_window") is None or "sliding_window" in defaults or "use_sliding_window" in values
