"""The plan writes every element of every server rank once, from a rank that has it, for any layouts and buckets."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_collab.config import CONF, compose
from megatron_collab.launch.trainer_specs import trainer_layout
from megatron_collab.models import hf_config, hf_to_megatron, hf_to_sglang, lora
from megatron_collab.models.hf_config import Experts, ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.models.parallel_layout import TrainerLayout, stage_layers
from megatron_collab.settings import LoraConfig
from megatron_collab.settings.schema import LORA_TARGETS
from megatron_collab.weight_sync import plan
from megatron_collab.weight_sync.encoding import placed
from megatron_collab.weight_sync.fp8_blocks import FP8_BLOCK, fp8_nbytes, fp8_scales
from megatron_collab.weight_sync.plan import Slice, SyncPlan
from tests.helpers import policy_servers
from tests.weight_sync.random_layouts import draw, seeds

ITEM = 4
Shards = dict[str, np.ndarray]


def tensors(shape: ModelShape, adapters: LoraConfig | None = None) -> Shards:
    """The Hugging Face model with a distinct number for every element; with every A and B of `adapters`."""
    arrays, start = {}, 1
    beside = {factor.key: factor.shape for factor in lora.factors(shape, adapters or LoraConfig())}
    for name, sides in (hf_to_megatron.hf_shapes(shape) | beside).items():
        count = int(np.prod(sides))
        arrays[name] = np.arange(start, start + count).reshape(sides)
        start += count
    return arrays


def trainer_shards(shape: ModelShape, trainer: TrainerLayout, adapters: LoraConfig | None = None) -> list[Shards]:
    """The shards of each rank, by Megatron's own rank groups; vocabulary padding is -1."""
    every = *hf_to_megatron.table(shape), *lora.factor_table(shape, adapters or LoraConfig())
    hf, entries = tensors(shape, adapters), {entry.megatron: entry for entry in every}
    dp = trainer.ranks // (trainer.tp * trainer.pp * trainer.cp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=trainer.tp, ep=1, dp=dp, pp=trainer.pp, cp=trainer.cp, order=order)
    expert_dp = trainer.ranks // (trainer.pp * trainer.ep)
    sparse = RankGenerator(tp=1, ep=trainer.ep, dp=expert_dp, pp=trainer.pp, cp=1, order=order)

    def places(generator: RankGenerator, group: str) -> dict[int, int]:
        return {rank: place for ranks in generator.get_ranks(group) for place, rank in enumerate(ranks)}

    tp_ranks, pp_ranks, ep_ranks = places(dense, "tp"), places(dense, "pp"), places(sparse, "ep")
    counts = stage_layers(shape.layers, trainer.pp * trainer.vpp)
    chunk_of = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    by_rank = []
    for rank in range(trainer.ranks):
        shards = {}
        for name, entry in entries.items():
            layer = re.match(r"(?:decoder|model)\.layers\.(\d+)\.", name)
            stage = chunk_of[int(layer[1])] % trainer.pp if layer else 0 if "embedding" in name else trainer.pp - 1
            is_local = (
                not entry.expert or int(name.split(".")[5]) // (shape.experts.count // trainer.ep) == ep_ranks[rank]
            )
            if stage == pp_ranks[rank] and is_local:
                shard = np.full(hf_to_megatron.shard_shape(entry, trainer.tp if not entry.expert else 1), -1)
                for piece in hf_to_megatron.pieces(entry, shape, trainer.tp, tp_ranks[rank]):
                    shard[piece.shard_index] = hf[piece.hf][piece.hf_index]
                shards[name] = shard
        by_rank.append(shards)
    return by_rank


