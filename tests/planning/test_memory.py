"""The memory plan of a run against the real allocations of small models, part by part, within 10 %."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_collab.config import CONF, Config, compose
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning import activations, memory
from megatron_collab.settings import ConfigError
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.host_memory import PIECE
from megatron_collab.trainer.losses import apply_head
from tests.helpers import policy_servers
from tests.planning.allocated import allocated_bytes
from tests.ranks import init_parallel, make_config, run_ranks

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
QWEN3 = {**{name: value for name, value in MOE.items() if "expert" not in name}, "model_type": "qwen3"}
SHAPES = {
    "qwen3": QWEN3,
    "llama": {**QWEN3, "model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": True},
    "qwen3_moe": MOE,
}
LAYOUTS: Mapping[str, tuple[Mapping[str, object], dict[str, object]]] = {
    "tp2": ({"parallel.tp": 2, "parallel.sequence_parallel": True, "model.dtype": "bfloat16"}, QWEN3),
    "pp2": ({"parallel.pp": 2}, {**QWEN3, "tie_word_embeddings": True}),
    "vpp2": ({"parallel.pp": 2, "parallel.vpp": 2, "parallel.recompute": "full"}, QWEN3),
    "ep2": ({"parallel.ep": 2, "model.dtype": "bfloat16"}, MOE),
}
MICRO_BATCHES = 4
TENTH = 0.1


def layout(settings: Mapping[str, object]) -> Config:
    """Two ranks unless `settings` say otherwise, micro-batches of 256 tokens."""
    sizes = {"launch.nproc_per_node": 2, "train.tokens_per_micro_batch": 256, "rollout.context_length": 256}
    return make_config(Path("unused"), {**sizes, **settings})


def planned(config: Config, hf: dict[str, object], stage: int = 0) -> dict[str, float]:
    # SGLang has no model with experts in only some layers.
    config.rollout.server.colocated, config.publish.transport = False, "disk"
    parts = memory.plan_memory(config, ModelShape.from_hf(hf))[stage]
    return {part.name: part.training for part in parts}


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_hf(json.loads((CONF / "shapes" / f"{name}.json").read_text()))


# bfloat16 takes a CPU several times as long, so make test runs only one case of it.
ONE_RANK = [
    *product(SHAPES, ["float32"], ["none", "selective", "full"]),
    ("qwen3_moe", "bfloat16", "full"),
    *(
        pytest.param(family, "bfloat16", recompute, marks=pytest.mark.slow)
        for family, recompute in product(SHAPES, ["none", "selective", "full"])
        if (family, recompute) != ("qwen3_moe", "full")
    ),
]


@pytest.mark.seconds
@pytest.mark.parametrize(("family", "dtype", "recompute"), ONE_RANK)
def test_one_rank(one_rank: Config, family: str, dtype: str, recompute: str) -> None:
    config = layout({"model.dtype": dtype, "parallel.recompute": recompute, "launch.nproc_per_node": 1})
    plan = planned(config, SHAPES[family])
    for part, size in allocated_bytes(config, SHAPES[family], micro_batches=1).items():
        assert plan[part] == pytest.approx(size, rel=TENTH), part


ADAPTERS = {"model.lora.rank": 32, "launch.nproc_per_node": 1}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("llama", {"parallel.recompute": "full"}),
        ("qwen3_moe", {"parallel.recompute": "none"}),
    ],
)
def test_adapters_alone_have_gradients_and_an_optimizer(
    one_rank: Config, family: str, settings: dict[str, object]
) -> None:
    config = layout(ADAPTERS | settings)
    plan = planned(config, SHAPES[family])
    assert "reference" not in plan and "reference" in planned(layout(settings), SHAPES[family])
    for part, size in allocated_bytes(config, SHAPES[family], micro_batches=1).items():
        assert plan[part] == pytest.approx(size, rel=TENTH), part


LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64, "num_attention_heads": 16}
LARGE |= {"num_key_value_heads": 8, "num_hidden_layers": 8, "vocab_size": 32_000, "max_position_embeddings": 8192}


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", SHAPES)
def test_a_gpu_allocates_what_is_planned(
    one_gpu: Config, family: str, recompute: str, record_property: Callable[[str, object], None]
) -> None:
    """In bfloat16; by torch's own account a quarter more at most, for what kernels need for a moment."""
    sizes = {"train.tokens_per_micro_batch": 8192, "rollout.context_length": 8192, "launch.nproc_per_node": 1}
    on = {"launch.device": "cuda", "model.dtype": "bfloat16", "parallel.recompute": recompute}
    hf = SHAPES[family] | LARGE | ({"moe_intermediate_size": 768} if family == "qwen3_moe" else {})
    if family == "llama":
        hf |= {"num_key_value_heads": 16}
    config = layout(sizes | on)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    allocated, plan = allocated_bytes(config, hf, micro_batches=1), planned(config, hf)
    most, total = torch.cuda.max_memory_allocated() - before, sum(plan[part] for part in allocated)
    record_property("GiB planned", f"{total / memory.GIB:.2f}")
    record_property("allocated over planned", f"{most / total:.3f}")
    for part, size in allocated.items():
        assert plan[part] == pytest.approx(size, rel=TENTH), part
    assert 1 - TENTH < most / total < 1.25


