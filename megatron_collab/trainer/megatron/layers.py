"""Megatron's transformer layer without TransformerEngine, and rotary embeddings (arXiv 2104.09864) of every kind.

Megatron's linear layers are used unchanged. Its norm does not support sequence parallelism, its attention no packed
sequences: both are replaced here. Scaled wavelengths are computed by transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_collab.models.hf_config import Rope
from megatron_collab.trainer.megatron.paths import PackedTrees, Paths, attend


@dataclass
class Rotated(PackedSeqParams):
    """Packed sequences or branches of trees, their lengths, and the rotation of each token.

    `cos` and the signed `sin` are [t, 1, d] in the model's dtype. For packed trees: `paths`, `seen` (number of keys of
    each branch's path) and `masks`, added to its scores, [queries, keys]; None if its path is the branch itself.
    """

    lengths: list[int] = field(kw_only=True)
    cos: Tensor = field(kw_only=True)
    sin: Tensor = field(kw_only=True)
    paths: Paths | None = None
    seen: list[int] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)


def rotated(packing: PackedSeqParams, positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> Rotated:
    """`packing` with the rotation to `positions` int64 [1, t]; computed once for all layers."""
    angles = positions.reshape(-1, 1, 1) * inverse_frequencies.to(positions.device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    turns = {"cos": torch.cat((cos, cos), -1), "sin": torch.cat((-sin, sin), -1)}
    if not isinstance(packing, PackedTrees):
        return Rotated(**vars(packing), **turns, lengths=_sizes(packing.cu_seqlens_q))
    lengths, seen = _sizes(packing.paths.queries), _sizes(packing.paths.keys)
    masks = [
        None if q == k else torch.full((q, k), -math.inf, dtype=dtype, device=cos.device).triu(k - q + 1)
        for q, k in zip(lengths, seen, strict=True)
    ]
    return Rotated(**vars(packing), **turns, lengths=lengths, seen=seen, masks=masks)


def _sizes(bounds: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds.tolist())]


class RotaryTable(RotaryEmbedding):
    """Megatron's angles for the fused rotation, float32 [longest, 1, 1, d], in a single table.

    Megatron would keep a table for each of the last 32 lengths: 2 GiB for sequences of up to 128k tokens. The rotation
    of a token reads the row of its position, so the table of the longest micro-batch so far serves all.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__(2 * len(inverse_frequencies), rotary_percent=1.0, use_cpu_initialization=True)
        self.inv_freq = inverse_frequencies
        self._table = torch.empty(0)

    def forward(self, max_seq_len: int, **_: Any) -> Tensor:
        if len(self._table) < max_seq_len:
            self._table = self.get_emb(max_seq_len)
        return self._table


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm over the last dimension: normalized in float32, scaled in the input's dtype, as in Hugging Face."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees a part of the sequence: Megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), self.normalized_shape, eps=self.eps).to(x.dtype)


class CausalAttention(MegatronModule):
    """Rotary embedding and causal scaled dot-product attention within each packed sequence, or along each path."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Rotated,
        **_: Any,
    ) -> Tensor:
        """query [t, n, d], key and value [t, g, d], not yet rotated -> [t, n * d]."""
        packing = packed_seq_params
        query, key = _rotate(query, packing), _rotate(key, packing)
        if packing.paths is None:
            return self._attend(query, key, value, packing.lengths, packing.lengths, [None] * len(packing.lengths))

        def along_paths(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(query, key, value, packing.lengths, packing.seen, packing.masks)

        return attend(query, key, value, packing.paths.rows, along_paths)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        seen: list[int],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """Attention of each sequence's `lengths` queries to `seen` keys; mask None: causal, as many keys as queries."""
        # Unlike slicing, splitting needs no zero-filled gradient buffer per sequence.
        q, k, v = (
            x.transpose(0, 1)[None].split(sizes, dim=2) for x, sizes in ((query, lengths), (key, seen), (value, seen))
        )
        attention = partial(F.scaled_dot_product_attention, scale=self.scale, enable_gqa=True)
        parts = [
            attention(*qkv, attn_mask=mask, is_causal=mask is None)[0]
            for qkv, mask in zip(zip(q, k, v, strict=True), masks, strict=True)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def _rotate(x: Tensor, packing: Rotated) -> Tensor:
    """Rotate each pair of dimensions (i, i + d/2) of x [t, n, d] by its angle."""
    return torch.addcmul(x * packing.cos, x.roll(x.shape[-1] // 2, dims=-1), packing.sin)


def fill_in(block: TransformerBlockSubmodules, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's local layers with RMSNorm and CausalAttention; modifies and returns `block`."""
    for layer in block.layer_specs:
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
        attention = modules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if modules.mlp.func is MoELayer:
            # Keep this norm's name in checkpoints as with TransformerEngine, which cannot fuse it into the experts.
            modules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    block.layer_norm = RMSNorm
    return block


def rotation(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of a head's dimensions, float32 [head_dim / 2]; factor of queries and keys."""
    if rope.scaling is None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return 1.0 / rope.theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes a second to import

    # Not a configuration of transformers, which warns of unusual values.
    config = SimpleNamespace(
        rope_parameters={"rope_theta": rope.theta, **rope.scaling},
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.scaling["rope_type"]](config, torch.device("cpu"))
