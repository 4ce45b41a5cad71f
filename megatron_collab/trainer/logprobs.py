"""Log-probabilities and entropy with the vocabulary sharded over the tensor-parallel ranks.

`head_log_probs` never materializes the logits [N, V]: it computes them in tiles, again in the backward pass. The
vocabulary is padded to a multiple of the ranks; padded entries never enter a softmax.

With hidden states h_i, rows w_v of the head and temperature T, the logits are x_iv = h_i . w_v / T, and for label l

    log p_il = x_il - log Z_i,   Z_i = sum_v exp(x_iv),   p_iv = exp(x_iv) / Z_i,   H_i = -sum_v p_iv log p_iv.

From d log p_il / d x_iv = [v = l] - p_iv and d H_i / d x_iv = -p_iv (log p_iv + H_i), and with g and e the incoming
gradients of log p and H, the gradients of the loss are

    d / d x_iv = g_i [v = l] - p_iv (g_i + e_i (log p_iv + H_i)),
    d / d h_i = sum_v (d / d x_iv) w_v / T,   d / d w_v = sum_i (d / d x_iv) h_i / T.

A tile is reduced to m_i (its largest x_iv), s_i = sum exp(x_iv - m_i) and u_i = sum exp(x_iv - m_i) (x_iv - m_i),
which can be merged with those of other tiles and ranks (online softmax, Milakov and Gimelshein 2018,
arXiv:1805.02867; u is added for the entropy). For the full vocabulary, log Z = m + log s and H = log s - u / s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_collab.runtime import device

# Logits of a tile, by device type; two float32 buffers have this size. On a CPU they should fit the cache (4 MB
# each), on a GPU there should be few launches (64 MB each).
TILE = {"cpu": 1 << 20, device.GPU: 1 << 24}
_LOG2_E = 1.0 / math.log(2.0)


def head_log_probs(
    hidden: Tensor, head: Tensor, labels: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each label and entropy in nats, at `temperature`: float32 [N] each.

    `hidden` [N, h]: states after the final norm, equal on every tensor-parallel rank; `head` [V/tp, h]: this rank's
    rows of the output layer, same dtype; `labels` int64 [N] < `vocab_size`, the number of real entries. N may be 0.
    Both results are equal on every rank and differentiable in `hidden` and `head`.

    The gradient of `hidden` is this rank's summand; the preceding region (Megatron's copy or gather) sums it over the
    ranks. The gradient of `head` is added to its `main_grad`, if present (float32, DistributedDataParallel).

    Computes in float32 for any dtype. With bfloat16 on a GPU the gradient of the logits is rounded to bfloat16 before
    the products, as in Megatron's output layer; sums stay float32.
    """
    return _HeadLogProbs.apply(hidden, head, labels, temperature, vocab_size)


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, temperature: float, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        first = parallel_state.get_tensor_model_parallel_rank() * len(head)
        labels = labels - first  # labels of other ranks are outside of [0, len(head))
        ctx.entries = min(max(vocab_size - first, 0), len(head))
        ctx.temperature = temperature
        ctx.main_grad = getattr(head, "main_grad", None)
        ctx.set_materialize_grads(False)

        states = operand(hidden)
        # m, s, u and the label's logit. m starts at the lowest finite number, not -inf, whose product with 0 is nan.
        stats = torch.zeros(4, len(hidden), device=hidden.device)
        stats[0] = torch.finfo(torch.float32).min
        for rows, columns, (logits, weight) in tiles(hidden, ctx.entries, 2):
            product(logits, states[rows], operand(head[columns]).t(), alpha=1 / temperature, beta=0.0)
            index, inside = _in_tile(labels[rows], columns)
            label = logits.gather(1, index[:, None])[:, 0] * inside
            largest = logits.amax(1)
            exp(logits.sub_(largest[:, None]), out=weight)
            tile_stats = torch.stack([largest, weight.sum(1), weight.mul_(logits).sum(1), label])
            stats[:, rows] = _merged(torch.stack([stats[:, rows], tile_stats]))
        group = parallel_state.get_tensor_model_parallel_group()
        rank_stats = stats.new_empty(dist.get_world_size(group), *stats.shape)
        dist.all_gather(list(rank_stats), stats, group)
        m, s, u, label = _merged(rank_stats)
        entropy = s.log() - u / s
        ctx.save_for_backward(hidden, head, labels, m, s, entropy)
        return label - m - s.log(), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, labels, m, s, entropy = ctx.saved_tensors
        log_prob_grad, entropy_grad = gradients
        if log_prob_grad is None:
            log_prob_grad = torch.zeros_like(m)
        # In the gradient exp(x - m) has the factor slope (x - m) + constant; both include the 1 / s of p.
        constant, slope = log_prob_grad / s, None
        if entropy_grad is not None:
            constant = (log_prob_grad + entropy_grad * (entropy - s.log())) / s
            slope = entropy_grad / s
        alpha = 1 / ctx.temperature

        hidden_grad = torch.zeros(hidden.shape, device=hidden.device)
        head_grad = torch.zeros(head.shape, device=head.device) if ctx.main_grad is None else ctx.main_grad

        states = operand(hidden)
        for rows, columns, (logits, weight) in tiles(hidden, ctx.entries, 2):
            head_rows = operand(head[columns])
            product(logits, states[rows], head_rows.t(), alpha=alpha, beta=0.0)
            exp(logits.sub_(m[rows, None]), out=weight)
            factor = constant[rows, None]
            if slope is not None:
                factor = logits.mul_(slope[rows, None]).add_(factor)
            index, inside = _in_tile(labels[rows], columns)
            weight.mul_(factor).scatter_add_(1, index[:, None], (-log_prob_grad[rows] * inside)[:, None])
            minus_gradient = weight.to(states.dtype)  # of the tile's logits
            product(hidden_grad[rows], minus_gradient, head_rows, alpha=-alpha, beta=1.0)
            product(head_grad[columns], minus_gradient.t(), states[rows], alpha=-alpha, beta=1.0)
        head_result = head_grad.to(head.dtype) if ctx.main_grad is None else None
        return hidden_grad.to(hidden.dtype), head_result, None, None, None


