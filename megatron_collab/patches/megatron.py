"""Patches of Megatron-Core: bugs on any device, and support for machines without a CUDA device.

On such machines, calls that would raise are redirected to the CPU, and libraries that need a CUDA device are hidden, so
Megatron uses its fallbacks. None of its mathematics is replaced.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_collab.patches import DISTRIBUTED_OPTIMIZER, Patch

CPU = torch.device("cpu")
# Without a driver, importing some of these raises OSError, but Megatron only handles ImportError.
_ENGINE = ("transformer_engine", "transformer_engine_torch")
_CUDA_ONLY = (
    *("apex", "amp_C", "fused_weight_gradient_mlp_cuda"),
    *("flash_attn", "flash_attn_3", "flashattn_hopper", "flash_mla", "deep_ep", "grouped_gemm"),
)
_LOGGERS = ("wandb", "torch.utils.tensorboard")
_MESSAGES = {  # by logger: messages about known facts that every rank would print
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}


def without_cuda() -> bool:
    return not torch.cuda.is_available()


def with_reference_kernels() -> bool:
    """Whether rehearsal/te_cpu has replaced TransformerEngine's compiled part by reference kernels."""
    return hasattr(sys.modules.get("transformer_engine_torch"), "REFERENCE")


def refuse_visible_cuda(device_type: str) -> None:
    """Raises RuntimeError if the run asks for the CPU but Megatron would use a visible CUDA device."""
    if device_type == "cpu" and not without_cuda():
        raise RuntimeError("launch.device=cpu: a CUDA device is visible; set CUDA_VISIBLE_DEVICES= (empty) to hide it")


def _silence_warnings() -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint\.")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")  # Megatron-Core's, when a run resumes
    for logger, message in _MESSAGES.items():
        logging.getLogger(logger).addFilter(partial(_is_other, message))


def _is_other(message: str, record: logging.LogRecord) -> bool:
    return message not in record.getMessage()


class CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` creates a CPU tensor, `tensor.cuda()` returns the tensor, `tensor.type()` names the CUDA type.

    A mode intercepts calls without replacing functions, so code that compares or wraps them still works.
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


@dataclass(frozen=True)  # all are equal
class _Stream:
    """The only stream of a CPU, also used as its event; waiting returns at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, other: _Stream | None = None) -> None: ...

    wait_stream = wait_event = synchronize = wait

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return self


def _import_lightly() -> None:
    """Import Megatron without loggers and with `jit_fuser` (torch.compile) replaced by the identity."""

    def identity(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return function if function is not None else identity

    hidden = [name for name in _LOGGERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    compiler, torch.compile = torch.compile, identity
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler
        for name in hidden:  # the run may use them
            del sys.modules[name]


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _importable(module: str, name: str) -> bool:
    """Whether `name` of `module` can be imported; the same test as Megatron's."""
    try:
        return hasattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return False


def _hide_libraries() -> None:
    """Make imports of CUDA-only libraries raise ModuleNotFoundError."""
    hidden = _CUDA_ONLY if with_reference_kernels() else (*_ENGINE, *_CUDA_ONLY)
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]


def with_transformer_engine() -> bool:
    return (with_reference_kernels() or not without_cuda()) and _importable("transformer_engine.pytorch", "Linear")


def without_fused_adam() -> bool:
    optimizers = ("transformer_engine.pytorch.optimizers", "apex.optimizers")
    if with_reference_kernels():
        return False
    return without_cuda() or not any(_importable(module, "FusedAdam") for module in optimizers)


def _keep_step(set_states: Callable[..., None]) -> Callable[..., None]:
    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        set_states(self, model_param, {**step, **tensors})

    return set_states_with_step


def _unshare_step(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    def load_and_unshare(self: Any, state_dict: Mapping[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_and_unshare


def mark_experts(policy: torch.nn.Module) -> None:
    """Mark the experts' parameters, so that they get separate gradient buffers and a separate optimizer."""
    for name, parameter in policy.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def count_padding(model: Any) -> None:
    """Count the padding between buckets of a DistributedDataParallel as part of the buckets."""
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _pickle_as_torch() -> None:
    """Let pickles refer to Megatron's function by the name under which it replaced torch's in torch.storage."""
    from megatron.core.safe_globals import safe_load_from_bytes

    safe_load_from_bytes.__module__ = "torch.storage"
    safe_load_from_bytes.__name__ = safe_load_from_bytes.__qualname__ = "_load_from_bytes"


@contextmanager
def load_planner(planner: type) -> Iterator[None]:
    """Within the block, checkpoints are loaded by `planner`, a subclass of Megatron's MCoreLoadPlanner."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    original, strategies.MCoreLoadPlanner = strategies.MCoreLoadPlanner, planner
    try:
        yield
    finally:
        strategies.MCoreLoadPlanner = original


_megatron = partial(Patch, "megatron-core")
_on_cpu = partial(Patch, until="Megatron-Core runs on CPU", when=without_cuda)
_OPTIMIZER_PY = "megatron/core/optimizer/distrib_optimizer.py"

PATCHES = (
    _megatron(
        "warnings",
        why="Every rank would print at every start what is not installed (megatron-collab doctor says that), which "
        "names of torch.distributed are deprecated, and what Megatron means to replace.",
        upstream="megatron/core/utils.py and others",
        until="Megatron-Core uses the names of torch 2.14, and each of _MESSAGES has gone",
        test="tests/patches/test_megatron.py::test_importing_megatron_prints_nothing",
        apply=_silence_warnings,
    ),
    _on_cpu(
        "megatron-core",
        "libraries that need CUDA are hidden",
        why="Megatron uses TransformerEngine, apex and others wherever they are installed, even without a device.",
        upstream="megatron/core/optimizer/__init__.py, megatron/core/extensions/transformer_engine.py",
        test="tests/patches/test_cpu.py::test_training_on_a_cpu_leaves_transformer_engine_alone",
        apply=_hide_libraries,
    ),
    _megatron(
        "no torch.compile and no loggers in Megatron",
        why="Compiling its small functions for a CPU takes seconds in every process and gains nothing; importing "
        "Weights & Biases and TensorBoard, for parts of it that no run uses, takes half a second.",
        upstream="megatron/core/jit.py, megatron/core/timers.py, megatron/core/inference/engines/dynamic_engine.py",
        until="Megatron-Core has a switch for jit_fuser, and imports loggers when it logs",
        test="tests/patches/test_cpu.py::test_megatron_is_not_compiled_on_a_cpu",
        apply=_import_lightly,
        when=without_cuda,
    ),
    _on_cpu(
        "torch",
        'device="cuda" is the CPU',
        why='Megatron makes tensors with device="cuda", calls tensor.cuda(), and its optimizers ask tensor.type().',
        upstream="megatron/core/tensor_parallel/layers.py, megatron/core/optimizer/optimizer.py",
        test="tests/patches/test_cpu.py::test_device_names_reach_the_device",
        apply=CudaMeansCpu().__enter__,  # for the life of the process
    ),
    _on_cpu(
        "torch",
        "current device, streams and profiler ranges",
        why="Megatron's gradient buffers, optimizers and pipeline schedules call these without asking for a device.",
        upstream="megatron/core/distributed/param_and_grad_buffer.py",
        test="tests/patches/test_cpu.py::test_streams_and_synchronization_do_nothing_on_a_cpu",
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
    _on_cpu(
        "torch",
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
    _on_cpu(
        "megatron-core",
        "split sizes of the expert dispatcher",
        why="It makes host sequences of its split sizes only if they were on a GPU.",
        upstream="megatron/core/transformer/moe/moe_utils.py:1184",
        test="tests/trainer/test_parity.py::test_log_probs_equal_hugging_face",
        sets={"megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _to_host},
    ),
    _megatron(
        "gradient accumulation fusion without apex",
        why="The constructor of Megatron's linear layer asks for apex. TransformerEngine's layers accumulate without "
        "it, and the one layer left of Megatron's own, the head, is never called.",
        upstream="megatron/core/tensor_parallel/layers.py:1070",
        until="the head is not built by Megatron's linear layer",
        test="tests/patches/test_megatron.py::test_fused_gradient_accumulation_needs_no_apex",
        sets={"megatron.core.tensor_parallel.layers._grad_accum_fusion_available": True},
        when=with_transformer_engine,
    ),
    _megatron(
        "AdamW's step in a resharded checkpoint",
        why="torch's AdamW has a `step` in the state of each parameter (the fused optimizers: in the group). Loading a "
        "fully reshardable checkpoint leaves it out of the sources but not out of the targets: KeyError.",
        upstream=f"{_OPTIMIZER_PY}:1225",
        until="_set_main_param_and_optimizer_states skips what is not given",
        test="tests/patches/test_megatron.py::test_an_optimizer_state_without_step_can_be_set",
        wraps={f"{DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states": _keep_step},
        when=without_fused_adam,
    ),
    _megatron(
        "AdamW's step shared by all parameters",
        why="A loaded state gives every parameter the same `step` tensor, which AdamW then increments once for each of "
        "them: a silently wrong bias correction after a resume.",
        upstream=f"{_OPTIMIZER_PY}:1028",
        until="load_state_dict copies the step",
        test="tests/patches/test_megatron.py::test_a_loaded_optimizer_counts_steps_for_each_parameter",
        wraps={f"{DISTRIBUTED_OPTIMIZER}.load_state_dict": _unshare_step},
        when=without_fused_adam,
    ),
    _megatron(
        "experts apart in every layout",
        why="Megatron gives experts a separate optimizer only if ep > 1 or tp > 1, and a checkpoint names the "
        "state by optimizer: one of a layout without it would not resume in a layout with it.",
        upstream="megatron/core/distributed/param_and_grad_buffer.py:918 (parameter.allreduce)",
        until="the state of an optimizer is saved by parameter only",
        test="tests/trainer/megatron/test_model.py::test_experts_are_apart_in_every_layout",
    ),
    _megatron(
        "padding between gradient buckets",
        why="The buffer that a checkpoint is loaded into leaves this padding out, but is cut by positions that count "
        "it: the last parameters lie beyond its end. Tied embeddings on the last pipeline stage make two buckets.",
        upstream=f"{_OPTIMIZER_PY}:1312",
        until="numel_unpadded counts the padding between buckets",
        test="tests/checkpoint/test_checkpointer.py::test_another_layout_goes_on_from_it",
    ),
    _megatron(
        "a load planner with a heartbeat",
        why="Loading a large checkpoint must not count as a hang; Megatron takes no planner but makes one by name.",
        upstream="megatron/core/dist_checkpointing/strategies/torch.py:982",
        until="dist_checkpointing.load takes a planner",
        test="tests/checkpoint/test_checkpointer.py::test_ranks_move_while_they_save_and_load",
        uses=("megatron.core.dist_checkpointing.strategies.torch.MCoreLoadPlanner",),
    ),
    _megatron(
        "pickled tensors",
        why="Its import replaces torch.storage._load_from_bytes, and a pickled tensor then names Megatron: SGLang "
        "refuses to read it, and Ray's workers would import Megatron.",
        upstream="megatron/core/__init__.py:58",
        until="Megatron-Core leaves torch's function in its place",
        test="tests/patches/test_megatron.py::test_a_pickled_tensor_names_torch_alone",
        apply=_pickle_as_torch,
        uses=("megatron.core.safe_globals.safe_load_from_bytes",),
    ),
)
