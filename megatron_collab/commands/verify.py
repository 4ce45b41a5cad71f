"""Checks that Megatron-Core and transformers give the same log-probabilities for a Hugging Face folder.

Megatron-Core has its weights, or those of a checkpoint of the same model.
"""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_collab.checkpoint import hf
from megatron_collab.checkpoint.sharded_state import load_weights
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.runtime.network import single_rank
from megatron_collab.settings import replaced
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.megatron import parallel

SEQUENCES, LENGTH = 4, 64
# Both compute in float32 with equal weights, so only the order of sums differs. A misplaced tensor gives > 0.1.
TOLERANCE = 2e-4


def largest_difference(folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> float:
    """Largest difference (nats) between Megatron-Core's and transformers' log-probabilities of random tokens.

    Megatron-Core loads the weights of `checkpoint`; None: those of `folder`, as training does.
    Both run on the CPU in float32, one after the other, so memory for one float32 model is needed. The weights of both
    are rounded to `dtype`, since one may have been converted from the other in it.
    """
    vocab = hf.read_shape(folder).vocab
    tokens = torch.randint(vocab, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = _transformers(folder, dtype, tokens)
    return float((_megatron(checkpoint, folder, dtype, tokens) - expected).abs().max().nan_to_num(inf))


def report(folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> int:
    """Print the `largest_difference`; exit code 1 if it is above TOLERANCE."""
    difference = largest_difference(folder, checkpoint, dtype)
    same = difference <= TOLERANCE
    print(f"largest difference of log-probs: {difference:.2e}, {'within' if same else 'ABOVE'} {TOLERANCE:g}")
    return 0 if same else 1


@torch.no_grad()
def _transformers(folder: Path, dtype: torch.dtype | None, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    _round(model, dtype)
    return _label_log_probs(model(tokens).logits, tokens)


@torch.no_grad()
def _megatron(checkpoint: Path | None, folder: Path, dtype: torch.dtype | None, tokens: torch.Tensor) -> torch.Tensor:
    config = replaced(Config(), {"launch.device": "cpu", "model.dtype": "float32"})
    os.environ |= single_rank("the only rank")
    network, shape = network_spec(config), hf.read_shape(folder)
    with parallel.init_parallel(config.launch, network):
        chunks = policies.build(network, shape)
        if checkpoint:
            load_weights(chunks, checkpoint)
        else:
            hf.load_hf(chunks, folder)
        policy = hf.unwrap(chunks[0]).eval()
        _round(policy, dtype)
        bounds = torch.arange(0, tokens.numel() + 1, LENGTH, dtype=torch.int32)
        packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH)
        positions = torch.arange(LENGTH).repeat(SEQUENCES)[None]
        hidden = policy(tokens.reshape(1, -1), positions, None, packed_seq_params=packing)
        logits = (hidden @ policy.head.T)[..., : shape.vocab].unflatten(1, tokens.shape)[0]
        return _label_log_probs(logits, tokens)


def _label_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [b, s - 1] of each token after the first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    for parameter in model.parameters() if dtype else ():
        parameter.copy_(parameter.to(dtype))
