"""Routing replay: routers send tokens to experts that are given to them, those that the engine chose as it sampled.

Trainer and engine compute the scores of experts with other kernels, so of two that are nearly equal each may take
another one, and a token's log-probability jumps. R3 (rollout routing replay, arXiv:2510.11370) has the trainer take the
engine's experts I, with weights from its own scores s, so that the router still learns:

    g_i = [i in I] exp(s_i) / sum_{j in I} exp(s_j),

or, where the model does not normalise them, the softmax over all experts, of which those in I are kept. Experts are the
same in all passes over a batch, as GSPO's paper has it for the old and the new policy (arXiv:2507.18071, section 5.3).
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
    """What a router asks which experts to take, in the place of Megatron's RouterReplay.

    That one has a mode for all routers of a process, to be switched at every pass of a pipeline's schedule. Here the
    model tells its routers before a forward pass, and again before the backward pass of the same micro-batch, which may
    compute activations again.
    """

    def __init__(self, router: TopKRouter) -> None:
        self.config, self.layer = router.config, router.layer_number - 1
        self.experts: Tensor | None = None  # int16 [tokens of this rank, experts of a token], -1 for none
        router.router_replay = self

    def take(self, routing: Tensor | None) -> None:
        """From now on take the experts of `routing`, as PolicyModel.forward has it; None: the router's own choice."""
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
        """Scores [tokens, topk] and numbers of each token's experts, of all its `scores` [tokens, experts]."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, own
        experts = torch.where(self.experts < 0, own, self.experts.long())
        return scores.gather(1, experts), experts


def add(chunks: Sequence[Any]) -> None:
    """Have the routers of a model take the experts that it is given."""
    for policy in map(unwrap, chunks):
        policy.routers = [ReplayedRouter(module) for module in policy.modules() if isinstance(module, TopKRouter)]
