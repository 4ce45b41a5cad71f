"""Stand-ins for what a rehearsal lacks: a GPU for TransformerEngine, the peers of a rank, the values of tensors.

GPU and LAYERS are in force once rehearsal/te_cpu is installed, which tests do too; PAPER is while a rank is on paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_collab.patches import Patch
from megatron_collab.patches.megatron import CudaMeansCpu, with_reference_kernels

HOPPER = (9, 0)  # the compute capability reported to TransformerEngine
_PROPERTIES = SimpleNamespace(name="reference kernels", major=HOPPER[0], minor=HOPPER[1], multi_processor_count=132)

products: dict[Any, Any] = {}  # the workspaces of TransformerEngine's single and grouped products
_data_ptr = torch.UntypedStorage.data_ptr


def _ignore(*_: Any, **__: Any) -> None: ...


def _one_by_one(*_: Any, **__: Any) -> Any:
    """In place of coalescing: collectives inside run by themselves, and there is nothing to wait for."""
    return nullcontext(SimpleNamespace(wait=_ignore))


def _build_anywhere(build: Any) -> Any:
    def init(module: Any, name: str | None = None) -> None:
        with mock.patch("torch.cuda.is_available", lambda: True):
            build(module, name)

    return init


def _choose_as_on_a_gpu(choose: Any) -> Any:
    """`choose` an attention as for bfloat16 in float32 too, and as for tensors with values."""

    def get_attention_backend(params: Any) -> Any:
        if params.qkv_dtype is torch.float32:
            params = replace(params, qkv_dtype=torch.bfloat16)
        return choose(replace(params, qkv_type=Tensor) if params.qkv_type is FakeTensor else params)

    return get_attention_backend


def _at_once(exchange: Any) -> Any:
    """`exchange` that completes before it returns: attention's backward pass waits twice for the same request.

    NCCL's requests allow that; gloo's second wait waits for another message, which never comes.
    """

    def run(*arguments: Any) -> list[Any]:
        for request in exchange(*arguments):
            request.wait()
        return []

    return run


def _under_cuda_means_cpu(backward: Any) -> Any:
    """`backward` under CudaMeansCpu, which autograd does not enter by itself."""

    def run(*arguments: Any) -> Any:
        with CudaMeansCpu():
            return backward(*arguments)

    return run


def _go_backward_on_cpu() -> None:
    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("transformer_engine.") and "backward" in vars(function):
            function.backward = staticmethod(_under_cuda_means_cpu(function.backward))


class _Float32ForFloat16(ModuleType):
    """torch for a module that asserts that its tensors are float16 or bfloat16: float16 is float32."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float32" if name == "float16" else name)


def on_paper() -> bool:
    """Whether this process is a rank on paper: its process group has no peers."""
    return dist.is_initialized() and dist.get_backend() == "fake"


@contextmanager
def paper_in_force() -> Iterator[None]:
    """Within the block, the stand-ins of PAPER that this process needs are in force."""
    with ExitStack() as stack:
        for patch in PAPER:
            for attribute, value in patch.values().items() if patch.when() else ():
                stack.enter_context(mock.patch(attribute, value))
        yield


def _gather_objects(gathered: list[Any], local: Any, group: Any = None) -> None:
    """Gather as if every rank had this rank's object."""
    gathered[:] = [local] * len(gathered)


