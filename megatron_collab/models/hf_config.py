"""Reads config.json of a Hugging Face folder, as far as it changes what is computed.

Nothing here imports a framework. What is not supported is named and refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """What sets a model family apart: biases on q/k/v, RMSNorm on the heads of q and k, experts."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
}

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)

_COUNTS = (
    "decoder_sparse_step",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "sliding_window",
    "vocab_size",
)

# Settings of config.json that change the computation, with the values that leave it as implemented here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
}


@dataclass(frozen=True)
class Linear:
    """Position interpolation (arXiv 2306.15595): all positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: long waves divided by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071); `attention_factor` multiplies the rotated queries and keys."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_positions: int


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base of its wavelengths, and how these are stretched for longer contexts."""

    theta: float
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Experts:
    """Experts of the layers `layers`, each of width `ffn`; `per_token` of `count` are taken for a token.

    `normalised`: the weights of the taken ones are divided by their sum.
    """

    count: int
    per_token: int
    ffn: int
    normalised: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, and what its family adds."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    experts: Experts | None = None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelShape:
        """From the dictionary in config.json; ValueError names a field that is missing, wrong or not supported."""
        name = str(hf.get("model_type"))
        if name not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(f"config.json: unknown model family model_type={name!r}; known are {known}")
        family = FAMILIES[name]
        _require(hf, *_REQUIRED)
        _check_types(hf)
        _check_neutral(hf, name)
        heads = hf["num_attention_heads"]
        kv_heads = hf.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        return cls(
            family=name,
            layers=hf["num_hidden_layers"],
            hidden=hf["hidden_size"],
            ffn=hf["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            vocab=hf["vocab_size"],
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=_number(hf, "rms_norm_eps"),
            rope=_rope(hf),
            max_positions=hf["max_position_embeddings"],
            experts=_experts(hf) if family.experts else None,
        )


def read(file: Path) -> ModelShape:
    """The shape in `file`, a config.json; ValueError in one line if it cannot be read or is not supported."""
    try:
        hf = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json: cannot be read as JSON ({error})") from error
    if not isinstance(hf, dict):
        raise ValueError(f"config.json: holds a {type(hf).__name__}, not the settings of a model")
    return ModelShape.from_hf(hf)


def _require(settings: Mapping[str, Any], *names: str, group: str = "") -> None:
    absent = [name for name in names if settings.get(name) is None]
    if absent:
        raise ValueError(f"config.json: {group}{absent[0]} is missing")


def _check_types(hf: Mapping[str, Any]) -> None:
    for field in _COUNTS:
        value = hf.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"config.json: {field}={value!r} is no whole number greater than 0")
    for kind, what, fields in (
        (list, "list", ("layer_types", "mlp_only_layers")),
        (dict, "group of settings", ("rope_parameters", "rope_scaling")),
    ):
        for field in fields:
            if not isinstance(hf.get(field) or kind(), kind):
                raise ValueError(f"config.json: {field}={hf[field]!r} is no {what}")


def _number(settings: Mapping[str, Any], name: str, default: float | None = None, group: str = "") -> float:
    value = settings.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {group}{name}={value!r} is no number greater than 0")
    return float(value)


def _check_neutral(hf: Mapping[str, Any], family: str) -> None:
    for field, neutral in _NEUTRAL.items():
        if hf.get(field) not in neutral:
            raise ValueError(f"config.json: {field}={hf[field]!r} is not supported; only {neutral[-1]!r} is")
    # Qwen writes a window that use_sliding_window then switches off; elsewhere the number alone decides.
    window = hf.get("sliding_window") if "use_sliding_window" not in hf else None
    if window is not None and window < hf["max_position_embeddings"]:
        raise ValueError(f"config.json: sliding_window={window!r} is not supported by {family}; only null is")
    if set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("config.json: layer_types has layers that are not full_attention; these are not supported")


def _rope(hf: Mapping[str, Any]) -> Rope:
    """transformers 5 keeps base and scaling in rope_parameters, older versions apart."""
    field = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = dict(hf.get(field) or {})
    theta = _number(rope, "rope_theta", _number(hf, "rope_theta", 10000.0), f"{field}.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: {field}.partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        return Rope(theta)
    # As transformers reads it: a field beside the scaling comes first, the whole context is the last resort.
    name = "original_max_position_embeddings"
    positions = hf.get(name) or int(_number(rope, name, hf["max_position_embeddings"], f"{field}."))
    if kind == "yarn":
        _require(rope, "factor", group=f"{field}.")
        return Rope(theta, _yarn(rope, positions, f"{field}."))
    if kind == "linear":
        _require(rope, "factor", group=f"{field}.")
        return Rope(theta, Linear(_number(rope, "factor", group=f"{field}.")))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        _require(rope, *names, group=f"{field}.")
        factor, low, high = (_number(rope, name, group=f"{field}.") for name in names)
        return Rope(theta, Llama3(factor, low, high, positions))
    raise ValueError(f"config.json: {field}.rope_type={kind!r} is not supported; default, linear, llama3 and yarn are")


def _yarn(rope: Mapping[str, Any], positions: int, group: str) -> Yarn:
    factor = _number(rope, "factor", group=group)

    def magnitude(scale: float = 1.0) -> float:
        """0.1 ln(factor) + 1, the paper's fit; `scale` is an addition of later models."""
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = magnitude()
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = (_number(rope, name, group=group) for name in ("mscale", "mscale_all_dim"))
        usual = magnitude(numerator) / magnitude(denominator)
    return Yarn(
        factor=factor,
        attention_factor=_number(rope, "attention_factor", usual, group),
        beta_fast=_number(rope, "beta_fast", 32.0, group),
        beta_slow=_number(rope, "beta_slow", 1.0, group),
        truncate=bool(rope.get("truncate", True)),
        original_positions=positions,
    )


def _experts(hf: Mapping[str, Any]) -> Experts | None:
    """The experts; None if every layer is dense."""
    count = hf.get("num_local_experts", hf.get("num_experts"))  # transformers 5 writes the first, reads both
    _require({**hf, "num_experts": count}, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    if type(count) is not int or count < 0:
        raise ValueError(f"config.json: num_experts={count!r} is no whole number")
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    layers = tuple(layer for layer in range(hf["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0)
    if not count or not layers:
        return None
    per_token, normalised = hf["num_experts_per_tok"], bool(hf.get("norm_topk_prob", False))
    if per_token > count:
        raise ValueError(f"config.json: num_experts_per_tok={per_token}: the model has only {count} experts")
    if per_token == 1 and normalised:
        raise ValueError(
            "config.json: num_experts_per_tok=1 with norm_topk_prob=true is not supported: the weight of the one "
            "expert is always 1, and its router could not learn"
        )
    return Experts(count, per_token, hf["moe_intermediate_size"], normalised, layers)
