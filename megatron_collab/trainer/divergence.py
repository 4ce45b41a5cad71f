"""Reverse KL from the policy to a teacher over the whole vocabulary, sharded over the tensor-parallel ranks.

As in logprobs.py, logits [N, V] are never materialized. With the policy's logits x_iv, the teacher's y_iv, both at
temperature T, and p_iv = softmax(x_i)_v, q_iv = softmax(y_i)_v:

    KL_i = sum_v p_iv (log p_iv - log q_iv),   d KL_i / d x_iv = p_iv (log p_iv - log q_iv - KL_i).

This is the divergence of on-policy distillation in MiniLLM (Gu et al. 2023, arXiv:2306.08543, equation 1) and the limit
beta = 1 of GKD's generalized Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649), here per token.

A tile is reduced to m_i and n_i (its largest x_iv and y_iv), s_i = sum exp(x_iv - m_i), t_i = sum exp(y_iv - n_i) and
c_i = sum exp(x_iv - m_i) d_iv with d_iv = (x_iv - m_i) - (y_iv - n_i). For the full vocabulary
KL = c / s - log s + log t, and its gradient in x_iv is exp(x_iv - m_i) (d_iv - c_i / s_i) / s_i.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_collab.trainer.logprobs import exp, operand, product, tiles


def head_reverse_kl(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor, temperature: float, vocab_size: int
) -> Tensor:
    """KL(policy || teacher) of each token's distribution in nats, at `temperature`: float32 [N].

    `hidden` [N, h], `head` [V/tp, h] and the gradients as in `head_log_probs`; `teacher_hidden` [N, h'] and
    `teacher_head` [V/tp, h'] are the teacher's, which get none. Both heads have the same rows on a rank; `vocab_size`:
    the number of entries that both have, over which both distributions are normalized. N may be 0.
    """
    return _HeadReverseKL.apply(hidden, head, teacher_hidden, teacher_head, temperature, vocab_size)


class _HeadReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        temperature: float,
        vocab_size: int,
    ) -> Tensor:
        first = parallel_state.get_tensor_model_parallel_rank() * len(head)
        ctx.entries = min(max(vocab_size - first, 0), len(head))
        ctx.alpha = 1 / temperature
        ctx.main_grad = getattr(head, "main_grad", None)

        # m, s, c, n and t. The largest logits start at the lowest finite number, whose product with 0 is not nan.
        stats = torch.zeros(5, len(hidden), device=hidden.device)
        stats[0] = stats[3] = torch.finfo(torch.float32).min
        for rows, columns, (logits, teacher_logits, weight) in tiles(hidden, ctx.entries, 3):
            product(logits, operand(hidden[rows]), operand(head[columns]).t(), alpha=ctx.alpha, beta=0.0)
            teacher_states, teacher_rows = operand(teacher_hidden[rows]), operand(teacher_head[columns])
            product(teacher_logits, teacher_states, teacher_rows.t(), alpha=ctx.alpha, beta=0.0)
            m, n = logits.amax(1), teacher_logits.amax(1)
            t = exp(teacher_logits.sub_(n[:, None]), out=weight).sum(1)
            exp(logits.sub_(m[:, None]), out=weight)
            c = logits.sub_(teacher_logits).mul_(weight).sum(1)
            tile_stats = torch.stack([m, weight.sum(1), c, n, t])
            stats[:, rows] = _merged(torch.stack([stats[:, rows], tile_stats]))
        group = parallel_state.get_tensor_model_parallel_group()
        rank_stats = stats.new_empty(dist.get_world_size(group), *stats.shape)
        dist.all_gather(list(rank_stats), stats, group)
        m, s, c, n, t = _merged(rank_stats)
        ctx.save_for_backward(hidden, head, teacher_hidden, teacher_head, m, s, c, n)
        return c / s - s.log() + t.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, teacher_hidden, teacher_head, m, s, c, n = ctx.saved_tensors
        hidden_grad = torch.zeros(hidden.shape, device=hidden.device)
        head_grad = torch.zeros(head.shape, device=head.device) if ctx.main_grad is None else ctx.main_grad
        scale, mean = gradient / s, c / s
        for rows, columns, (logits, teacher_logits, weight) in tiles(hidden, ctx.entries, 3):
            states, head_rows = operand(hidden[rows]), operand(head[columns])
            product(logits, states, head_rows.t(), alpha=ctx.alpha, beta=0.0)
            teacher_states, teacher_rows = operand(teacher_hidden[rows]), operand(teacher_head[columns])
            product(teacher_logits, teacher_states, teacher_rows.t(), alpha=ctx.alpha, beta=0.0)
            exp(logits.sub_(m[rows, None]), out=weight)
            difference = logits.sub_(teacher_logits.sub_(n[rows, None]))
            weight.mul_(difference.sub_(mean[rows, None])).mul_(scale[rows, None])
            logits_grad = weight.to(states.dtype)
            product(hidden_grad[rows], logits_grad, head_rows, alpha=ctx.alpha, beta=1.0)
            product(head_grad[columns], logits_grad.t(), states, alpha=ctx.alpha, beta=1.0)
        head_result = head_grad.to(head.dtype) if ctx.main_grad is None else None
        return hidden_grad.to(hidden.dtype), head_result, None, None, None, None


def _merged(parts: Tensor) -> Tensor:
    """The statistics [5, n] of a vocabulary from those of its parts [k, 5, n]."""
    m, n = parts[:, 0].amax(0), parts[:, 3].amax(0)
    below, teacher_below = parts[:, 0] - m, parts[:, 3] - n
    weight, teacher_weight = below.exp(), teacher_below.exp()
    c = weight * (parts[:, 2] + parts[:, 1] * (below - teacher_below))
    return torch.stack([m, (weight * parts[:, 1]).sum(0), c.sum(0), n, (teacher_weight * parts[:, 4]).sum(0)])
