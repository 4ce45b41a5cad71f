"""Reads the fields of a Hugging Face config.json that change the computation.

Imports no framework. Raises ValueError for unsupported settings, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.runtime import files, hub
from megatron_collab.settings import ConfigError, require
from megatron_collab.settings.documents import parse_json

# Features of a family, by model_type: biases on q/k/v, RMSNorm on the heads of q and k, experts, and whether its
# sliding window is off unless use_sliding_window is set.
FAMILIES: Mapping[str, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset(),
    "qwen2": frozenset({"qkv_bias", "window_switch"}),
    "qwen3": frozenset({"qk_norm", "window_switch"}),
    "qwen3_moe": frozenset({"qk_norm", "experts", "window_switch"}),
}
# transformers' defaults for absent fields, if they depend on the family.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
}

# Settings of config.json that change the computation, with the values that match the implementation here.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_dropout": (None, 0, 0.0),
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "text_config": (None,),
    "transformers_weights": (None,),
    "use_sliding_window": (None, False),
}
# Scalings of the rotary embedding: their numbers, and those that have a default.
_SCALINGS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (("factor",), ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")),
}
_MAX_NETWORKS = 100_000  # feed-forward networks (MLPs or experts): ten times as many as any model has


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the base of its wavelengths and, for longer contexts, their `scaling` by rope_type.

    `scaling` is linear (arXiv 2306.15595), llama3 or yarn (arXiv 2309.00071), in the names of transformers; else None.
    """

    theta: float
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Experts:
    """Experts of the layers `layers`, each of width `ffn`; the router selects `per_token` of `count` per token.

    `normalized`: the weights of the selected experts are divided by their sum.
    """

    count: int
    per_token: int
    ffn: int
    normalized: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, and the features of its family."""

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
        """Parse the dictionary of config.json; raises ValueError if a field is missing, wrong or not supported."""
        name = str(hf.get("model_type"))
        if name not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(f"config.json: unknown model family model_type={name!r}; known are {known}")
        hf = {**_DEFAULTS[name], **hf}
        heads, hidden = _count(hf, "num_attention_heads"), _count(hf, "hidden_size")
        kv_heads = _count(hf, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        layers, expert_count = _count(hf, "num_hidden_layers"), _expert_count(hf) if "experts" in FAMILIES[name] else 1
        if isinstance(expert_count, int) and layers * expert_count > _MAX_NETWORKS:
            experts = f" of {expert_count} experts" if expert_count > 1 else ""
            raise ValueError(
                f"config.json: num_hidden_layers={layers}{experts}: no model has more than {_MAX_NETWORKS} networks"
            )
        shape = cls(
            family=name,
            layers=layers,
            hidden=hidden,
            ffn=_count(hf, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_count(hf, "head_dim", hidden // heads),
            vocab=_count(hf, "vocab_size"),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias="qkv_bias" in FAMILIES[name],
            qk_norm="qk_norm" in FAMILIES[name],
            norm_eps=_number(hf, "rms_norm_eps"),
            rope=_rope(hf),
            max_positions=_count(hf, "max_position_embeddings"),
            experts=_experts(hf) if "experts" in FAMILIES[name] else None,
        )
        _check_neutral(hf, shape)
        return shape


def read(file: Path) -> ModelShape:
    """The shape in `file`, a config.json; raises a one-line ValueError if it is unreadable or not supported."""
    return ModelShape.from_hf(_settings_in(file))


def read_policy(file: Path) -> ModelShape:
    """As `read`, for a model that is trained and served: raises ValueError also if SGLang runs another architecture."""
    hf = _settings_in(file)
    shape, architectures = ModelShape.from_hf(hf), _collection(hf, "architectures", list, "list")
    trained = f"{shape.family.title().replace('_', '')}ForCausalLM"
    if architectures and architectures[0] != trained:
        message = f"SGLang runs architectures={architectures[0]}, the trainer {trained}; correct it"
        raise ValueError(f"config.json: {message}")
    return shape


def shape_of_setting(setting: str, path: str, described: Path | None = None, hint: str = "") -> ModelShape:
    """The shape of the model `path` of a setting, as `read_policy`, from its config.json or the file `described`.

    `hint`: the end of the message if there is no such file. Raises ConfigError.
    """
    file = described or hub.folder(path) / "config.json"
    out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
    require(file.is_file(), f"{setting}={path}: no config.json there; {out}{hint}")
    try:
        return read_policy(file)
    except ValueError as error:
        raise ConfigError(f"{setting}={path}: {error}; give another model") from error


def _settings_in(file: Path) -> dict[str, Any]:
    try:
        hf = parse_json(files.read_text(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json: cannot be read as JSON ({error})") from error
    if not isinstance(hf, dict):
        raise ValueError(f"config.json: holds a {type(hf).__name__}, not the settings of a model")
    return hf


def _value(settings: Mapping[str, Any], name: str, default: Any, group: str = "") -> Any:
    value = settings.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {group}{name} is missing")
    return value


def _count(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _value(settings, name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {name}={value!r} is not a whole number above 0")
    return value


def _number(settings: Mapping[str, Any], name: str, default: float | None = None, group: str = "") -> float:
    value = _value(settings, name, default, group)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {group}{name}={value!r} is not a number above 0")
    return float(value)


def _collection(settings: Mapping[str, Any], name: str, kind: type, noun: str) -> Any:
    value = settings.get(name) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"config.json: {name}={value!r} is not a {noun}")
    return value


def _check_neutral(hf: Mapping[str, Any], shape: ModelShape) -> None:
    for field, neutral in _NEUTRAL.items():
        if hf.get(field) not in neutral:
            raise ValueError(f"config.json: {field}={hf[field]!r:.60} is not supported; only {neutral[-1]!r} is")
    has_switch = "window_switch" in FAMILIES[shape.family]
    if not has_switch and _count(hf, "sliding_window", shape.max_positions) < shape.max_positions:
        raise ValueError(
            f"config.json: sliding_window={hf['sliding_window']!r} is not supported by {shape.family}; only null is"
        )
    if set(_collection(hf, "layer_types", list, "list")) - {"full_attention"}:
        raise ValueError("config.json: layer_types has layers that are not full_attention; these are not supported")


def _rope(hf: Mapping[str, Any]) -> Rope:
    """transformers 5 stores base and scaling in rope_parameters, which a rope_scaling of older versions replaces."""
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope, group = _collection(hf, field, dict, "group of settings"), f"{field}."
    if layer_type := next((name for name, value in rope.items() if isinstance(value, dict)), None):
        raise ValueError(f"config.json: {group}{layer_type} is only for some layers, which is not supported")

    def number(name: str, default: float | None = None) -> float:
        return _number(rope, name, default, group)

    theta = number("rope_theta", _number(hf, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: {group}partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
    if kind == "default":
        return Rope(theta)
    if str(kind) not in _SCALINGS:
        raise ValueError(
            f"config.json: {group}rope_type={kind!r} is not supported; default, linear, llama3 and yarn are"
        )
    required, optional = _SCALINGS[kind]
    scaling = {name: number(name) for name in (*required, *(name for name in optional if rope.get(name) is not None))}
    if kind == "linear":
        return Rope(theta, {"rope_type": kind, **scaling})
    # Same precedence as transformers: the top-level field, then the one in the scaling, then the full context.
    name = "original_max_position_embeddings"
    positions = _count(hf, name, int(number(name, _count(hf, "max_position_embeddings"))))
    truncate = {"truncate": bool(rope["truncate"])} if "truncate" in rope else {}
    return Rope(theta, {"rope_type": kind, **scaling, name: positions, **truncate})


def _expert_count(hf: Mapping[str, Any]) -> Any:
    return hf.get("num_local_experts", hf.get("num_experts"))  # transformers 5 writes the first name and reads both


def _experts(hf: Mapping[str, Any]) -> Experts | None:
    """The experts; None if every layer is dense."""
    count = _value({"num_experts": _expert_count(hf)}, "num_experts", None)
    if type(count) is not int or count < 0:
        raise ValueError(f"config.json: num_experts={count!r} is not a whole number")
    per_token, ffn = _count(hf, "num_experts_per_tok"), _count(hf, "moe_intermediate_size")
    dense, step = _collection(hf, "mlp_only_layers", list, "list"), _count(hf, "decoder_sparse_step", 1)
    layers = tuple(layer for layer in range(hf["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0)
    if not count or not layers:
        return None
    normalized = bool(hf.get("norm_topk_prob", False))
    if per_token > count:
        raise ValueError(f"config.json: num_experts_per_tok={per_token}: the model has only {count} experts")
    if per_token == 1 and normalized:
        raise ValueError(
            "config.json: num_experts_per_tok=1 with norm_topk_prob=true is not supported: the weight of the one "
            "expert is always 1, and its router could not learn"
        )
    return Experts(count, per_token, ffn, normalized, layers)
