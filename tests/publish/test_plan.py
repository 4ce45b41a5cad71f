"""The plan writes every element of every server rank once, from where it is, whatever the layouts and the buckets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_collab.layout import stage_layers
from megatron_collab.publish import hf_map, plan, server_map
from megatron_collab.publish.hf_config import ModelShape
from megatron_collab.publish.plan import Plan, ServerLayout, TrainerLayout
from tests.publish.random_layouts import draw

ITEM = 4
Shards = dict[str, np.ndarray]


def tensors(shape: ModelShape) -> Shards:
    """The Hugging Face model, every element a number of its own."""
    found, start = {}, 1
    for name, sides in hf_map.hf_shapes(shape).items():
        count = int(np.prod(sides))
        found[name] = np.arange(start, start + count).reshape(sides)
        start += count
    return found


def trainer_shards(shape: ModelShape, trainer: TrainerLayout) -> list[Shards]:
    """What each rank holds, by Megatron's own account of the ranks' groups; padding of the vocabulary is -1."""
    hf, entries = tensors(shape), {entry.megatron: entry for entry in hf_map.table(shape)}
    dp = trainer.ranks // (trainer.tp * trainer.pp * trainer.cp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=trainer.tp, ep=1, dp=dp, pp=trainer.pp, cp=trainer.cp, order=order)
    expert_dp = trainer.ranks // (trainer.pp * trainer.ep)
    sparse = RankGenerator(tp=1, ep=trainer.ep, dp=expert_dp, pp=trainer.pp, cp=1, order=order)

    def place(generator: RankGenerator, group: str, rank: int) -> int:
        return next(ranks.index(rank) for ranks in generator.get_ranks(group) if rank in ranks)

    counts = stage_layers(shape.layers, trainer.pp * trainer.vpp)
    chunk_of = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    found = []
    for rank in range(trainer.ranks):
        tp_rank, pp_rank, ep_rank = place(dense, "tp", rank), place(dense, "pp", rank), place(sparse, "ep", rank)
        shards = {}
        for name, entry in entries.items():
            layer = hf_map.LAYER.fullmatch(name)
            stage = chunk_of[int(layer[1])] % trainer.pp if layer else 0 if "embedding" in name else trainer.pp - 1
            own = not entry.expert or int(name.split(".")[5]) // (shape.experts.count // trainer.ep) == ep_rank
            if stage == pp_rank and own:
                shard = np.full(hf_map.shard_shape(entry, trainer.tp if not entry.expert else 1), -1)
                for piece in hf_map.pieces(entry, shape, trainer.tp, tp_rank):
                    shard[piece.shard_index] = hf[piece.hf][piece.hf_index]
                shards[name] = shard
        found.append(shards)
    return found


def run(found: Plan, shards: list[Shards], shape: ModelShape, server: ServerLayout) -> None:
    """Carry out a plan with numbers for elements, and compare with what each server rank must hold."""
    hf = tensors(shape)
    for rank in range(server.tp):
        parameters = {parameter.name: parameter for parameter in server_map.table(shape, server, rank)}
        held = {name: np.zeros(parameter.shape, int) for name, parameter in parameters.items()}
        written = {name: np.zeros(parameter.shape, int) for name, parameter in parameters.items()}
        for buckets in found.rounds:
            for piece in buckets[rank].slices:
                block = shards[piece.source][piece.shard][piece.shard_index]
                target = held[piece.target][piece.target_index]
                held[piece.target][piece.target_index] = block.reshape(target.shape)
                written[piece.target][piece.target_index] += 1
        for name, parameter in parameters.items():
            wanted = np.zeros(parameter.shape, int)
            for part in parameter.parts:
                wanted[part.index] = hf[part.hf][part.hf_index].reshape(wanted[part.index].shape)
            assert (held[name] == wanted).all(), name
            assert (written[name] == (wanted > 0)).all(), name


def check_buckets(found: Plan, bucket_bytes: int) -> None:
    for buckets in found.rounds:
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
                start, stop = bucket.part(source)
                sent[source] += stop - start
                assert all(
                    (start <= piece.offset and piece.offset + piece.size <= stop) == (piece.source == source)
                    for piece in bucket.slices
                )
        assert max(sent.values()) <= bucket_bytes


@pytest.mark.parametrize("seed", range(150))
def test_every_element_is_written_once_from_where_it_is(seed: int) -> None:
    shape, trainer, server = draw(seed)
    shards = trainer_shards(shape, trainer)
    for bucket_bytes in (8192 * (1 + seed % 3), 1 << 30):
        found = plan.plan(shape, trainer, server, ITEM, bucket_bytes)
        run(found, shards, shape, server)
        check_buckets(found, bucket_bytes)
        for piece in (piece for buckets in found.rounds for bucket in buckets for piece in bucket.slices):
            sides = [cut.stop - cut.start for cut in piece.target_index]
            assert piece.size == ITEM * np.prod(sides)
