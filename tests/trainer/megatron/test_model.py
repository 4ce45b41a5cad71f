"""The model on one rank: what its parts give and how they are marked, redirects and repairs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import router_gating_linear

from megatron_collab.config import Config
from megatron_collab.models.hf_to_megatron import Cut, table
from megatron_collab.patches import cpu, megatron
from megatron_collab.runtime import device
from megatron_collab.trainer.megatron import model as policies
from tests.trainer.shapes import EXPERTS, SHAPE, shape_of


def packed(length: int) -> tuple[torch.Tensor, torch.Tensor, None, PackedSeqParams]:
    """What a chunk takes, for one sequence of the tokens 0, 1, 2 …"""
    tokens, bounds = torch.arange(length)[None], torch.tensor([0, length], dtype=torch.int32)
    return tokens, tokens, None, PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)


def test_what_is_cut_is_marked_for_the_gradient_norm(one_rank: Config) -> None:
    entries = {entry.megatron: entry for entry in table(SHAPE)}
    for name, parameter in policies.named_shards(policies.build(one_rank, SHAPE)):
        cut = entries[name].cut
        assert getattr(parameter, "tensor_model_parallel", False) == (cut is not Cut.WHOLE), name
        assert cut is Cut.WHOLE or parameter.partition_dim == (1 if cut is Cut.COLUMNS else 0), name


def test_hidden_states_stay_in_the_models_precision(one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_rank.model, "dtype", "bfloat16")
    (chunk,) = policies.build(one_rank, SHAPE)
    hidden = chunk(*packed(12))
    assert hidden.shape == (1, 12, 32) and hidden.dtype is torch.bfloat16
    # rounded frequencies would turn late tokens elsewhere
    assert policies.unwrap(chunk).inverse_frequencies.dtype is torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_weight_that_makes_logits(one_rank: Config, tied: bool) -> None:
    shape = shape_of(tie_word_embeddings=tied)
    chunks = policies.build(one_rank, shape)
    names = {id(parameter): name for name, parameter in policies.named_shards(chunks)}
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    assert names[id(chunks[0].head)] == name


def test_checkpoints_name_what_megatrons_own_model_does(one_rank: Config) -> None:
    """The head is used by hand, but saved like any output layer, so that other layouts can load it."""
    (chunk,) = policies.build(one_rank, SHAPE)
    head = chunk.sharded_state_dict()["output_layer.weight"]
    assert head.key == "output_layer.weight" and head.global_shape == (50, 32) and head.allow_shape_mismatch


def test_a_frozen_copy_is_apart(one_rank: Config) -> None:
    chunks = policies.build(one_rank, SHAPE)
    twins = policies.frozen_copy(chunks)
    before = chunks[0](*packed(9)).detach()
    assert torch.equal(twins[0](*packed(9)), before)
    assert policies.unwrap(twins[0]).config is not policies.unwrap(chunks[0]).config
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    assert torch.equal(twins[0](*packed(9)), before)
    assert not any(parameter.requires_grad for parameter in twins[0].parameters())


def test_every_expert_is_reduced_over_the_ranks_that_hold_it(one_rank: Config) -> None:
    chunks = policies.build(one_rank, shape_of(model_type="qwen3_moe", **EXPERTS))
    apart = {name for name, parameter in policies.named_shards(chunks) if not getattr(parameter, "allreduce", True)}
    assert apart == {entry.megatron for entry in table(policies.unwrap(chunks[0]).shape) if entry.expert}


def test_device_names_reach_the_device(one_rank: Config) -> None:
    cpu.install()  # a second time: nothing happens
    expected = device.select("auto").type
    assert torch.zeros(1, device="cuda").device.type == expected
    assert torch.zeros(1).cuda().device.type == expected
    assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"


def test_a_cpu_run_refuses_a_visible_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.check("cpu")
    monkeypatch.setattr(cpu, "_installed", [])  # as where a CUDA device is visible
    with pytest.raises(RuntimeError, match=r"launch\.device=cpu.*CUDA_VISIBLE_DEVICES"):
        cpu.check("cpu")


def test_model_parallel_random_stream_is_apart(one_rank: Config) -> None:
    state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), state)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4, device="cuda"), first)


def test_router_works_without_transformer_engine() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    scores = router_gating_linear(x, weight, None, torch.float32)
    scores.sum().backward()
    assert torch.allclose(scores, F.linear(x, weight), atol=1e-6)
    assert x.grad is not None


def trained_optimizer(config: Config) -> DistributedOptimizer:
    """A distributed optimizer after two steps."""
    (model,) = policies.build(config, SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    for _ in range(2):
        model.zero_grad_buffer()
        model(*packed(8)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    (inner,) = optimizer.chained_optimizers
    return inner


def test_a_loaded_optimizer_counts_steps_for_each_parameter(one_rank: Config) -> None:
    megatron.install()  # a second time: nothing happens
    optimizer = trained_optimizer(one_rank)
    optimizer.load_state_dict(optimizer.state_dict())
    steps = [state["step"] for state in optimizer.optimizer.state.values()]
    assert len({id(step) for step in steps}) == len(steps) > 1
    assert {float(step) for step in steps} == {2.0}


def test_an_optimizer_state_without_step_can_be_set(one_rank: Config) -> None:
    optimizer = trained_optimizer(one_rank)
    for parameter in optimizer.model_param_group_index_map:
        state = dict(optimizer._get_main_param_and_optimizer_states(parameter))
        state.pop("step", None)
        with torch.no_grad():
            optimizer._set_main_param_and_optimizer_states(parameter, state)
        assert float(optimizer._get_main_param_and_optimizer_states(parameter)["step"]) == 2.0