def run(sync_plan: SyncPlan, shards: list[Shards], shape: ModelShape, server: ServerLayout) -> None:
    """Execute a plan on numbered elements and compare with what each server rank must hold."""
    hf = tensors(shape, server.lora)
    for rank in range(server.tp):
        every = *hf_to_sglang.table(shape, server, rank), *hf_to_sglang.adapters(shape, server, rank)
        parameters = {parameter.name: parameter for parameter in every}
        loaded = {name: np.zeros(parameter.shape, int) for name, parameter in parameters.items()}
        written = {name: np.zeros(parameter.shape, int) for name, parameter in parameters.items()}
        for buckets in sync_plan:
            for piece in buckets[rank].slices:
                block = shards[piece.source][piece.shard][piece.shard_index]
                target = loaded[piece.target][piece.target_index]
                loaded[piece.target][piece.target_index] = block.reshape(target.shape)
                written[piece.target][piece.target_index] += 1
        for name, parameter in parameters.items():
            expected = np.zeros(parameter.shape, int)
            for part in parameter.parts:
                expected[part.shard_index] = hf[part.hf][part.hf_index].reshape(expected[part.shard_index].shape)
            assert (loaded[name] == expected).all(), name
            assert (written[name] == (expected > 0)).all(), name


def check_buckets(sync_plan: SyncPlan, bucket_bytes: int) -> None:
    for buckets in sync_plan:
        sent: Counter[int] = Counter()
        for bucket in buckets:
            assert bucket.size <= bucket_bytes
            end = 0
            for piece in bucket.slices:
                assert piece.offset >= end and piece.offset % plan.ALIGNMENT == 0
                end = piece.offset + piece.size
            assert end <= bucket.size
            order = [piece.source for piece in bucket.slices]
            assert order == sorted(order)
            for source in set(order):
                pieces = [piece for piece in bucket.slices if piece.source == source]
                start, stop = pieces[0].offset, pieces[-1].offset + pieces[-1].size
                sent[source] += stop - start
                assert all(
                    (start <= piece.offset and piece.offset + piece.size <= stop) == (piece.source == source)
                    for piece in bucket.slices
                )
        assert max(sent.values()) <= bucket_bytes


def elements(piece: Slice) -> int:
    return int(np.prod([cut.stop - cut.start for cut in piece.target_index]))


def slices(sync_plan: SyncPlan) -> list[tuple[int, Slice]]:
    """(server rank, slice) of all buckets."""
    return [(rank, piece) for row in sync_plan for rank, bucket in enumerate(row) for piece in bucket.slices]


@pytest.mark.parametrize("seed", seeds(150))
def test_every_element_is_written_once(seed: int) -> None:
    shape, trainer, server = draw(seed)
    shards = trainer_shards(shape, trainer)
    for bucket_bytes in (8192 * (1 + seed % 3), 1 << 30):
        sync_plan = plan.plan_sync(shape, trainer, server, ITEM, bucket_bytes)
        run(sync_plan, shards, shape, server)
        check_buckets(sync_plan, bucket_bytes)
        assert all(piece.size == ITEM * elements(piece) for _, piece in slices(sync_plan))


