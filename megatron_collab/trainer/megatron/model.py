"""The policy as a Megatron-Core GPT model: layers, construction, loading and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copy_to_tp
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather_from_sp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_collab.checkpoint.hf import load_hf, unwrap
from megatron_collab.models import hf_config
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.patches import megatron
from megatron_collab.runtime import device, hub
from megatron_collab.runtime.process import beat
from megatron_collab.settings import LoraConfig
from megatron_collab.trainer.megatron import lora
from megatron_collab.trainer.megatron.config import backend_spec, transformer_config
from megatron_collab.trainer.megatron.layers import RotaryTable, rotated, rotation
from megatron_collab.trainer.megatron.paths import PackedTrees
from megatron_collab.trainer.megatron.routing import ReplayedRouter
from megatron_collab.trainer.spec import NetworkSpec

Load = Callable[[NetworkSpec], list[torch.nn.Module]]  # returns this rank's chunks of a new network


class PolicyModel(GPTModel):
    """A (virtual) pipeline stage of the policy on this rank, weights uninitialized.

    `policy(token_ids, position_ids, None, packed_seq_params=...)`, both int64 [1, t], sequences packed ("thd"),
    returns the last stage's hidden states after the final norm, [1, t, h] in the model's dtype, complete on every
    tensor-parallel rank. Their gradient is summed over these ranks, so that each can contribute that of its local
    rows of `head`. Positions count from 0 in every sequence, and along every path of PackedTrees. With sequence
    parallelism t must be a multiple of tp. `routing`: experts that `routers` replay (routing.py), int16
    [t, layers * experts per token] for all layers of the model, -1 for tokens that the router routes itself.
    """

    def __init__(self, config: TransformerConfig, shape: ModelShape, vp_stage: int | None = None) -> None:
        tp = config.tensor_model_parallel_size
        super().__init__(
            config,
            backend_spec(config, vp_stage),
            vocab_size=-(-shape.vocab // tp) * tp,  # padded to a multiple
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            # CausalAttention applies the rotation itself.
            position_embedding_type="rope" if config.apply_rope_fusion else "none",
            vp_stage=vp_stage,
        )
        self.shape = shape
        self.lora: LoraConfig | None = None  # settings of its adapters, if any
        self.routers: list[ReplayedRouter] = []  # routers that replay given experts
        # Not a buffer, which would be rounded to the model's dtype.
        self.inverse_frequencies, _ = rotation(shape.rope, shape.head_dim)
        if config.apply_rope_fusion:
            self.rotary_pos_emb = RotaryTable(self.inverse_frequencies)

    @property
    def head(self) -> Tensor:
        """Weight of the output layer [V/tp, h], on the last stage; rows past the vocabulary are padding."""
        return self.shared_embedding_or_output_weight() if self.shape.tied else self.output_layer.weight

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        routing: Tensor | None = None,
    ) -> Tensor:
        packing = packed_seq_params
        if not self.config.apply_rope_fusion:
            packing = rotated(packing, position_ids, self.inverse_frequencies, self.config.params_dtype)
        self._route(routing)
        output = super().forward(
            token_ids, position_ids, attention_mask, packed_seq_params=packing, output_processor=self._complete
        )
        if self.routers and output.requires_grad:  # before its backward pass, other micro-batches may run forward
            output.register_hook(lambda _: self._route(routing))
        return output

    def _route(self, routing: Tensor | None) -> None:
        for router in self.routers:
            router.take(routing)

    def _preprocess(
        self, *, position_ids: Tensor, packed_seq_params: PackedSeqParams, **options: Any
    ) -> tuple[Any, ...]:
        """Give each position of PackedTrees the row of its depth in the rotary table."""
        states, table, *remainder = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **options
        )
        if table is not None and isinstance(packed_seq_params, PackedTrees):
            table = table[position_ids[0]]
        return states, table, *remainder

    def _complete(self, *, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return hidden states instead of logits on the last stage; only the output layer's weight is used."""
        gather = gather_from_sp if self.config.sequence_parallel else copy_to_tp
        return gather(hidden_states).transpose(0, 1)


class _BFloat16(Float16Module):
    """The model with parameters in bfloat16; unlike Megatron's, it returns hidden states in bfloat16."""

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return super().forward(*inputs, fp32_output=False, **options)


def build(network: NetworkSpec, shape: ModelShape) -> list[torch.nn.Module]:
    """This rank's stages of the model on its device, weights uninitialized: one per virtual pipeline stage.

    With model.lora.rank they are frozen and have adapters.
    """
    chunks = _build(transformer_config(network, shape), shape, torch.device(device.select(network.device).type))
    if network.model.lora.rank:
        lora.add(chunks, network, shape)
    return chunks


def _build(config: TransformerConfig, shape: ModelShape, home: torch.device) -> list[torch.nn.Module]:
    stages = range(config.virtual_pipeline_model_parallel_size or 0)
    policies = [PolicyModel(config, shape, vp_stage=stage) for stage in stages or [None]]
    for policy in policies:
        megatron.mark_experts(policy)
        policy.to(home)
    return [_BFloat16(config, policy) if config.bf16 else policy for policy in policies]


def load(network: NetworkSpec) -> list[torch.nn.Module]:
    """Build and load the model of model.path."""
    folder = hub.folder(network.model.path)
    beat(f"loading {folder}")
    chunks = build(network, hf_config.read(folder / "config.json"))
    load_hf(chunks, folder)
    return chunks


def frozen(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The chunks of a network that does not learn."""
    for chunk in chunks:
        chunk.requires_grad_(False)
    return [chunk.eval() for chunk in chunks]


def frozen_copy(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """A frozen copy of the model."""
    policy = unwrap(chunks[0])
    # A separate configuration: an optimizer adds its functions to the trained model's.
    copies = _build(copy.copy(policy.config), policy.shape, next(policy.parameters()).device)
    copy_weights(chunks, frozen(copies))
    for target in (parameter for chunk in copies for parameter in chunk.parameters()):
        if hasattr(target, "clear_high_precision_init_val"):
            target.clear_high_precision_init_val()  # host copy for an optimizer's master weights, unused here
    return copies


@torch.no_grad()
def copy_weights(sources: Sequence[torch.nn.Module], targets: Sequence[torch.nn.Module]) -> None:
    """Copy the current weights of `sources` to `targets`, frozen copies."""
    for source_chunk, target_chunk in zip(sources, targets, strict=True):
        for source, target in zip(source_chunk.parameters(), target_chunk.parameters(), strict=True):
            target.copy_(source.detach())
