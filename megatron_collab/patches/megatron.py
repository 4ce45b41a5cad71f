"""Faults of Megatron-Core 0.16.1, on any device, most where TransformerEngine or apex are missing.

Each is repaired by what is missing, not by the device. Remove a repair once the pinned version has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def install() -> None:
    """Repair what this environment needs; later calls change nothing."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        # The router reads this name to see whether to use it; without TransformerEngine it is never bound.
        moe_utils.te_general_gemm = None
    if moe_utils.HAVE_TE:
        # The constructor of Megatron's linear layer asks for apex. TransformerEngine's layers accumulate without
        # it, and the one layer left of Megatron's own, the head, is never called.
        layers._grad_accum_fusion_available = True
    optimizer = distrib_optimizer.DistributedOptimizer
    if not distrib_optimizer.HAVE_APEX_OR_TE and "_keeps_step" not in vars(optimizer):
        optimizer._keeps_step = True
        _keep_step(optimizer)
        _unshare_step(optimizer)


def _keep_step(optimizer: Any) -> None:
    """torch's AdamW has a `step` in the state of each parameter (the fused optimizers: in the group).

    Loading a fully reshardable checkpoint leaves it out of the sources but not out of the targets: KeyError.
    """
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        set_states(self, model_param, {**step, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_with_step


def _unshare_step(optimizer: Any) -> None:
    """A loaded state gives every parameter the same `step` tensor.

    AdamW then increments it once for each parameter: a wrong bias correction, without a word, after a resume.
    """
    load_state_dict = optimizer.load_state_dict

    def load_and_unshare(self: Any, state_dict: Mapping[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    optimizer.load_state_dict = load_and_unshare


def reduce_experts(policy: torch.nn.Module) -> None:
    """Have the gradients of experts summed over all ranks that hold them.

    Megatron-Core 0.16.1 does that only where experts are spread (ep > 1). Tensor-parallel ranks that each hold
    every expert, uncut, see different tokens: each would go its own way, without a word.
    """
    for name, parameter in policy.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
