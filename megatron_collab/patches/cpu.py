"""Megatron-Core 0.16.1 on a machine without CUDA: the calls that raise there are redirected to the CPU.

Libraries that need a CUDA device count as not installed, and Megatron takes what it has for machines without them.
None of Megatron's mathematics is replaced. `install` must run before anything imports `megatron`, which the
package's `__init__` sees to. Tested against the version above; a newer one may need other redirects.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
# Megatron uses these wherever they can be imported, and not in its layers alone: its optimizer and its gradient norm
# take TransformerEngine's kernels too. All of these libraries need a CUDA device. Without a driver the import of some
# (flash_mla) raises OSError, and Megatron is prepared for ImportError only.
_CUDA_ONLY = (
    "transformer_engine",
    "transformer_engine_torch",
    "apex",
    "amp_C",
    "fused_weight_gradient_mlp_cuda",
    "flash_attn",
    "flash_attn_3",
    "flashattn_hopper",
    "flash_mla",
    "deep_ep",
    "grouped_gemm",
)
_installed: list[TorchFunctionMode] = []


def install() -> None:
    """Redirect Megatron's CUDA calls in this process; nothing happens where a CUDA device is visible."""
    if _installed or torch.cuda.is_available():
        return
    for name in _CUDA_ONLY:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it then raises ModuleNotFoundError
    _import_without_compilation()
    _redirect_device()
    _redirect_generator()
    _redirect_token_dispatcher()
    mode = _CudaMeansCpu()
    mode.__enter__()  # for the life of the process
    _installed.append(mode)


def check(device_type: str) -> None:
    """RuntimeError where the run asks for the CPU but Megatron would take the CUDA device that it sees."""
    if device_type == "cpu" and not _installed:
        raise RuntimeError("launch.device=cpu: a CUDA device is visible; set CUDA_VISIBLE_DEVICES= (empty) to hide it")


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` makes a CPU tensor, `tensor.cuda()` is the tensor, and `tensor.type()` names the CUDA type.

    A mode sees the calls without touching the functions: code that compares or wraps them is not disturbed.
    Megatron's optimizers ask `tensor.type()` whether a parameter is on the device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"} | {"device": CPU}
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a CPU, and its own event: whatever one could wait for has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Stream) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return self


def _import_without_compilation() -> None:
    """Import Megatron with its `jit_fuser`, which is torch.compile, bound to the identity.

    Compiling its small functions for a CPU takes seconds in every process and gains nothing.
    """

    def identity(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return function if function is not None else identity

    compiler, torch.compile = torch.compile, identity
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler


def _redirect_device() -> None:
    # One function object for each name: the compiler refuses an object that stands under two.
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.nvtx.range_push = lambda *_, **__: None
    torch.cuda.nvtx.range_pop = lambda *_, **__: None
    torch.cuda.Stream = _Stream  # must stay a class: annotations elsewhere write `torch.cuda.Stream | None`
    torch.cuda.current_stream = lambda *_, **__: _Stream()
    torch.cuda.default_stream = lambda *_, **__: _Stream()


def _redirect_generator() -> None:
    """What Megatron calls the CUDA generator is the CPU's."""
    from megatron.core.tensor_parallel import random

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    torch.cuda.manual_seed = seed
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._set_cuda_rng_state = set_state
    # Megatron warns when the CPU generator moves inside a fork of the CUDA one; here that is what it is for.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _redirect_token_dispatcher() -> None:
    """The expert dispatcher makes host sequences of its split sizes only where they were on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
