"""TransformerEngine's layers on tensors without values: what its Python reads from them, and what it keeps.

For a rehearsal. Its compiled part are the reference kernels, which give shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_collab.patches.megatron import with_reference_kernels

_products: dict[Any, Any] = {}  # the workspaces of products, of one matrix and of grouped ones
_data_ptr = torch.UntypedStorage.data_ptr


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """What cannot work on tensors without values, as (owner, name, stand-in); nothing without TransformerEngine."""
    if not with_reference_kernels():
        return
    from transformer_engine.pytorch import GroupedLinear
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.ops.op import BasicOperation

    # By their pointers it sees which of queries, keys and values lie in one tensor.
    yield torch.UntypedStorage, "data_ptr", _address
    yield GroupedLinear, "forward", _of_real_counts(GroupedLinear.forward)
    yield gemm, "get_cublas_workspace", _kept(gemm.get_cublas_workspace.__wrapped__)
    for module in (TransformerEngineBaseModule, BasicOperation):
        yield module, "get_extra_state", _no_scales


def _address(storage: torch.UntypedStorage) -> int:
    return storage._cdata if storage.device.type == "meta" else _data_ptr(storage)


def _of_real_counts(forward: Any) -> Any:
    """`forward` of the grouped experts, which makes a tensor of how many tokens each has, and reads it again."""

    def run(experts: Any, tokens: Tensor, counts: Any, *rest: Any, **options: Any) -> Any:
        with _disable_current_modes():
            counts = torch.tensor(counts, dtype=torch.int64)
        return forward(experts, tokens, counts, *rest, **options)

    return run


def _kept(make: Any) -> Any:
    """`make`, with what it has made in _products."""

    def get(*key: Any) -> Any:
        if key not in _products:
            _products[key] = make(*key)
        return _products[key]

    return get


def _no_scales(module: torch.nn.Module) -> Tensor:
    """What a module saves without FP8, in place of its scales and their history, which it pickles."""
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8)


def on_copies(chunks: Iterable[torch.nn.Module], claim: Callable[[Iterator[Tensor]], None]) -> None:
    """Call `claim` with the copies of weights in FP8, and their scales, that a module keeps from a pass on."""

    def passed(module: Any, *_: Any) -> None:
        for weight in module._fp8_workspaces.values():
            claim(part for part in vars(weight).values() if isinstance(part, Tensor))

    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "_fp8_workspaces"):
            module.register_forward_hook(passed)


def workspaces() -> Iterator[Tensor]:
    """What it keeps for the life of a process: workspaces of products, and for each shape of weight what stands for
    its gradient, which is added to the buffer of gradients."""
    if with_reference_kernels():
        from transformer_engine.pytorch.module import base

        yield from [*tree_leaves(_products), *base._dummy_wgrads.values()]


def forget() -> None:
    """The rank is over, and what TransformerEngine keeps for the life of a process is not the next one's."""
    if with_reference_kernels():
        from transformer_engine.pytorch.module import base
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        base._dummy_wgrads.clear()
        _products.clear()
