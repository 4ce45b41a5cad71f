"""TransformerEngine's layers on tensors without values: what its Python reads from them, and what it keeps.

For a rehearsal. Its compiled part are the reference kernels, which give shapes alone.
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

_products: dict[Any, Any] = {}  # the workspaces of products, of one matrix and of grouped ones
_data_ptr = torch.UntypedStorage.data_ptr


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """What cannot work on tensors without values, as (owner, name, stand-in); nothing without TransformerEngine."""
    if not with_reference_kernels():
        return
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
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
    yield TEGroupedLinear, "_split_extra_state", lambda experts, state: [state] * experts.num_gemms
    yield FakeTensor, "__torch_dispatch__", _of_a_part(FakeTensor.__torch_dispatch__)


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


def _of_a_part(dispatch: Any) -> classmethod[Any, Any, Any]:
    """`dispatch` of a fake tensor, which a quantised one calls for each of its parts: as for any other tensor.

    Where the quantised one is an argument too, torch asks, and is to ask that instead.
    """

    def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        whole = any(hasattr(each, "_INNER_TENSORS") for each in given)
        of_another = any(hasattr(kind, "_INNER_TENSORS") for kind in types)
        if of_another and not whole:
            return func(*args, **kwargs or {})
        return dispatch.__func__(cls, func, types, args, kwargs or {})

    return classmethod(run)


def parts(weight: Any) -> list[Tensor]:
    """The tensors that hold a weight: in FP8 its numbers, by rows and by columns, and their scales; else itself."""
    names = [name for name, _ in getattr(weight, "_INNER_TENSORS", ())]
    found = [getattr(weight, name) for name in names] if names else [weight]
    return [part for part in found if part is not None]


def on_copies(chunks: Iterable[torch.nn.Module], claim: Callable[[list[Tensor]], None]) -> None:
    """Call `claim` with the copies of weights in FP8, and their scales, that a module keeps from a pass on."""

    def passed(module: Any, *_: Any) -> None:
        for weight in module._fp8_workspaces.values():
            claim(parts(weight))

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
