"""Log-probabilities and entropy where the vocabulary is cut over the tensor-parallel ranks.

The vocabulary is padded to a multiple of the ranks; no padded entry enters a softmax here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_log_probs(logits: Tensor, labels: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Natural log-probability of each label at `temperature`, float32 [b, s], the same on every TP rank.

    `logits` [b, s, V/tp] is this rank's cut of the vocabulary, `labels` int64 [b, s] < `vocab_size`, the
    number of real entries. Differentiable in `logits`, whose values are lost at temperature 1 (Megatron works
    in place): ask for `entropy` before.
    """
    return -vocab_parallel_cross_entropy(_scaled(logits, temperature, vocab_size), labels)


@torch.no_grad()
def entropy(logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Entropy in nats of the distribution at `temperature`, float32 [b, s], the same on every TP rank.

    With x the scaled logits and Z the sum of exp(x): H = log Z - sum(exp(x) x) / Z. `logits` as above.
    """
    scaled = _scaled(logits, temperature, vocab_size)
    group = parallel_state.get_tensor_model_parallel_group()
    largest = scaled.amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    centred = scaled - largest
    weight = centred.exp()
    sums = torch.stack([weight.sum(-1), weight.mul_(centred).sum(-1)])
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return sums[0].log() - sums[1] / sums[0]


def _scaled(logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    width = logits.shape[-1]
    real = vocab_size - parallel_state.get_tensor_model_parallel_rank() * width
    if real >= width:
        return logits
    padding = torch.arange(width, device=logits.device) >= real
    # The lowest finite number, not -inf: its exp is 0 all the same, and 0 times it is not nan.
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min)
