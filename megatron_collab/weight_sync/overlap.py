"""The blocks that a trainer's shards and a server's parameters have in common; pure functions of numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_collab.models import hf_to_megatron, hf_to_sglang, parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index, Shape
from megatron_collab.models.hf_to_sglang import Parameter, ServerLayout, ServerTensor
from megatron_collab.models.parallel_layout import Held, Holders, TrainerLayout
from megatron_collab.weight_sync.encoding import FP8_BLOCK

_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """target[target_index] of server rank `rank` = shard[shard_index] of any of `holders`.

    Both have the same elements in the same order; that of an expert has a leading dimension of 1 in the target. In the
    names of what belongs to a layer {} stands for its number.
    """

    rank: int
    holders: Holders
    shard: str
    shard_index: Index
    target: str
    target_index: Index
    quantised: bool

    @property
    def in_layer(self) -> bool:
        return "{}" in self.target


def placed(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout
) -> Iterator[tuple[int, int | None, WeightBlock]]:
    """(pipeline stage, layer, block) of the whole model. Layers are alike: the blocks are those of a model of one.

    ValueError, which names the setting, if a layout cannot hold the model or cuts blocks of FP8.
    """
    hf_to_sglang.check_layers(shape)
    experts = replace(shape.experts, layers=(0,)) if shape.experts else None
    outside: list[WeightBlock] = []
    inside: list[WeightBlock] = []
    for block in _common(replace(shape, layers=1, experts=experts), trainer, server):
        (inside if block.in_layer else outside).append(block)
    for block in outside:
        yield 0 if block.shard.startswith("embedding.") else trainer.pp - 1, None, block
    for layer, stage in enumerate(parallel_layout.stages(shape, trainer)):
        for block in inside:
            yield stage, layer, block


def _common(shape: ModelShape, trainer: TrainerLayout, server: ServerLayout) -> Iterator[WeightBlock]:
    """Every element of every server rank in one block, blocks as large as both sides allow."""
    held: dict[str, list[Held]] = defaultdict(list)
    for entry in hf_to_megatron.table(shape):
        if entry.exported:
            for own in parallel_layout.held(entry, shape, trainer):
                held[own.piece.hf].append(own)
    tensors = hf_to_megatron.hf_shapes(shape)
    for rank in range(server.tp):
        for parameter in hf_to_sglang.table(shape, server, rank):
            shared = (block for part in parameter.parts for block in _shared(rank, parameter, part, held[part.hf]))
            found = list(_merged(shared))
            if parameter.quantised:
                _check_fp8(parameter, tensors, found, trainer)
            yield from found


def _check_fp8(
    parameter: Parameter, tensors: Mapping[str, Shape], blocks: Iterable[WeightBlock], trainer: TrainerLayout
) -> None:
    """Refuse cuts within blocks of 128 x 128: SGLang has one scale per block, which needs all of its elements."""
    sides = parameter.shape[-2:]
    for part in parameter.parts:
        for what, cut, own, size, all_of_it in zip(
            ("rows", "columns"), part.index[-2:], part.hf_index, sides, tensors[part.hf], strict=True
        ):
            count = cut.stop - cut.start
            whole = count == size and own.stop - own.start == all_of_it
            if not whole and count % FP8_BLOCK:
                raise ValueError(
                    f"rollout.server.fp8=true: {part.hf} has {count} {what} on a server's rank, no multiple of "
                    f"{FP8_BLOCK}; lower rollout.server.tp, or set rollout.server.fp8=false"
                )
    for block in blocks:
        for what, cut, size in zip(("row", "column"), block.target_index[-2:], sides, strict=True):
            at = next((bound for bound in (cut.start, cut.stop) if bound % FP8_BLOCK and bound != size), None)
            if at is not None:
                raise ValueError(
                    f"rollout.server.fp8=true: {parameter.name} comes in pieces cut at {what} {at}, no multiple of "
                    f"{FP8_BLOCK}, with parallel.tp={trainer.tp}; choose another, or set rollout.server.fp8=false"
                )


def _shared(rank: int, parameter: Parameter, part: ServerTensor, held: Iterable[Held]) -> Iterator[WeightBlock]:
    """The blocks that a part of a server's parameter shares with the pieces of its tensor."""
    name = _LAYER.sub("layers.{}.", parameter.name)
    leading = part.index[: -len(part.hf_index)]
    for own in held:
        both = zip(part.hf_index, own.piece.hf_index, strict=True)
        bounds = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both)
        if all(cut.start < cut.stop for cut in bounds):
            there = _moved(bounds, own.piece.hf_index, own.piece.shard_index)
            here = (*leading, *_moved(bounds, part.hf_index, part.index[len(leading) :]))
            shard = _LAYER.sub("layers.{}.", own.shard)
            yield WeightBlock(rank, own.holders, shard, there, name, here, parameter.quantised)


def _moved(bounds: Index, origin: Index, place: Index) -> Index:
    """`bounds`, relative to a tensor, in a parameter that holds the tensor's block `origin` at `place`."""
    shifts = (b.start - a.start for a, b in zip(origin, place, strict=True))
    return tuple(slice(cut.start + shift, cut.stop + shift) for cut, shift in zip(bounds, shifts, strict=True))


def _merged(blocks: Iterable[WeightBlock]) -> Iterator[WeightBlock]:
    """Merge blocks that are adjacent by rows on both sides: where the cuts are equal, a shard is sent as one."""
    last: WeightBlock | None = None
    for block in blocks:
        if last is not None and _follows(last, block):
            axis = len(block.target_index) - len(block.shard_index)
            block = replace(
                block,
                shard_index=_joined(last.shard_index, block.shard_index, 0),
                target_index=_joined(last.target_index, block.target_index, axis),
            )
        elif last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _follows(first: WeightBlock, second: WeightBlock) -> bool:
    axis = len(first.target_index) - len(first.shard_index)
    return (first.shard, first.holders) == (second.shard, second.holders) and all(
        _without(a, dimension) == _without(b, dimension) and a[dimension].stop == b[dimension].start
        for a, b, dimension in (
            (first.shard_index, second.shard_index, 0),
            (first.target_index, second.target_index, axis),
        )
    )


def _without(index: Index, dimension: int) -> Index:
    return (*index[:dimension], *index[dimension + 1 :])


def _joined(first: Index, second: Index, dimension: int) -> Index:
    joined = slice(first[dimension].start, second[dimension].stop)
    return (*first[:dimension], joined, *first[dimension + 1 :])
