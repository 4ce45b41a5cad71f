"""Megatron's configuration of the policy: a pure function of the settings, the model and the installed libraries.

The only module that selects fused kernels and decides whether the layers are TransformerEngine's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_collab.models.hf_config import Experts, ModelShape
from megatron_collab.models.parallel_layout import stage_layers
from megatron_collab.patches.megatron import with_reference_kernels
from megatron_collab.runtime import device
from megatron_collab.trainer.megatron import layers
from megatron_collab.trainer.spec import NetworkSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Without attention, Megatron's default: fused attention saves little memory and is expensive to recompute.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(network: NetworkSpec, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration for a model of this shape in the configured layout and precision."""
    model, parallel, dtype = network.model, network.parallel, DTYPES[network.model.dtype]
    stages, uneven = parallel.pp * parallel.vpp, None
    if shape.layers % stages:  # then Megatron needs an explicit layout
        first, *middle, last = (["decoder"] * count for count in stage_layers(shape.layers, stages))
        uneven = [["embedding", *first], *middle, [*last, "loss"]]
    _, factor = layers.rotation(shape.rope, shape.head_dim)
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
        # A factor of queries and keys scales scores by its square; the fused rotation supports no factor.
        softmax_scale=None if factor == 1.0 else factor**2 / shape.head_dim**0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # The weights are always loaded, but Megatron's initialization also marks the parameters that are cut over
        # the ranks; unmarked ones would be missing in the gradient norm.
        perform_initialization=True,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        pipeline_model_parallel_layout=uneven,
        context_parallel_size=parallel.cp,
        # Context parallelism uses cuDNN's attention: FlashAttention would need a second list of lengths, with padding,
        # which packed micro-batches lack. Megatron sets TransformerEngine's variables and refuses those set before.
        attention_backend=AttnBackend.fused if parallel.cp > 1 else AttnBackend.auto,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        # Packed micro-batches differ in length; pipeline.py knows the lengths. Megatron then requires alltoall, even
        # for a dense model.
        variable_seq_lengths=parallel.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # With virtual stages anything else silently gives wrong gradients: two ranks are both predecessor and successor
        # of each other, and a batched exchange mistakes activations for gradients (NVIDIA/Megatron-LM#5271).
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        batch_p2p_sync=False,  # would make the host wait for the GPU after every exchange, for old PyTorch
        fp8=model.fp8,
        fp8_recipe=model.fp8_recipe,
        fp8_param=model.fp8_params,
        first_last_layers_bf16=model.fp8_skip_first + model.fp8_skip_last > 0,
        num_layers_at_start_in_bf16=model.fp8_skip_first,
        num_layers_at_end_in_bf16=model.fp8_skip_last,
        **_RECOMPUTE[parallel.recompute],
        **_experts(shape.experts, shape.layers),
        **_fusions(dtype, shape.experts is not None),
    )


def _experts(experts: Experts | None, count: int) -> dict[str, Any]:
    """Routing as in transformers: softmax in float32, top k, divided by their sum if the model says so."""
    if experts is None:
        return {}
    sparse = [int(layer in experts.layers) for layer in range(count)]
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        # A softmax over the top k is the softmax over all experts divided by the sum of the top k.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": 1 if all(sparse) else sparse,
    }


def _engine(dtype: torch.dtype) -> bool:
    """Whether the layers are TransformerEngine's: only with 16 bits is its attention fused and saves no scores."""
    return dtype is torch.bfloat16 and (with_reference_kernels() or device.probe("transformer_engine").available)


def _fusions(dtype: torch.dtype, experts: bool) -> dict[str, bool]:
    engine, apex = _engine(dtype), device.probe("apex").available
    return {
        "apply_rope_fusion": engine,
        # Compiled on CUDA; uncompiled on a CPU it is slower than plain SwiGLU.
        "bias_activation_fusion": device.probe(device.GPU).available,
        "gradient_accumulation_fusion": engine or apex,
        **({"moe_grouped_gemm": engine, "moe_permute_fusion": engine} if experts else {}),
    }


def backend_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this (virtual) pipeline stage: TransformerEngine's if installed and bfloat16, else layers.py's."""
    engine = _engine(config.params_dtype)
    block = get_gpt_decoder_block_spec(config, engine, normalization="RMSNorm", vp_stage=vp_stage)
    if not engine:
        return layers.fill_in(block, config)
    from megatron_collab.trainer.megatron import engine_attention

    return engine_attention.fill_in(block)