@pytest.mark.seconds
def test_a_critic_trains_no_output_layer(one_rank: Config) -> None:
    config = layout({"algo.advantage": "gae", "launch.nproc_per_node": 1})
    plan = planned(config, SHAPES["qwen3"])
    allocated = allocated_bytes(config, SHAPES["qwen3"], micro_batches=1, critic=True)
    assert plan["gradients"] - plan["critic: gradients"] == pytest.approx(4 * 1000 * 256, rel=TENTH)
    for part in ("parameters", "gradients", "optimizer"):
        assert plan[f"critic: {part}"] == pytest.approx(allocated[part], rel=0.01)


def test_the_head(one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak allocation from the hidden states to their gradient."""
    monkeypatch.setattr(logprobs, "TILE", {"cpu": 1 << 14, "cuda": 1 << 14})
    shape, tokens = ModelShape.from_hf(SHAPES["qwen3"]), 1024
    weight = torch.randn(shape.vocab, shape.hidden, requires_grad=True)
    weight.main_grad = torch.zeros_like(weight)
    micro_batch = SimpleNamespace(positions=torch.arange(tokens), labels=torch.randint(0, shape.vocab, (tokens,)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # As in a schedule, there is no other reference to the hidden states.
        hidden = [torch.randn(1, 1, shape.hidden, requires_grad=True).repeat(1, tokens, 1)]
        log_probs, _ = apply_head(SimpleNamespace(head=weight), 1.0, shape.vocab, micro_batch, hidden.pop())
        log_probs.sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert activations.head(layout({}), shape, tokens) == pytest.approx(most, rel=TENTH)


@pytest.mark.processes
@pytest.mark.slow
def test_ranks() -> None:
    """Each rank of every layout, including pipelines with several micro-batches in flight."""
    rank_results = run_ranks(hold_every_layout, 2)
    for name, (settings, hf) in LAYOUTS.items():
        config = layout(settings)
        for rank in range(2):
            plan = planned(config, hf, stage=rank if config.parallel.pp > 1 else 0)
            for part, size in rank_results[rank][name].items():
                assert plan[part] == pytest.approx(size, rel=TENTH), (name, rank, part)


def hold_every_layout() -> dict[str, dict[str, int]]:
    """As one of two ranks: its allocated bytes in each layout."""
    allocated = {}
    for name, (settings, hf) in LAYOUTS.items():
        config = layout(settings)
        with init_parallel(config):
            allocated[name] = allocated_bytes(config, hf, MICRO_BATCHES)
    return allocated


def test_micro_batches_in_flight() -> None:
    assert [activations.in_flight([1.0], 4, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert activations.in_flight([1.0], 1, 0) == 1
    # 2 (p - r - 1) + (v - 1) p + 1 of the schedule's own count
    assert [activations.in_flight([1.0, 1.0], 4, rank) for rank in range(4)] == [11, 9, 7, 5]
    # Two virtual stages of different sizes: three passes of the first and two of the second are in flight.
    assert activations.in_flight([1.0, 10.0], 2, 0) == 2 + 2 * 10 + 1
    # Three exchanged tensors if there is another stage; on the first rank, the last of the warm-up has its gradient.
    assert [activations.in_flight([1.0, 1.0], 4, rank, 0.1) for rank in range(4)] == [11.3, 9.5, 7.5, 5.5]


def test_the_server_takes_what_sglang_takes() -> None:
    """A token of Llama 70B on 8 GPUs: keys and values of 80 layers, one head of 128, 2 bytes."""
    config, shape = compose(["experiment=train_70b", "rollout.server.fp8=false"]), shape_of("Llama-3.3-70B-Instruct")
    spec = policy_servers(config)
    assert memory.kv_cache(spec, shape) == 786432 * 40960
    spec = replace(spec, max_total_tokens=None)
    assert memory.kv_cache(spec, shape) == 256 * 8192 * 40960
    on_16 = replace(spec, placement=replace(spec.placement, tp=16))  # a head that cannot be cut is kept on two GPUs
    assert memory.kv_cache(on_16, shape) == 256 * 8192 * 40960
    assert memory.server_weights(on_16, shape) == pytest.approx(2 * (70.55e9 + 80 * 2 * 1024 * 8192) / 16, rel=1e-3)
    spec = replace(spec, fp8=True)  # all but the two embeddings: 2.1e9
    assert memory.server_weights(spec, shape) == pytest.approx((68.45e9 + 2 * 2.1e9) / 8, rel=0.001)
    scales = 80 * 2 * 4  # of keys and values in each layer, float32; Qwen3 has none
    without = memory.server_weights(spec, replace(shape, family="qwen3"))
    assert memory.server_weights(spec, shape) == without + scales


def test_a_share_of_the_gpu_is_weights_and_cache() -> None:
    config, shape = (
        compose(["experiment=train_8b", "rollout.server.memory_share=0.5"]),
        shape_of("Llama-3.1-8B-Instruct"),
    )
    for gpu in (80 * memory.GIB, 40 * memory.GIB):
        parts = memory.plan_memory(config, shape, gpu)[0]
        assert sum(part.sampling for part in parts if part.name.startswith("server: ")) == pytest.approx(gpu / 2)
    with pytest.raises(
        ConfigError, match=r"^rollout\.server\.memory_share=0\.5: .* leave no KV cache of a GPU of 4 GiB"
    ):
        memory.plan_memory(config, shape, 4 * memory.GIB)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.3-70B-Instruct", 70.55),
        ("Llama-3.1-8B-Instruct", 8.03),
        ("Qwen3-8B", 8.19),
        ("Qwen3-30B-A3B", 30.53),
    ],
)
def test_the_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    config = layout({"launch.nproc_per_node": 1})
    assert memory.network_parts(config, shape_of(name), 0)[0].training == pytest.approx(4e9 * billions, rel=0.001)


@pytest.mark.seconds
def test_where_parts_are_in_the_two_phases() -> None:
    shape = shape_of("Llama-3.3-70B-Instruct")
    stays = compose(["experiment=train_70b", "parallel.offload=false"])
    for part in memory.plan_memory(stays, shape)[0]:
        assert part.host == 0
        if part.name == "activations":
            assert part.training > part.sampling == 0
        elif part.name.startswith("server"):
            assert part.sampling > part.training == 0
        else:
            assert part.sampling == part.training > 0
    away = compose(["experiment=train_70b", "algo.kl_coef=0"])
    parts = {part.name: part for part in memory.plan_memory(away, shape)[0]}
    assert "reference" not in parts
    assert parts["optimizer"].sampling == parts["gradients"].sampling == parts["gradients"].host == 0
    assert 0 <= parts["optimizer"].host - parts["optimizer"].training < PIECE
    supervised = compose(["experiment=train_70b", "train.stage=sft"])
    stages = memory.plan_memory(supervised, shape)
    assert memory.host_memory(supervised, stages) == 0  # parallel.offload applies only to stages that sample
    names = {part.name for part in stages[3]}
    assert names == {"parameters", "gradients", "optimizer", "activations", "head"}
    pairs = compose(["experiment=train_70b", "train.stage=dpo"])
    assert {part.name for part in memory.plan_memory(pairs, shape)[3]} == names
    pairs.algo.dpo.precompute = False
    assert {part.name for part in memory.plan_memory(pairs, shape)[3]} == names | {"reference"}


@pytest.mark.seconds
def test_a_server_keeps_two_slots_for_adapters_also_while_the_trainer_trains() -> None:
    settings = ["rollout.server.fp8=false", "rollout.server.tp=2", "model.lora.rank=32", "model.lora.serve=adapters"]
    config, shape = compose(["experiment=train_70b", *settings]), shape_of("Llama-3.3-70B-Instruct")
    (part,) = (part for part in memory.plan_memory(config, shape)[0] if part.name == "server: adapters")
    a = 3 * 8192 + 2 * 8192 + (8192 + 28672) / 2  # columns of qkv, gate and up, o, down
    b = 10240 / 2 + 2 * 28672 / 2 + 2 * 8192  # rows
    assert part.training == part.sampling == 2 * 2 * 80 * 32 * (a + b)
    config.model.lora.serve = "merged"
    assert "server: adapters" not in {part.name for part in memory.plan_memory(config, shape)[0]}


# A server on two of eight GPUs, those of the first of four stages.
ON_ONE_NODE = [
    "experiment=train_70b",
    "launch.nodes=1",
    "parallel.tp=2",
    "rollout.server.replicas=1",
    "rollout.server.tp=2",
]


def test_servers_are_on_the_first_gpus() -> None:
    stages = memory.plan_memory(compose(ON_ONE_NODE), shape_of("Llama-3.3-70B-Instruct"))
    assert [any(part.name == "server: weights" for part in parts) for parts in stages] == [True, False, False, False]


@pytest.mark.seconds
def test_buckets_of_new_weights_are_on_the_gpus_of_a_server() -> None:
    """At most two of 512 MiB, plus what is sent to other nodes or servers in a round."""
    config, shape = compose(ON_ONE_NODE), shape_of("Llama-3.3-70B-Instruct")

    def sizes() -> list[float]:
        return [
            sum(part.training for part in stage if part.name == "weight sync buckets") / memory.GIB
            for stage in memory.plan_memory(config, shape)
        ]

    first, *other_sizes = sizes()
    assert 0.9 < first < 1.1 and max(other_sizes) < 0.1  # the other stages only send
    config.rollout.server.colocated = False
    assert max(sizes()) == 0  # they are on the servers' own GPUs
    assert not any("server" in part.name for part in memory.plan_memory(config, shape)[0])
    config.publish.transport = "network"
    assert 0 < max(sizes()) <= 1  # two buffers of what a rank sends in a round


@pytest.mark.seconds
def test_models_beside_the_policy_count_if_they_share_its_devices(tmp_path: Path) -> None:
    judge = "servers={judge: {model: Llama-3.1-8B-Instruct, tp: 2, max_total_tokens: 65536, colocated: %s}}"
    shape = shape_of("Llama-3.3-70B-Instruct")
    stages = memory.plan_memory(compose([*ON_ONE_NODE, judge % "true"]), shape)
    judge_parts = {part.name: part.sampling / memory.GIB for part in stages[0] if part.name.startswith("judge")}
    # Weights: 8.03 billion parameters in bfloat16, and sines and cosines of 131,072 positions (0.06 GiB).
    # Cache: 32 layers of 4 heads of keys and values of 128 on each of two GPUs.
    assert judge_parts == {"judge: weights": pytest.approx(7.48 + 0.06, abs=0.01), "judge: KV cache": 4.0}
    assert not any("judge" in part.name for stage in stages[1:] for part in stage), "it is on the first two GPUs"
    apart = memory.plan_memory(compose([*ON_ONE_NODE, judge % "false"]), shape)
    assert apart[0] == [part for part in stages[0] if not part.name.startswith("judge")]
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match=r"servers.judge.model=.*unknown model family .*; plan without servers.judge"):
        other = f"servers={{judge: {{model: {tmp_path}, colocated: true}}}}"
        memory.plan_memory(compose([*ON_ONE_NODE, other]), shape)


@pytest.mark.seconds
def test_train_70b_fits_128_gpus_of_80_gib_with_room() -> None:
    config = compose(["experiment=train_70b"])
    stages = memory.plan_memory(config, shape_of("Llama-3.3-70B-Instruct"))
    assert len(stages) == 4 and all(memory.peak(stage) < 65 * memory.GIB for stage in stages)
    config.parallel.pp = config.parallel.vpp = 1
    assert memory.peak(memory.plan_memory(config, shape_of("Llama-3.3-70B-Instruct"))[0]) > 80 * memory.GIB


def test_the_fullest_node_counts() -> None:
    """Of three pipeline stages on two nodes of three ranks: each has two ranks, and the second node the last stage."""
    layout_of_stages = layout({"launch.nodes": 2, "launch.nproc_per_node": 3, "parallel.pp": 3})
    head = memory.MemoryPart("head", 9.0, 0.0)
    stages = [[memory.MemoryPart("optimizer", 9.0, 0.0, host), head] for host in (1, 5, 2)]
    assert memory.host_memory(layout_of_stages, stages) == 5 + 2 + 2