def _routed_evenly(dispatcher: Any, point: str, counts: Any = None) -> Any:
    """Replaces the read of routed token counts from the GPU: every rank's router sends each expert equally many tokens.

    Returns the number of tokens of each local expert, from all ranks.
    """
    if point != dispatcher.cuda_dtoh_point:
        return counts
    quotient, remainder = divmod(dispatcher.num_out_tokens, dispatcher.num_experts)
    counts_by_expert = quotient + (np.arange(dispatcher.num_experts) < remainder)
    local_counts = counts_by_expert[dispatcher.local_expert_indices]
    dispatcher.input_splits = counts_by_expert.reshape(dispatcher.ep_size, -1).sum(1)
    dispatcher.output_splits = np.full(dispatcher.ep_size, local_counts.sum())
    if dispatcher.config.moe_permute_fusion:  # which reads the other counts on the GPU
        return local_counts * dispatcher.ep_size
    dispatcher.num_global_tokens_per_local_expert = np.tile(local_counts, (dispatcher.ep_size, 1))
    # The order of the experts' tokens, and that of their arrival; Megatron's are tensors, here without values.
    chunks = np.arange(dispatcher.num_experts)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, len(local_counts)).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(len(local_counts), -1).T.ravel()
    return local_counts * dispatcher.ep_size


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
    """`make`, which TransformerEngine caches for the life of the process, with the cache `products`."""

    def get(*key: Any) -> Any:
        if key not in products:
            products[key] = make.__wrapped__(*key)
        return products[key]

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


_DEVICE = "megatron_collab.runtime.device"
_FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
_ENGINE = "transformer_engine.pytorch"
_ATTENTION = f"{_ENGINE}.attention.dot_product_attention"
_LAYER = f"{_ENGINE}.module.base.TransformerEngineBaseModule"