def tiles(hidden: Tensor, entries: int, count: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the rows and columns of each tile, nearly square to minimize reads of hidden states and head.

    Also yields `count` matrices of the tile's shape in memory that all tiles share: a CPU's first page touch is
    expensive.
    """
    tokens, size = len(hidden), TILE[device.kind(hidden)]
    if tokens == 0:
        return
    buffers = torch.empty(count, size, device=hidden.device)
    height = math.ceil(tokens / math.ceil(tokens / math.isqrt(size)))  # equal heights: no thin last row of tiles
    width = size // height
    for top in range(0, tokens, height):
        for start in range(0, entries, width):
            rows, columns = slice(top, min(top + height, tokens)), slice(start, min(start + width, entries))
            shape = rows.stop - rows.start, columns.stop - columns.start
            yield rows, columns, buffers[:, : shape[0] * shape[1]].view(count, *shape)


def operand(matrix: Tensor) -> Tensor:
    """Operand of a product: on a CPU in float32, which cannot multiply bfloat16 into a float32 result."""
    return matrix.float() if device.kind(matrix) == "cpu" else matrix


def product(out: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float) -> None:
    """out = beta out + alpha a @ b, with a float32 `out` for operands of any dtype."""
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, alpha=alpha, beta=beta, out=out)
    else:
        torch.addmm(out, a, b, torch.float32, alpha=alpha, beta=beta, out=out)


def exp(x: Tensor, out: Tensor) -> Tensor:
    """exp(x) into `out`, computed as a power of 2, which torch computes faster than exp on a CPU."""
    return torch.mul(x, _LOG2_E, out=out).exp2_()


def _in_tile(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Column of each label within the tile (0 if outside), and 1.0 if it is inside, else 0.0."""
    inside = (labels >= columns.start) & (labels < columns.stop)
    return (labels - columns.start).where(inside, 0), inside.float()


def _merged(parts: Tensor) -> Tensor:
    """The statistics [4, n] of a vocabulary from those of its parts [k, 4, n]."""
    m = parts[:, 0].amax(0)
    below = parts[:, 0] - m
    weight = below.exp()
    s = weight * parts[:, 1]
    u = weight * (parts[:, 2] + below * parts[:, 1])
    return torch.stack([m, s.sum(0), u.sum(0), parts[:, 3].sum(0)])
