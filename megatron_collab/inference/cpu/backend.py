"""A batch-invariant attention backend for SGLang on CPU: caching does not change a sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from megatron_collab.inference.cpu.attention import BLOCK, attend, calls_of


class ExactAttentionBackend(TorchNativeAttnBackend):
    """SGLang's torch_native backend for causal self-attention, computed by `attend`.

    Queries and `output` are [tokens, H, D], one request after the other; the caches are [slots, K, D], and
    `req_to_token[request, position]` is the slot of a token.
    """

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        _refuse(encoder_lens, options)
        done = 0
        for pieces in calls_of(extend_prefix_lens.tolist(), extend_seq_lens.tolist()):
            first, lengths = (torch.tensor(column) for column in list(zip(*pieces, strict=True))[1:])
            requests = req_pool_indices[[piece.request for piece in pieces]]
            slots = _slots(req_to_token, requests, int((first + lengths).max()))
            exists = torch.arange(int(lengths.max())) < lengths[:, None]  # the others are padding
            end = done + int(lengths.sum())
            queries = query.new_zeros(*exists.shape, *query.shape[1:])
            queries[exists] = query[done:end]
            keys, values = _gather(k_cache, slots), _gather(v_cache, slots)
            output[done:end] = attend(queries, keys, values, first, options["scaling"])[exists]
            done = end
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        _refuse(encoder_lens, options)
        slots = _slots(req_to_token, req_pool_indices, int(seq_lens.max()))
        keys, values = _gather(k_cache, slots), _gather(v_cache, slots)
        output[:] = attend(query[:, None], keys, values, seq_lens - 1, options["scaling"])[:, 0]
        return output


def _refuse(encoder_lens: torch.Tensor | None, options: dict[str, Any]) -> None:
    if encoder_lens is not None or options["is_cross_attn"] or options["sliding_window_size"] is not None:
        raise NotImplementedError("cross attention and sliding windows are not computed exactly")


def _whole_blocks(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _slots(req_to_token: torch.Tensor, requests: torch.Tensor, length: int) -> torch.Tensor:
    """The slots of the first `length` positions, [requests, length rounded up to BLOCK]; slots beyond are arbitrary."""
    slots = req_to_token[requests, : _whole_blocks(length)]
    return F.pad(slots, (0, _whole_blocks(length) - slots.shape[1]))


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of `cache` [slots, K, D] as [requests, positions, K, D]."""
    return cache.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])
