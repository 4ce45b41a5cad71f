"""The model on one rank: outputs and marks of its parts, redirects and repairs."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models.hf_to_megatron import TensorCut, table
from megatron_collab.trainer.megatron import model as policies
from tests.trainer.shapes import EXPERTS, SHAPE, shape_of


def packed(length: int) -> tuple[torch.Tensor, torch.Tensor, None, PackedSeqParams]:
    """The inputs of a chunk, for one sequence of the tokens 0, 1, 2 …"""
    tokens, bounds = torch.arange(length)[None], torch.tensor([0, length], dtype=torch.int32)
    return tokens, tokens, None, PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)


def test_what_is_cut_is_marked_for_the_gradient_norm(one_rank: Config) -> None:
    entries = {entry.megatron: entry for entry in table(SHAPE)}
    for name, parameter in hf.named_shards(policies.build(network_spec(one_rank), SHAPE)):
        cut = entries[name].cut
        assert getattr(parameter, "tensor_model_parallel", False) == (cut is not TensorCut.WHOLE), name
        assert cut is TensorCut.WHOLE or parameter.partition_dim == (1 if cut is TensorCut.COLUMNS else 0), name


def test_hidden_states_stay_in_the_models_precision(one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_rank.model, "dtype", "bfloat16")
    (chunk,) = policies.build(network_spec(one_rank), SHAPE)
    hidden = chunk(*packed(12))
    assert hidden.shape == (1, 12, 32) and hidden.dtype is torch.bfloat16
    # rounded frequencies would rotate late tokens wrongly
    assert hf.unwrap(chunk).inverse_frequencies.dtype is torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_weight_that_makes_logits(one_rank: Config, tied: bool) -> None:
    shape = shape_of(tie_word_embeddings=tied)
    chunks = policies.build(network_spec(one_rank), shape)
    names = {id(parameter): name for name, parameter in hf.named_shards(chunks)}
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    assert names[id(chunks[0].head)] == name


def test_checkpoints_use_the_names_of_megatrons_own_model(one_rank: Config) -> None:
    """The head is applied by our code, but saved like any output layer, so that other layouts can load it."""
    (chunk,) = policies.build(network_spec(one_rank), SHAPE)
    head = chunk.sharded_state_dict()["output_layer.weight"]
    assert head.key == "output_layer.weight" and head.global_shape == (50, 32) and head.allow_shape_mismatch


def test_a_frozen_copy_is_independent(one_rank: Config) -> None:
    chunks = policies.build(network_spec(one_rank), SHAPE)
    twins = policies.frozen_copy(chunks)
    before = chunks[0](*packed(9)).detach()
    assert torch.equal(twins[0](*packed(9)), before)
    assert hf.unwrap(twins[0]).config is not hf.unwrap(chunks[0]).config
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    assert torch.equal(twins[0](*packed(9)), before)
    assert not any(parameter.requires_grad for parameter in twins[0].parameters())


def test_experts_are_apart_in_every_layout(one_rank: Config) -> None:
    chunks = policies.build(network_spec(one_rank), shape_of(model_type="qwen3_moe", **EXPERTS))
    apart = {name for name, parameter in hf.named_shards(chunks) if not getattr(parameter, "allreduce", True)}
    assert apart == {entry.megatron for entry in table(hf.unwrap(chunks[0]).shape) if entry.expert}
