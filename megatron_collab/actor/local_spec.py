"""Megatron's transformer layer without TransformerEngine: its own linear layers and two modules of ours.

The stock fallbacks refuse sequence parallelism (norm) and packed sequences (attention).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm over the last dimension: normalised in float32, scaled in the input's dtype, as Hugging Face does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees a part of the sequence: Megatron sums the gradients of parameters marked so.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * F.rms_norm(x.float(), self.normalized_shape, eps=self.eps).to(x.dtype)


class CausalAttention(MegatronModule):
    """Causal scaled dot-product attention; with packed sequences, causal within each."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs TransformerEngine")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]; packed: [t, n, d] -> [t, n * d]."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        parts = [self._attend(q[:, start:end], k[:, start:end], v[:, start:end]) for start, end in pairwise(bounds)]
        return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def block(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