_on_cpu = partial(
    Patch,
    "transformer-engine",
    until="TransformerEngine has kernels for a CPU",
    test="tests/rehearsal/te_cpu/test_layers.py::test_in_float32_the_engine_is_the_local_layers",
    when=with_reference_kernels,
)
GPU = _on_cpu(
    "a GPU on paper",
    why="Its import and its layers ask torch which GPU this is, and use streams and events. gloo cannot coalesce "
    "collectives, which therefore run one by one. te_cpu's imports.py and permutation.py put the reference kernels in "
    "the place of the compiled part and of Triton's.",
    upstream="transformer_engine/pytorch/utils.py:743 and others",
    sets={
        "torch.version.cuda": "13.1",
        "torch.cuda.get_device_capability": lambda *_: HOPPER,
        "torch.cuda.get_device_properties": lambda *_: _PROPERTIES,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.stream": lambda stream: nullcontext(),
        "torch.cuda.Event": lambda *_, **__: SimpleNamespace(record=_ignore, wait=_ignore, synchronize=_ignore),
        "torch.distributed._coalescing_manager": _one_by_one,
        "torch.Tensor.is_cuda": property(lambda self: True),
    },
    uses=(
        "transformer_engine",
        "transformer_engine.common.load_framework_extension",
        "transformer_engine.pytorch.triton.permutation",
    ),
)
LAYERS = _on_cpu(
    "layers on a CPU",
    why="They can be built only if there is a GPU. With float32 in fused attention the code path of bfloat16 can be "
    "tested without rounding; a GPU would use another path. Recomputation saves and restores the state of the GPU's "
    "random numbers, which nothing here uses.",
    upstream="transformer_engine/pytorch/module/base.py:895 and others",
    sets={
        f"{_ENGINE}.distributed._get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        f"{_ENGINE}.distributed._set_cuda_rng_state": _ignore,
        f"{_ATTENTION}.backends.torch": _Float32ForFloat16("torch"),
    },
    wraps={
        f"{_LAYER}.__init__": _build_anywhere,
        f"{_ATTENTION}.context_parallel.flash_attn_p2p_communicate": _at_once,
        f"{_ATTENTION}.utils.get_attention_backend": _choose_as_on_a_gpu,
    },
    apply=_go_backward_on_cpu,
)
PAPER = (
    Patch(
        "torch",
        "a GPU",
        why="Fake tensors are on the CPU, as torch.cuda needs a device. A rank on paper takes the code paths of a GPU "
        "all the same, so what a machine has is looked up again, with a GPU. Callers must not import these by name.",
        upstream="torch/_subclasses/fake_tensor.py",
        until="fake tensors of a GPU need none in streams, events and pinned memory",
        test="tests/rehearsal/test_engine.py::test_every_class_holds_what_the_plan_says",
        sets={
            f"{_DEVICE}.kind": lambda tensor: "cuda",
            f"{_DEVICE}.select": lambda setting: SimpleNamespace(type="cpu", backend="fake"),
            f"{_DEVICE}._cuda": lambda: (True, "one on paper"),
        },
        wraps={f"{_DEVICE}.probe": lambda probe: cache(probe.__wrapped__)},
        when=on_paper,
    ),
    Patch(
        "torch",
        "no peers",
        why="The fake process group sends nothing, so objects would arrive empty. Some groups ask for gloo by name. "
        "Fake tensors do not support coalesced collectives. rank.py books what pipeline stages exchange.",
        upstream="torch/testing/_internal/distributed/fake_pg.py",
        until="the fake process group stands for every backend, and gathers objects",
        test="tests/rehearsal/test_run.py::test_virtual_stages",
        sets={
            "torch.distributed.all_gather_object": _gather_objects,
            "torch.distributed.broadcast_object_list": _ignore,
            "megatron.core.distributed.param_and_grad_buffer._coalescing_manager": _one_by_one,
        },
        wraps={"torch.distributed.new_group": lambda new: lambda *ranks, **by: new(*ranks, **by | {"backend": "fake"})},
        uses=("megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate",),
        when=on_paper,
    ),
    Patch(
        "torch",
        "no values",
        why="Pointers are only compared, and log-probs only averaged. Moving a model would replace its parameters and "
        "fail; they are on the device. The state of a generator is a tensor. Without a fused kernel a norm reads a "
        "number per tensor; on a GPU its memory is negligible. The dispatcher reads how many tokens experts get. Any "
        "other number is 1 (ledger.py), which FakeTensorMode refuses; a batch has real tensors (rank.py).",
        upstream="torch/_subclasses/fake_tensor.py, megatron/core/transformer/moe/token_dispatcher.py:655",
        until="FakeTensor has data_ptr() and numpy(), and Megatron-Core reads no numbers from the device",
        test="tests/rehearsal/test_run.py::test_classes_that_differ_in_what_they_save_share_a_step",
        sets={
            f"{_FAKE_TENSOR}.data_ptr": lambda tensor: tensor.untyped_storage()._cdata,
            f"{_FAKE_TENSOR}.numpy": lambda tensor: np.ones(tensor.shape, np.float32),
            "torch.nn.Module._apply": lambda module, function, recurse=True: module,
            "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork": lambda *_: nullcontext(),
            "megatron.core.optimizer.clip_grads.l2_norm_impl": lambda *_: (torch.zeros(1), None),
            f"{_DISPATCHER}._maybe_dtoh_and_synchronize": _routed_evenly,
        },
        uses=("torch.ops.aten._local_scalar_dense", "torch.utils._python_dispatch._disable_current_modes"),
        when=on_paper,
    ),
    Patch(
        "transformer-engine",
        "no values in TransformerEngine's layers",
        why="It compares pointers to see whether queries, keys and values share a tensor, reads the experts' counts, "
        "pickles scales, and has quantized tensors, whose parts here are fake tensors.",
        upstream=f"{_ATTENTION.replace('.', '/')}/utils.py:2852 and others",
        until="its layers run under FakeTensorMode",
        test="tests/rehearsal/test_engine.py::test_every_class_holds_what_the_plan_says",
        sets={
            "torch.UntypedStorage.data_ptr": _address,
            f"{_LAYER}.get_extra_state": _no_scales,
            f"{_ENGINE}.ops.op.BasicOperation.get_extra_state": _no_scales,
            "megatron.core.extensions.transformer_engine.TEGroupedLinear._split_extra_state": lambda layer, state: (
                [state] * layer.num_gemms
            ),
        },
        wraps={
            f"{_ENGINE}.GroupedLinear.forward": _with_real_counts,
            f"{_ENGINE}.cpp_extensions.gemm.get_cublas_workspace": _cached,
            f"{_FAKE_TENSOR}.__torch_dispatch__": _dispatch_parts,
        },
        when=lambda: on_paper() and with_reference_kernels(),
    ),
)
PATCHES = (GPU, LAYERS, *PAPER)
