"""TransformerEngine's attention, with packed trees; imported only if TransformerEngine is installed."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from megatron_collab.trainer.megatron.paths import PackedTrees, attend


class EngineAttention(TEDotProductAttention):
    """Megatron's attention; for PackedTrees the kernel for fewer queries than keys, causal from the bottom right."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """query [t, n, d], key and value [t, g, d], rotated -> [t, n * d]."""
        packing = options.get("packed_seq_params")
        if not isinstance(packing, PackedTrees):
            return super().forward(query, key, value, *arguments, **options)

        paths = packing.paths

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return DotProductAttention.forward(
                self,
                q,
                k,
                v,
                qkv_format="thd",
                attn_mask_type="padding_causal_bottom_right",
                cu_seqlens_q=paths.queries,
                cu_seqlens_kv=paths.keys,
                max_seqlen_q=paths.most_queries,
                max_seqlen_kv=paths.most_keys,
            )

        return attend(query, key, value, paths.rows, attention)


def fill_in(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """TransformerEngine's layers with EngineAttention; modifies and returns `block`."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = EngineAttention
    return block
