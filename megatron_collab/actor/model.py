"""The policy as a Megatron-Core GPT model: process groups, configuration, construction.

What a Hugging Face folder holds goes in and out through weights.py.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.rendezvous import rendezvous

from megatron_collab import device
from megatron_collab.actor import cpu, local_spec
from megatron_collab.actor.weights import load_hf, named_shards, save_hf, unwrap
from megatron_collab.config import Config
from megatron_collab.publish import hf_map
from megatron_collab.publish.hf_map import ModelShape

__all__ = [
    "Policy",
    "build",
    "frozen_copy",
    "init_parallel",
    "load",
    "load_hf",
    "named_shards",
    "save_hf",
    "transformer_config",
    "unwrap",
]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_GROUPS = count()


@cache
def _rendezvous() -> tuple[dist.Store, int, int]:
    """Store, rank and number of ranks from torchrun's environment; the store lives as long as the process."""
    return next(rendezvous("env://"))


@contextmanager
def init_parallel(config: Config) -> Iterator[None]:
    """Process groups and the seeds of the ranks, from torchrun's environment; may be entered again after its end.

    A collective that takes longer than launch.timeout seconds ends the run.
    """
    chosen = device.select(config.launch.device)
    cpu.check(chosen.type)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=config.launch.timeout)
    store, rank, world_size = _rendezvous()
    # A prefix of its own: what an earlier group of this process left in the store must not be read again.
    store = dist.PrefixStore(f"parallel/{next(_GROUPS)}", store)
    dist.init_process_group(chosen.backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.parallel.tp,
            pipeline_model_parallel_size=config.parallel.pp,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def transformer_config(config: Config, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration for a model of this shape in the configured layout and precision."""
    dtype = DTYPES[config.model.dtype]
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.parallel.tp,
        pipeline_model_parallel_size=config.parallel.pp,
        pipeline_model_parallel_layout=_uneven_layout(shape.layers, config.parallel.pp),
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp8=config.model.fp8,
        # The weights are always loaded, but Megatron's initialisation also marks the parameters that are cut
        # over the ranks; unmarked ones would be left out of the gradient norm.
        perform_initialization=True,
    )


def _uneven_layout(layers: int, stages: int) -> list[list[str]] | None:
    """Layers of each stage where the stages do not divide them: the first stages take one more."""
    each, rest = divmod(layers, stages)
    if rest == 0:
        return None
    layout = [["decoder"] * (each + (stage < rest)) for stage in range(stages)]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]


def _layers(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    if device.probe("transformer_engine").found:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return local_spec.block(config)


class Policy(GPTModel):
    """This rank's part of the policy, weights uninitialised.

    `policy(token_ids, position_ids, None)`, both int64 [b, s], gives the last pipeline stage's logits
    [b, s, V/tp]: the vocabulary is cut over the tensor-parallel ranks and its last rows may be padding, which
    whoever takes a softmax must leave out. Positions count from 0 in every row. With sequence parallelism s
    must be a multiple of tp.
    """

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        super().__init__(
            config,
            _layers(config),
            vocab_size=hf_map.padded_vocab(shape, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 1.0,
        )
        self.shape = shape


def build(config: Config, shape: ModelShape) -> torch.nn.Module:
    """This rank's part of the model on its device, weights uninitialised; in bf16, inside Float16Module."""
    policy = Policy(transformer_config(config, shape), shape)
    return _in_precision(policy.to(device.select(config.launch.device).type))


def _in_precision(policy: Policy) -> torch.nn.Module:
    return Float16Module(policy.config, policy) if policy.config.bf16 else policy


def load(config: Config) -> tuple[torch.nn.Module, ModelShape]:
    """The model of model.path, loaded, and its shape."""
    folder = Path(config.model.path)
    shape = ModelShape.from_hf(json.loads((folder / "config.json").read_text()))
    model = build(config, shape)
    load_hf(model, folder, shape)
    return model, shape


def frozen_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A second model with the same weights, which is never trained."""
    policy = unwrap(model)
    assert isinstance(policy, Policy)
    # A configuration of its own: an optimizer hangs its functions on the trained model's.
    twin = _in_precision(Policy(copy.copy(policy.config), policy.shape).to(next(policy.parameters()).device))
    twin.requires_grad_(False)
    for target, source in zip(twin.parameters(), model.parameters(), strict=True):
        target.copy_(source.detach())
    return twin.eval()
