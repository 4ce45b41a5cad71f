"""Replaces `sgl_kernel` on CPU: the two kernels that SGLang calls there, in plain torch."""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.4.10"

_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
) -> None:
    """Write the consecutive pieces of `out_cache_loc`, one per request, to `req_to_token[request, start:end]`."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        piece = out_cache_loc[offset : offset + last - first]
        req_to_token[row, first:last] = piece.to(req_to_token.dtype)
        offset += last - first


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of the 16 bytes (seed, position, column); uint32 of shape [n, m].

    `seed` uint64 [n], `positions` [n] and `columns` [m] integers. Computed in int64: products of two 32-bit
    numbers wrap around modulo 2**64, which does not affect their low 32 bits.
    """
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _mix(state, block)
    state = _mix(state[:, None], (columns.to(torch.int64) & _MASK)[None, :])
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state ^= state >> shift
        state.mul_(factor).bitwise_and_(_MASK)
    state ^= state >> 16
    return state.to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = (_rotate(block * 0xCC9E2D51 & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Any:
    """A function that raises NotImplementedError when called: other kernels are imported but never called on CPU."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: not available on CPU")

    return absent
