"""Lets `--enable-deterministic-inference` run on CPU, so that a request's seed decides its sample.

SGLang honours `sampling_seed` in that mode only, and refuses it on CPU for want of batch-invariant kernels.
On one thread of a CPU two things depend on the batch: a matrix product of very few rows takes another path than
one of many, which padding the rows closes; and attention rounds a token differently when it is decoded and when it
is read as part of a prompt, which `attention` closes. What the prefix cache holds then does not show either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

# The fewest rows from which a row of a float32 product no longer depends on how many rows there are.
MIN_ROWS = 4

_linear = F.linear
_matmul = torch.matmul


def allow() -> None:
    """Register an exact torch_native as a deterministic backend and supply the CPU's batch-invariant mode."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    register_attention_backend("torch_native")(exact_attention)
    batch_invariant_ops.enable_batch_invariant_mode = enable_batch_invariant_mode


def exact_attention(runner: Any) -> Any:
    """SGLang's backend for its model runner; imported only where a server needs it."""
    from megatron_collab.inference.cpu.backend import ExactAttentionBackend

    return ExactAttentionBackend(runner)


def enable_batch_invariant_mode() -> None:
    """Have every product in this process computed row by row alike."""
    vars(F)["linear"] = linear
    vars(torch)["matmul"] = matmul


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of x [rows, in]; a row's result does not depend on the other rows."""
    rows = x.shape[0]
    if x.dim() != 2 or rows >= MIN_ROWS:
        return _linear(x, weight, bias)
    return _linear(F.pad(x, (0, 0, 0, MIN_ROWS - rows)), weight, bias)[:rows]


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` of x [rows, in] and y [in, out]; a row's result does not depend on the other rows."""
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] >= MIN_ROWS:
        return _matmul(x, y)
    return _matmul(F.pad(x, (0, 0, 0, MIN_ROWS - x.shape[0])), y)[: x.shape[0]]
