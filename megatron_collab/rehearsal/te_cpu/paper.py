"""TransformerEngine's layers on fake tensors, for a rehearsal: values that its Python reads, and memory that it keeps.

Its compiled part are the reference kernels, which return only shapes for fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_collab.patches.megatron import with_reference_kernels

_products: dict[Any, Any] = {}  # the workspaces of single and grouped products
_data_ptr = torch.UntypedStorage.data_ptr


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of functions that need real values; empty without the reference kernels."""
    if not with_reference_kernels():
        return
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
    from transformer_engine.pytorch import GroupedLinear
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.ops.op import BasicOperation

    # It compares pointers to see whether queries, keys and values share a tensor.
    yield torch.UntypedStorage, "data_ptr", _address
    yield GroupedLinear, "forward", _with_real_counts(GroupedLinear.forward)
    yield gemm, "get_cublas_workspace", _cached(gemm.get_cublas_workspace.__wrapped__)
    for module in (TransformerEngineBaseModule, BasicOperation):
        yield module, "get_extra_state", _no_scales
    yield TEGroupedLinear, "_split_extra_state", lambda experts, state: [state] * experts.num_gemms
    yield FakeTensor, "__torch_dispatch__", _dispatch_parts(FakeTensor.__torch_dispatch__)


def _address(storage: torch.UntypedStorage) -> int:
    return storage._cdata if storage.device.type == "meta" else _data_ptr(storage)


def _with_real_counts(forward: Any) -> Any:
    """`forward` of the grouped experts with a real tensor of token counts, whose values it reads."""

    def run(experts: Any, tokens: Tensor, counts: Any, *arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            counts = torch.tensor(counts, dtype=torch.int64)
        return forward(experts, tokens, counts, *arguments, **options)

    return run


def _cached(make: Any) -> Any:
    """`make` with a cache, _products."""

    def get(*key: Any) -> Any:
        if key not in _products:
            _products[key] = make(*key)
        return _products[key]

    return get


def _no_scales(module: torch.nn.Module) -> Tensor:
    """A module's extra state without FP8, instead of scales and their history, which it would pickle."""
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8)


def _dispatch_parts(dispatch: Any) -> classmethod[Any, Any, Any]:
    """`dispatch` of a fake tensor that treats the parts of a quantized tensor, which calls it for them, like others.

    If the quantized tensor itself is an argument, torch is calling, and dispatch defers to the quantized tensor.
    """

    def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        quantized_argument = any(hasattr(leaf, "_INNER_TENSORS") for leaf in leaves)
        quantized_type = any(hasattr(kind, "_INNER_TENSORS") for kind in types)
        if quantized_type and not quantized_argument:
            return func(*args, **kwargs or {})
        return dispatch.__func__(cls, func, types, args, kwargs or {})

    return classmethod(run)


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

        yield from [*tree_leaves(_products), *base._dummy_wgrads.values()]


def forget() -> None:
    """After a rank: drop the state that TransformerEngine keeps per process; the next rank starts without it."""
    if with_reference_kernels():
        from transformer_engine.pytorch.module import base
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        base._dummy_wgrads.clear()
        _products.clear()
