"""Replaces the compiled kernels by the reference kernels, and makes torch report a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_collab.patches.megatron import CudaMeansCpu, with_reference_kernels
from megatron_collab.rehearsal.te_cpu import extension, imports, permutation

HOPPER = (9, 0)  # the compute capability reported to TransformerEngine
# TransformerEngine's Python part in an environment for CPUs (tools/setup_env.sh); one for GPUs has the package.
FOLDER = Path(sys.prefix, "transformer-engine")


def install() -> None:
    """Import TransformerEngine with the reference kernels, permanently in this process; call before importing Megatron.

    TransformerEngine and Megatron then see one Hopper GPU, and all tensors claim to be on it. If the compiled part is
    installed but no GPU is visible, as on a login node, the reference kernels replace it in this process.
    Raises RuntimeError if there is a GPU, whose kernels should be used, or if Megatron was already imported;
    ModuleNotFoundError if the distribution transformer-engine is missing.
    """
    if with_reference_kernels():
        return
    if torch.cuda.is_available():
        raise RuntimeError("the reference kernels are for machines without a GPU; set CUDA_VISIBLE_DEVICES= (empty)")
    early = [name for name in ("megatron.core", "transformer_engine") if name in sys.modules]
    if early:
        raise RuntimeError(f"te_cpu's install must be called before the first import of {early[0]}")
    if importlib.util.find_spec("transformer_engine") is None:
        sys.path.append(str(FOLDER))
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(f"transformer-engine: not installed, neither in {FOLDER}; run make setup")
    _pretend_to_be_a_gpu()
    imports.import_over(extension.module())
    permutation.replace_kernels()
    _accept_a_cpu()


def _pretend_to_be_a_gpu() -> None:
    """Replace torch's functions about devices that TransformerEngine calls and that fail without a GPU."""
    properties = SimpleNamespace(name="reference kernels", major=HOPPER[0], minor=HOPPER[1], multi_processor_count=132)
    torch.version.cuda = "13.1"
    torch.cuda.get_device_capability = lambda *_: HOPPER
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.stream = _on_stream
    torch.cuda.Event = lambda *_, **__: SimpleNamespace(record=_ignore, wait=_ignore, synchronize=_ignore)
    torch.distributed._coalescing_manager = _one_by_one
    torch.Tensor.is_cuda = property(lambda self: True)


def _ignore(*_: Any, **__: Any) -> None: ...


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """Collectives inside run one by one, since gloo cannot coalesce them; there is nothing to wait for."""
    yield SimpleNamespace(wait=lambda: None)


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def _on_cpu(backward: Any) -> Any:
    """`backward` under CudaMeansCpu, the mode of patches.megatron, which autograd does not enter by itself."""

    def run(*arguments: Any) -> Any:
        with CudaMeansCpu():
            return backward(*arguments)

    return run


def _at_once(exchange: Any) -> Any:
    """`exchange` that completes before it returns: attention's backward pass waits twice for the same request.

    NCCL's requests allow that; gloo's second wait waits for another message, which never comes.
    """

    def run(*arguments: Any) -> list[Any]:
        for request in exchange(*arguments):
            request.wait()
        return []

    return run


class _Float32ForFloat16(ModuleType):
    """torch for a module that asserts that its tensors are float16 or bfloat16: float16 is float32."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float32" if name == "float16" else name)


def _accept_a_cpu() -> None:
    """Let TransformerEngine build layers without a GPU, and its fused attention take float32 and fake tensors.

    With float32 the code path of bfloat16 on a GPU can be tested without rounding; a GPU would use another path.
    """
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel, utils
    from transformer_engine.pytorch.module import base

    build, choose = base.TransformerEngineBaseModule.__init__, utils.get_attention_backend

    def build_anywhere(self: Any, name: str | None = None) -> None:
        with patch.object(torch.cuda, "is_available", lambda: True):
            build(self, name)

    def choose_as_on_a_gpu(params: Any) -> Any:
        if params.qkv_dtype is torch.float32:
            params = replace(params, qkv_dtype=torch.bfloat16)
        return choose(replace(params, qkv_type=Tensor) if params.qkv_type is FakeTensor else params)

    base.TransformerEngineBaseModule.__init__ = build_anywhere
    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("transformer_engine.") and "backward" in vars(function):
            function.backward = staticmethod(_on_cpu(function.backward))
    context_parallel.flash_attn_p2p_communicate = _at_once(context_parallel.flash_attn_p2p_communicate)
    utils.get_attention_backend = choose_as_on_a_gpu
    # Recomputation saves and restores the state of the GPU's random numbers, which nothing here uses.
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = _ignore
    backends.torch = _Float32ForFloat16("torch")
