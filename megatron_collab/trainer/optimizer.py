"""AdamW on Megatron's distributed optimizer, and its learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import get_standard_config_overrides as no_decay_for_norms_and_biases

from megatron_collab.config import Config, OptimConfig
from megatron_collab.patches.megatron import count_padding
from megatron_collab.trainer.megatron.config import DTYPES


def build_optimizer(config: Config, chunks: Sequence[DistributedDataParallel], lr: float) -> MegatronOptimizer:
    """AdamW over the parameters of `chunks`, its state sharded over the data parallel ranks."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        adam_beta1=config.optim.beta1,
        adam_beta2=config.optim.beta2,
        weight_decay=config.optim.weight_decay,
        clip_grad=config.optim.clip_grad,
        bf16=config.model.dtype == "bfloat16",
        params_dtype=DTYPES[config.model.dtype],
        use_distributed_optimizer=True,
    )
    for chunk in chunks:
        count_padding(chunk)
    return get_megatron_optimizer(options, list(chunks), no_decay_for_norms_and_biases(options))


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Learning rate of `step` (from 0) in a run of `steps`.

    Linear warm-up that reaches `optim.lr` in its last step, then constant, or falling linearly so that it
    would be zero at step `steps`.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "linear":
        return optim.lr * (steps - step) / (steps - optim.warmup_steps)
    return optim.lr
