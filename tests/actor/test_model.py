"""The parts that the model is built from, on one rank: layout of the stages, norm, attention, repairs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_utils import router_gating_linear

from megatron_collab import device
from megatron_collab.actor import cpu, fixes, local_spec
from megatron_collab.actor import model as policies
from megatron_collab.config import Config
from megatron_collab.publish.hf_map import Cut, ModelShape, table

SHAPE = ModelShape.from_hf(
    {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    }
)


def test_what_is_cut_is_marked_for_the_gradient_norm(one_rank: Config) -> None:
    entries = {entry.megatron: entry for entry in table(SHAPE)}
    for name, parameter in policies.named_shards(policies.build(one_rank, SHAPE)):
        cut = entries[name].cut
        assert getattr(parameter, "tensor_model_parallel", False) == (cut is not Cut.WHOLE), name
        assert cut is Cut.WHOLE or parameter.partition_dim == (1 if cut is Cut.COLUMNS else 0), name


@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (10, 4), (7, 3), (13, 8), (5, 5), (8, 2)])
def test_stages_share_the_layers_evenly(one_rank: Config, layers: int, stages: int) -> None:
    wide = Config()
    wide.model.dtype = "float32"
    wide.parallel.pp = stages
    made = policies.transformer_config(wide, ModelShape(**{**vars(SHAPE), "layers": layers}))
    layout = made.pipeline_model_parallel_layout
    if layers % stages == 0:
        assert layout is None
        return
    counts = [layout.get_num_layers_to_build(LayerType.decoder, pp_rank=rank) for rank in range(stages)]
    assert sum(counts) == layers
    assert max(counts) - min(counts) == 1


def test_norm_follows_its_formula(one_rank: Config) -> None:
    norm = local_spec.RMSNorm(policies.transformer_config(one_rank, SHAPE), 32, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 32)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)


def test_packed_sequences_do_not_see_each_other(one_rank: Config) -> None:
    attention = local_spec.CausalAttention(policies.transformer_config(one_rank, SHAPE))
    lengths = [3, 7, 2]
    query, key, value = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    bounds = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    packed = attention(query, key, value, None, packed_seq_params=packing)
    alone = [
        attention(q[:, None], k[:, None], v[:, None], None)[:, 0]
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    ]
    assert torch.allclose(packed, torch.cat(alone), atol=1e-6)


def test_attention_is_causal_and_grouped(one_rank: Config) -> None:
    attention = local_spec.CausalAttention(policies.transformer_config(one_rank, SHAPE))
    query, key, value = torch.randn(6, 1, 4, 8), torch.randn(6, 1, 2, 8), torch.randn(6, 1, 2, 8)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key.repeat_interleave(2, dim=2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value.repeat_interleave(2, dim=2)).flatten(2)
    assert torch.allclose(attention(query, key, value, None), expected, atol=1e-6)


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
    model = policies.build(config, SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
    tokens = torch.arange(16).reshape(2, 8)
    for _ in range(2):
        model.zero_grad_buffer()
        model(tokens, tokens, None).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    (inner,) = optimizer.chained_optimizers
    return inner


def test_a_loaded_optimizer_counts_steps_for_each_parameter(one_rank: Config) -> None:
    fixes.install()  # a second time: nothing happens
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
