"""One rank of a run without the others: process groups that carry nothing, tensors that hold nothing."""

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
from megatron_collab.planning.rehearsal.ledger import Ledger
from megatron_collab.runtime import device, rank0
from megatron_collab.trainer.megatron import parallel
from megatron_collab.trainer.megatron.te_cpu import paper

_new_group = dist.new_group


@contextmanager
def rank_on_paper(config: Config, shape: ModelShape, rank: int) -> Iterator[Ledger]:
    """This process as `rank` of all ranks of the run, on a GPU that does not exist."""
    experts = shape.experts
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks(config))
    with ExitStack() as stack:
        stack.callback(paper.forget)
        for target, name, stand_in in [*_STAND_INS, *paper.stand_ins()]:
            stack.enter_context(mock.patch.object(target, name, stand_in))
        stack.enter_context(device.on_paper())
        stack.enter_context(parallel.groups(config, timedelta(seconds=config.launch.timeout)))
        # A generator's state is a tensor, of which a fake one has no values.
        stack.enter_context(mock.patch.object(get_cuda_rng_tracker(), "fork", lambda *_: nullcontext()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(Ledger(picked=experts.per_token / experts.count if experts else 1.0))


def _routed_evenly(dispatcher: MoEAlltoAllTokenDispatcher, point: str, counts: Any = None) -> Any:
    """As if the router of every rank had given each expert as many tokens, in place of reading from the GPU how many.

    Returns the tokens of each expert of this rank, from all ranks.
    """
    if point != dispatcher.cuda_dtoh_point:
        return counts
    each, rest = divmod(dispatcher.num_out_tokens, dispatcher.num_experts)
    given = each + (np.arange(dispatcher.num_experts) < rest)
    own = given[dispatcher.local_expert_indices]
    dispatcher.input_splits = given.reshape(dispatcher.ep_size, -1).sum(1)
    dispatcher.output_splits = np.full(dispatcher.ep_size, own.sum())
    if dispatcher.config.moe_permute_fusion:  # which reads the rest on the GPU
        return own * dispatcher.ep_size
    dispatcher.num_global_tokens_per_local_expert = np.tile(own, (dispatcher.ep_size, 1))
    # The order in which the experts' tokens lie, and that in which they came: made as tensors, so without values.
    chunks = np.arange(dispatcher.num_experts)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, len(own)).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(len(own), -1).T.ravel()
    return own * dispatcher.ep_size


def _gather_objects(gathered: list[Any], own: Any, group: Any = None) -> None:
    """As if every rank had what this one has."""
    gathered[:] = [own] * len(gathered)


# What would wait for other ranks, or cannot work on tensors without values.
_STAND_INS: list[tuple[Any, str, Any]] = [
    (dist, "new_group", lambda *given, **options: _new_group(*given, **options | {"backend": "fake"})),
    (dist, "all_gather_object", _gather_objects),
    (dist, "broadcast_object_list", lambda *_, **__: None),
    (rank0.PreemptionWatch, "check", lambda watch: None),  # rank 0 would tell of its notice in a tensor
    # Several collectives as one, which fake tensors do not know: here one after another.
    (param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext(SimpleNamespace(wait=lambda: None))),
    # A norm without a fused kernel reads one number a tensor; on a GPU it takes no memory to speak of.
    (clip_grads, "l2_norm_impl", lambda *_: (torch.zeros(1), None)),
    # A pointer only tells whether memory is still the same.
    (FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
    (MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _routed_evenly),
    (FakeTensor, "numpy", lambda tensor: np.ones(tensor.shape, np.float32)),  # log-probs and values of a batch
    # Moving a model to its device would replace fake parameters, which it is refused; they are there already.
    (torch.nn.Module, "_apply", lambda module, function, recurse=True: module),
]
