"""Faults of Megatron-Core on any device, most of them where TransformerEngine or apex are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_collab.patches import Patch
from megatron_collab.patches.cpu import without_cuda


def _importable(module: str, name: str) -> bool:
    """Whether Megatron can import it, as Megatron itself asks."""
    try:
        return hasattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return False


def with_transformer_engine() -> bool:
    return not without_cuda() and _importable("transformer_engine.pytorch", "Linear")


def without_fused_adam() -> bool:
    optimizers = ("transformer_engine.pytorch.optimizers", "apex.optimizers")
    return without_cuda() or not any(_importable(module, "FusedAdam") for module in optimizers)


def _keep_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        set_states(self, model_param, {**step, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step


def _unshare_step() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load_state_dict = DistributedOptimizer.load_state_dict

    def load_and_unshare(self: Any, state_dict: Mapping[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_and_unshare


def reduce_experts(policy: torch.nn.Module) -> None:
    """Mark the experts' parameters, so that their gradients are summed over all ranks that hold them."""
    for name, parameter in policy.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def count_padding(model: Any) -> None:
    """Count the padding between the buckets of a DistributedDataParallel as part of them."""
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


@contextmanager
def load_planner(planner: type) -> Iterator[None]:
    """Within it, checkpoints are loaded by `planner`, a subclass of Megatron's MCoreLoadPlanner."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    original, strategies.MCoreLoadPlanner = strategies.MCoreLoadPlanner, planner
    try:
        yield
    finally:
        strategies.MCoreLoadPlanner = original


_megatron = partial(Patch, "megatron-core")
_OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

PATCHES = (
    _megatron(
        "the router's product without TransformerEngine",
        why="The router reads te_general_gemm to see whether to use it; without TransformerEngine it is never bound.",
        upstream="megatron/core/transformer/moe/moe_utils.py:1192",
        until="te_general_gemm is bound to None there",
        test="tests/patches/test_megatron.py::test_router_works_without_transformer_engine",
        sets={"megatron.core.transformer.moe.moe_utils.te_general_gemm": None},
        when=lambda: not with_transformer_engine(),
    ),
    _megatron(
        "gradient accumulation fusion without apex",
        why="The constructor of Megatron's linear layer asks for apex. TransformerEngine's layers accumulate without "
        "it, and the one layer left of Megatron's own, the head, is never called.",
        upstream="megatron/core/tensor_parallel/layers.py:924",
        until="the head is not built by Megatron's linear layer",
        test="tests/patches/test_megatron.py::test_fused_gradient_accumulation_needs_no_apex",
        sets={"megatron.core.tensor_parallel.layers._grad_accum_fusion_available": True},
        when=with_transformer_engine,
    ),
    _megatron(
        "AdamW's step in a resharded checkpoint",
        why="torch's AdamW has a `step` in the state of each parameter (the fused optimizers: in the group). Loading a "
        "fully reshardable checkpoint leaves it out of the sources but not out of the targets: KeyError.",
        upstream=f"{_OPTIMIZER}:911",
        until="_set_main_param_and_optimizer_states skips what is not given",
        test="tests/patches/test_megatron.py::test_an_optimizer_state_without_step_can_be_set",
        uses=(f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",),
        apply=_keep_step,
        when=without_fused_adam,
    ),
    _megatron(
        "AdamW's step shared by all parameters",
        why="A loaded state gives every parameter the same `step` tensor, which AdamW then increments once for each of "
        "them: a silently wrong bias correction after a resume.",
        upstream=f"{_OPTIMIZER}:690",
        until="load_state_dict copies the step",
        test="tests/patches/test_megatron.py::test_a_loaded_optimizer_counts_steps_for_each_parameter",
        uses=(f"{_DISTRIBUTED}.load_state_dict",),
        apply=_unshare_step,
        when=without_fused_adam,
    ),
    _megatron(
        "gradients of experts that are not spread",
        why="Megatron sums the gradients of experts over all ranks that hold them only where ep > 1. Tensor-parallel "
        "ranks that each hold every expert, uncut, see different tokens and would silently drift apart.",
        upstream="megatron/core/distributed/distributed_data_parallel.py:122 (parameter.allreduce)",
        until="experts are marked whatever ep is",
        test="tests/trainer/megatron/test_model.py::test_every_expert_is_reduced_over_the_ranks_that_hold_it",
    ),
    _megatron(
        "padding between gradient buckets",
        why="The buffer that a checkpoint is loaded into leaves this padding out, but is cut by positions that count "
        "it: the last parameters lie beyond its end. Tied embeddings on the last pipeline stage make two buckets.",
        upstream=f"{_OPTIMIZER}:1027",
        until="numel_unpadded counts the padding between buckets",
        test="tests/checkpoint/test_checkpointer.py::test_another_layout_goes_on_from_it",
    ),
    _megatron(
        "a load planner with a heartbeat",
        why="Loading a large checkpoint must not count as a hang; Megatron takes no planner but makes one by name.",
        upstream="megatron/core/dist_checkpointing/strategies/torch.py:802",
        until="dist_checkpointing.load takes a planner",
        test="tests/checkpoint/test_checkpointer.py::test_ranks_move_while_they_save_and_load",
        uses=("megatron.core.dist_checkpointing.strategies.torch.MCoreLoadPlanner",),
    ),
)