@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        (TrainerLayout(tp=1), ServerLayout(4)),
        (TrainerLayout(tp=1, ranks=2), ServerLayout(4)),
        (TrainerLayout(tp=4, ranks=4), ServerLayout(1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bucket_bytes", [4096, 8192])
def test_no_rank_sends_or_receives_more_than_a_bucket_in_a_round(
    trainer: TrainerLayout, server: ServerLayout, bucket_bytes: int
) -> None:
    """Also if one source feeds all ranks of a server, or if one of these is fed by all sources."""
    sides = {"hidden": 64, "ffn": 128, "heads": 8, "kv_heads": 8, "head_dim": 8, "vocab": 128}
    shape = replace(draw(0)[0], layers=2, experts=None, **sides)
    sync_plan = plan.plan_sync(shape, trainer, server, ITEM, bucket_bytes)
    check_buckets(sync_plan, bucket_bytes)
    assert len(sync_plan) > 10


@pytest.mark.parametrize("bucket_bytes", [6400, 7168])
def test_a_source_of_rows_of_different_widths_sends_at_most_a_bucket(bucket_bytes: int) -> None:
    """Server ranks that the trainer's cut goes through get half of the columns of the others."""
    sides = {"hidden": 12, "ffn": 12 * 128, "heads": 12, "kv_heads": 12, "head_dim": 1, "vocab": 96}
    shape = replace(draw(0)[0], layers=2, experts=None, **sides)
    check_buckets(plan.plan_sync(shape, TrainerLayout(2, ranks=2), ServerLayout(6), ITEM, bucket_bytes), bucket_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_adapters_travel_after_the_model_and_later_alone(seed: int) -> None:
    shape, trainer, server = draw(seed)
    targets = {"o_proj", *random.Random(seed).sample(LORA_TARGETS, seed % len(LORA_TARGETS))}  # experts have none
    server = replace(server, lora=LoraConfig(rank=1 + seed % 3, targets=sorted(targets)))
    sync_plan = plan.plan_sync(shape, trainer, server, ITEM, 8192 * (1 + seed % 3))
    run(sync_plan, trainer_shards(shape, trainer, server.lora), shape, server)
    assert plan.first_round(sync_plan, server, new=True) == 0
    first = plan.first_round(sync_plan, server, new=False)
    factors = {entry.megatron for entry in lora.factor_table(shape, server.lora)}
    assert {piece.shard for _, piece in slices(sync_plan[first:])} == factors
    assert not factors & {piece.shard for _, piece in slices(sync_plan[:first])}


@pytest.mark.parametrize("seed", range(10))
def test_blocks_of_fp8_stay_whole(seed: int) -> None:
    """Slices have the scales of the whole parameter, each computed once, from its complete 128 x 128 block."""
    shape, trainer, server = draw(seed, fp8=True)
    sync_plan = plan.plan_sync(shape, trainer, server, ITEM, 8 << 20)
    run(sync_plan, trainer_shards(shape, trainer), shape, server)
    check_buckets(sync_plan, 8 << 20)
    for rank in range(server.tp):
        table = hf_to_sglang.table(shape, server, rank)
        quantized = [parameter for parameter in table if parameter.quantized]
        scales = {parameter.name: np.zeros(fp8_scales(parameter.shape), int) for parameter in quantized}
        for _, piece in (pair for pair in slices(sync_plan) if pair[0] == rank):
            sides = [cut.stop - cut.start for cut in piece.target_index]
            assert piece.quantized == (piece.target in scales)
            assert piece.size == (fp8_nbytes(sides) if piece.quantized else ITEM * elements(piece))
            if piece.quantized:
                block = scales[piece.target][placed(piece.target, piece.target_index, True)[1][1]]
                assert block.shape == fp8_scales(sides)
                assert all(cut.start % FP8_BLOCK == 0 for cut in piece.target_index[-2:])
                block += 1
        assert all((count == 1).all() for count in scales.values())


@pytest.mark.parametrize("seed", range(20))
def test_equal_cuts_take_the_direct_path(seed: int) -> None:
    """Each server rank is written only by ranks of its own tensor parallel part, in whole shards if possible."""
    shape, trainer, server = draw(seed, equal_cuts=True)
    tp = trainer.tp  # and a vocabulary that needs no padding, which differs
    shape = replace(shape, experts=None, kv_heads=tp, heads=2 * tp, ffn=4 * tp, vocab=64 * tp)
    trainer, server = replace(trainer, ep=1), replace(server, ep=1)
    for rank, piece in slices(plan.plan_sync(shape, trainer, server, ITEM)):
        assert piece.source % tp == rank
        assert piece.shard_index == piece.target_index


def test_a_shard_that_both_sides_cut_alike_is_one_slice() -> None:
    """Fused ones too, of query, key and value heads or of gate and up: their parts are adjacent on both sides."""
    shape = replace(draw(0)[0], layers=2, experts=None, heads=4, kv_heads=2, ffn=8, vocab=128)
    arrived = slices(plan.plan_sync(shape, TrainerLayout(tp=2, ranks=2), ServerLayout(2), ITEM))
    assert set(Counter((rank, piece.target) for rank, piece in arrived).values()) == {1}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("trainer", "server"),
    [
        (TrainerLayout(tp=8, pp=16, ranks=128), ServerLayout(8)),
        (TrainerLayout(tp=8, pp=4, vpp=2, ranks=256), ServerLayout(8)),
        (TrainerLayout(tp=8, pp=4, ranks=256), ServerLayout(8, fp8=True)),
        (TrainerLayout(tp=2, pp=2, ranks=4), ServerLayout(1)),
        (TrainerLayout(tp=1, pp=1, ranks=2), ServerLayout(8)),
    ],
    ids=str,
)
def test_stages_and_ranks_share_the_work(trainer: TrainerLayout, server: ServerLayout) -> None:
    """Of a 70B model: buckets are full, every stage writes in every round, no rank more than others of its stage."""
    shape = hf_config.read(CONF / "shapes" / "Llama-3.3-70B-Instruct.json")
    sync_plan = plan.plan_sync(shape, trainer, server, 2)
    received = Counter({rank: sum(row[rank].size for row in sync_plan) for rank in range(server.tp)})
    sent: Counter[int] = Counter()
    for _, piece in slices(sync_plan):
        sent[piece.source] += piece.size
    assert sum(received.values()) <= 1.001 * sum(sent.values())
    assert len(sync_plan) <= 1.1 * max([*received.values(), *sent.values()]) / plan.BUCKET_BYTES + 1
    size = trainer.ranks // trainer.pp
    for stage in range(trainer.pp):
        ranks = range(stage * size, (stage + 1) * size)
        assert max(sent[rank] for rank in ranks) <= 1.1 * sum(sent[rank] for rank in ranks) / size
    for row in sync_plan[:-1]:
        assert {piece.source // size for bucket in row for piece in bucket.slices} == set(range(trainer.pp))


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="a bucket of 64 bytes is too small") as refused:
        plan.plan_sync(*draw(0), ITEM, 64)
    row_bytes = int(str(refused.value).rpartition(" ")[2])
    with pytest.raises(ValueError, match=f"a bucket of {row_bytes} bytes is too small: single rows take {row_bytes}$"):
        plan.plan_sync(*draw(0), ITEM, row_bytes)
    check_buckets(plan.plan_sync(*draw(0), ITEM, row_bytes + plan.ALIGNMENT), row_bytes + plan.ALIGNMENT)
    shape = replace(draw(0)[0], layers=2, experts=Experts(2, 1, 8, True, layers=(0,)))
    with pytest.raises(ValueError, match="layer 1 has no experts"):
        plan.plan_sync(shape, TrainerLayout(1), ServerLayout(), ITEM)


@pytest.mark.parametrize(
    ("settings", "trainer", "server", "message"),
    [
        ({"ffn": 384}, TrainerLayout(tp=2, ranks=2), ServerLayout(1, fp8=True), "gate_up_proj.weight is split"),
        ({"ffn": 384}, TrainerLayout(tp=1), ServerLayout(2, fp8=True), "has 192 rows on a server's rank"),
        (
            {"head_dim": 64},
            TrainerLayout(tp=1),
            ServerLayout(1, fp8=True),
            "qkv_proj.weight is split at row",
        ),
        (
            {"heads": 3, "kv_heads": 1, "head_dim": 64},
            TrainerLayout(tp=1),
            ServerLayout(1, fp8=True),
            "q_proj.weight has 192 rows on a server's rank",
        ),
        ({"head_dim": 64}, TrainerLayout(tp=1), ServerLayout(1), None),
        ({"heads": 3, "kv_heads": 3}, TrainerLayout(tp=1), ServerLayout(2), "attention heads"),
        ({"ffn": 384}, None, ServerLayout(1, fp8=True), None),
        ({}, TrainerLayout(tp=2, ranks=2), ServerLayout(2, fp8=True), None),
    ],
)
def test_layouts_that_a_server_cannot_hold_are_reported(
    settings: dict[str, int], trainer: TrainerLayout | None, server: ServerLayout, message: str | None
) -> None:
    """Cuts through FP8 blocks only with a trainer, which sends the weights."""
    shape = replace(draw(0)[0], heads=4, kv_heads=2, head_dim=128, ffn=512, hidden=256, experts=None)
    fault = plan.layout_fault(replace(shape, **settings), trainer, server)
    assert fault == message if message is None else fault is not None and message in fault and "\n" not in fault


@pytest.mark.seconds
def test_the_layouts_of_a_run() -> None:
    config = compose(["experiment=train_70b"])
    assert trainer_layout(config) == TrainerLayout(tp=8, pp=4, vpp=4, cp=1, ep=1, ranks=128)
    assert policy_servers(config).layout == ServerLayout(tp=8, ep=1, fp8=True)
