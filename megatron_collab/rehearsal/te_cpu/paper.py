"""Memory that TransformerEngine's layers keep on fake tensors, for a rehearsal.

Their stand-ins are in patches/rehearsal.py. Reference kernels return only shapes for fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_collab.patches.megatron import with_reference_kernels
from megatron_collab.patches.rehearsal import products


def parts(weight: Any) -> list[Tensor]:
    """The tensors of a weight: in FP8 its row-wise and column-wise data and scales, else the weight itself."""
    names = [name for name, _ in getattr(weight, "_INNER_TENSORS", ())]
    tensors = [getattr(weight, name) for name in names] if names else [weight]
    return [part for part in tensors if part is not None]


def claim_fp8_copies(chunks: Iterable[torch.nn.Module], claim: Callable[[list[Tensor]], None]) -> None:
    """Call `claim` with the FP8 copies of weights, and their scales, that modules keep after a forward pass."""

    def passed(module: Any, *_: Any) -> None:
        for weight in module._fp8_workspaces.values():
            claim(parts(weight))

    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "_fp8_workspaces"):
            module.register_forward_hook(passed)


def workspaces() -> Iterator[Tensor]:
    """Tensors kept for the lifetime of the process: workspaces of products, and a dummy gradient per shape of weight
    (the real one is added to the gradient buffer)."""
    if with_reference_kernels():
        from transformer_engine.pytorch.module import base

        yield from [*tree_leaves(products), *base._dummy_wgrads.values()]


def forget() -> None:
    """After a rank: drop the state that TransformerEngine keeps per process; the next rank starts without it."""
    if with_reference_kernels():
        from transformer_engine.pytorch.module import base
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        base._dummy_wgrads.clear()
        products.clear()
