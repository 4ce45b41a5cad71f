"""Simulates one rank of a run without the others: fake process groups and fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import ranks
from megatron_collab.rehearsal.ledger import Ledger
from megatron_collab.rehearsal.te_cpu import paper
from megatron_collab.runtime import device, rank0
from megatron_collab.trainer.megatron import parallel

_new_group = dist.new_group


@contextmanager
def rank_on_paper(config: Config, shape: ModelShape, rank: int) -> Iterator[Ledger]:
    """Make this process `rank` of all ranks of the run, on a simulated GPU."""
    experts = shape.experts
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks(config))
    with ExitStack() as stack:
        stack.callback(paper.forget)
        for target, name, stand_in in [*_STAND_INS, *paper.stand_ins()]:
            stack.enter_context(mock.patch.object(target, name, stand_in))
        stack.enter_context(device.on_paper())
        timeout = timedelta(seconds=config.launch.timeout)
        stack.enter_context(parallel.default_group(timeout))
        stack.enter_context(parallel.layout_groups(config, timeout))
        # The state of a generator is a tensor, and a fake one has no values.
        stack.enter_context(mock.patch.object(get_cuda_rng_tracker(), "fork", lambda *_: nullcontext()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(Ledger(picked=experts.per_token / experts.count if experts else 1.0))


def _routed_evenly(dispatcher: MoEAlltoAllTokenDispatcher, point: str, counts: Any = None) -> Any:
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


def _gather_objects(gathered: list[Any], local: Any, group: Any = None) -> None:
    """Gather as if every rank had this rank's object."""
    gathered[:] = [local] * len(gathered)


# Replacements of functions that wait for other ranks or need values of tensors.
_STAND_INS: list[tuple[Any, str, Any]] = [
    (dist, "new_group", lambda *arguments, **options: _new_group(*arguments, **options | {"backend": "fake"})),
    (dist, "all_gather_object", _gather_objects),
    (dist, "broadcast_object_list", lambda *_, **__: None),
    (rank0.PreemptionWatch, "check", lambda watch: None),  # rank 0 would announce its notice in a tensor
    # Runs coalesced collectives one by one: fake tensors do not support coalescing.
    (param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext(SimpleNamespace(wait=lambda: None))),
    # Without a fused kernel, a norm reads a number per tensor; on a GPU its memory is negligible.
    (clip_grads, "l2_norm_impl", lambda *_: (torch.zeros(1), None)),
    # Pointers are only compared, to see whether memory is the same.
    (FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
    (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _routed_evenly),
    (FakeTensor, "numpy", lambda tensor: np.ones(tensor.shape, np.float32)),  # log-probs and values of a batch
    # Moving a model would replace fake parameters, which fails; they are already on the device.
    (torch.nn.Module, "_apply", lambda module, function, recurse=True: module),
]
