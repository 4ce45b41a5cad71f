"""Routing replay: routers send tokens to the experts that the engine selected while sampling.

Trainer and engine compute the experts' scores with different kernels, so they may select different experts if scores
are nearly equal, and a token's log-probability jumps. With R3 (rollout routing replay, arXiv:2510.11370) the trainer
uses the engine's experts I, with weights from its own scores s, so that the router still learns:

    g_i = [i in I] exp(s_i) / sum_{j in I} exp(s_j),

or, if the model does not normalize them, the entries in I of the softmax over all experts. Experts are the same in all
passes over a batch, as in GSPO's paper for the old and the new policy (arXiv:2507.18071, section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_collab.checkpoint.hf import unwrap


class ReplayedRouter:
    """Replaces Megatron's RouterReplay: provides a router with the experts to select.

    Megatron's has one mode for all routers of a process, to be switched at every pass of a pipeline's schedule. Here
    the model sets the experts of its routers before a forward pass, and again before the backward pass of the same
    micro-batch, which may recompute activations.
    """

    def __init__(self, router: TopKRouter) -> None:
        self.config, self.layer = router.config, router.layer_number - 1
        self.experts: Tensor | None = None  # int16 [tokens of this rank, experts per token], -1 for none
        router.router_replay = self

    def take(self, routing: Tensor | None) -> None:
        """Use the experts of `routing` from now on, as in PolicyModel.forward; None: the router selects them."""
        if routing is None:
            self.experts = None
            return
        if self.config.sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            routing = routing.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        width = self.config.moe_router_topk
        self.experts = routing[:, self.layer * width : (self.layer + 1) * width]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """(scores, indices) of each token's experts, both [tokens, topk], from all `scores` [tokens, experts]."""
        values, selected = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, selected
        experts = torch.where(self.experts < 0, selected, self.experts.long())
        return scores.gather(1, experts), experts


def add(chunks: Sequence[Any]) -> None:
    """Make the routers of a model use the experts passed to it."""
    for policy in map(unwrap, chunks):
        policy.routers = [ReplayedRouter(module) for module in policy.modules() if isinstance(module, TopKRouter)]
