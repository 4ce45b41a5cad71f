"""Megatron-Core's import, and its use without a CUDA device: the calls that raise there are redirected to the CPU.

Libraries that need a CUDA device count as not installed, and Megatron takes what it has for machines without them.
None of Megatron's mathematics is replaced.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_collab.patches import Patch

CPU = torch.device("cpu")
# Without a driver the import of some raises OSError, and Megatron is prepared for ImportError only.
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


def without_cuda() -> bool:
    return not torch.cuda.is_available()


def refuse_visible_cuda(device_type: str) -> None:
    """RuntimeError where the run asks for the CPU but Megatron would use the CUDA device that it sees."""
    if device_type == "cpu" and not without_cuda():
        raise RuntimeError("launch.device=cpu: a CUDA device is visible; set CUDA_VISIBLE_DEVICES= (empty) to hide it")


def _silence_warnings() -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` makes a CPU tensor, `tensor.cuda()` is the tensor, and `tensor.type()` names the CUDA type.

    A mode sees the calls without touching the functions: code that compares or wraps them is not disturbed.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """The one stream of a CPU, and its own event: there is never anything to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait(self, other: _Stream | None = None) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return self


def _import_without_compilation() -> None:
    """Import Megatron with its `jit_fuser`, which is torch.compile, bound to the identity."""

    def identity(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return function if function is not None else identity

    compiler, torch.compile = torch.compile, identity
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_megatron = partial(Patch, "megatron-core")
_torch = partial(Patch, "torch", until="Megatron-Core runs on CPU", when=without_cuda)

PATCHES = (
    _megatron(
        "warnings",
        why="Every rank would print at every start what is not installed (tools/doctor.py says that), and which names "
        "of torch.distributed are deprecated.",
        upstream="megatron/core/utils.py and others",
        until="Megatron-Core uses the names of torch 2.13",
        test="tests/patches/test_megatron.py::test_importing_megatron_prints_nothing",
        apply=_silence_warnings,
    ),
    _megatron(
        "libraries that need CUDA are hidden",
        why="Megatron uses TransformerEngine, apex and others wherever they are installed, also where no device is.",
        upstream="megatron/core/optimizer/__init__.py, megatron/core/extensions/transformer_engine.py",
        until="Megatron-Core runs on CPU",
        test="tests/patches/test_cpu.py::test_training_on_a_cpu_leaves_transformer_engine_alone",
        # An import of one then raises ModuleNotFoundError.
        apply=lambda: sys.modules.update(dict.fromkeys(_CUDA_ONLY)),  # type: ignore[arg-type]
        when=without_cuda,
    ),
    _megatron(
        "no torch.compile in Megatron",
        why="Compiling its small functions for a CPU takes seconds in every process and gains nothing.",
        upstream="megatron/core/jit.py",
        until="Megatron-Core has a switch for jit_fuser",
        test="tests/patches/test_cpu.py::test_megatron_is_not_compiled_on_a_cpu",
        apply=_import_without_compilation,
        when=without_cuda,
    ),
    _torch(
        'device="cuda" is the CPU',
        why='Megatron makes tensors with device="cuda", calls tensor.cuda(), and its optimizers ask tensor.type().',
        upstream="megatron/core/tensor_parallel/layers.py, megatron/core/optimizer/optimizer.py",
        test="tests/patches/test_cpu.py::test_device_names_reach_the_device",
        apply=_CudaMeansCpu().__enter__,  # for the life of the process
    ),
    _torch(
        "current device, streams and profiler ranges",
        why="Megatron's gradient buffers, optimizers and pipeline schedules call these without asking for a device.",
        upstream="megatron/core/distributed/param_and_grad_buffer.py",
        test="tests/patches/test_cpu.py::test_streams_and_synchronisation_do_nothing_on_a_cpu",
        sets={  # one function object for each name: the compiler refuses an object that stands under two
            "torch.cuda.current_device": lambda: CPU,
            "torch.cuda.synchronize": lambda *_, **__: None,
            "torch.cuda.set_device": lambda *_, **__: None,
            "torch.cuda.nvtx.range_push": lambda *_, **__: None,
            "torch.cuda.nvtx.range_pop": lambda *_, **__: None,
            "torch.cuda.Stream": _Stream,  # must stay a class: annotations elsewhere write `torch.cuda.Stream | None`
            "torch.cuda.current_stream": lambda *_, **__: _Stream(),
            "torch.cuda.default_stream": lambda *_, **__: _Stream(),
        },
    ),
    _torch(
        "the CPU's random generator",
        why="What Megatron seeds, saves and forks as the generator of the CUDA device is the CPU's here.",
        upstream="megatron/core/tensor_parallel/random.py",
        test="tests/patches/test_cpu.py::test_model_parallel_random_stream_is_apart",
        sets={
            "torch.cuda.manual_seed": lambda value: torch.default_generator.manual_seed(int(value)),
            "torch.cuda.get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "torch.cuda.random.get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "torch.cuda.set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
            "megatron.core.tensor_parallel.random._set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(
                state
            ),
        },
        # Megatron warns when the CPU generator moves inside a fork of the CUDA one; here that is what it is for.
        apply=lambda: logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
            lambda record: "CPU RNG state changed" not in record.getMessage()
        ),
    ),
    _megatron(
        "split sizes of the expert dispatcher",
        why="It makes host sequences of its split sizes only where they were on a GPU.",
        upstream="megatron/core/transformer/moe/token_dispatcher.py (maybe_move_tensor_to_cpu)",
        until="Megatron-Core runs on CPU",
        test="tests/trainer/test_parity.py::test_log_probs_equal_hugging_face",
        sets={"megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _to_host},
        when=without_cuda,
    ),
)
