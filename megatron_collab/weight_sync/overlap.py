"""The blocks that a trainer's shards and a server's parameters have in common; pure functions of numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_collab.models import hf_to_megatron, hf_to_sglang, lora, parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Index, Piece, Shape
from megatron_collab.models.hf_to_sglang import Parameter, ServerLayout
from megatron_collab.models.parallel_layout import Holders, TrainerLayout
from megatron_collab.weight_sync.fp8_blocks import FP8_BLOCK

_LAYER = re.compile(r"\blayers\.\d+\.")
_Held = tuple[str, Holders, Piece]  # a piece of a shard


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """target[target_index] of server rank `rank` = shard[shard_index] of any of `holders`.

    They are alike as the blocks of a Piece. In the names of what belongs to a layer {} stands for its number.
    """

    rank: int
    holders: Holders
    shard: str
    shard_index: Index
    target: str
    target_index: Index
    quantised: bool

    @property
    def axis(self) -> int:
        """The dimension of the target's rows."""
        return len(self.target_index) - len(self.shard_index)


def placed(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, adapters: bool = False
) -> Iterator[tuple[int, int | None, WeightBlock]]:
    """(pipeline stage, layer, block) of the whole model. Layers are alike: the blocks are those of a model of one.

    `adapters`: of those that the server holds beside the model, and not of the model.
    ValueError, which names the setting, if a layout cannot hold the model or cuts blocks of FP8.
    """
    hf_to_sglang.check_layers(shape)
    experts = replace(shape.experts, layers=(0,)) if shape.experts else None
    outside: list[WeightBlock] = []
    inside: list[WeightBlock] = []
    for block in _common(replace(shape, layers=1, experts=experts), trainer, server, adapters):
        (inside if "{}" in block.target else outside).append(block)
    for block in outside:
        yield 0 if block.shard.startswith("embedding.") else trainer.pp - 1, None, block
    for layer, stage in enumerate(parallel_layout.stages(shape, trainer)):
        for block in inside:
            yield stage, layer, block


def _common(shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, adapters: bool) -> Iterator[WeightBlock]:
    """Every element of every server rank in one block, blocks as large as both sides allow."""
    entries = hf_to_megatron.table(shape)
    if adapters:
        assert server.lora is not None
        entries = lora.factor_table(shape, server.lora)
    held: dict[str, list[_Held]] = defaultdict(list)
    for entry in entries:
        parts = parallel_layout.holders(entry, shape, trainer) if entry.exported else {}
        for part, holders in parts.items():
            for piece in hf_to_megatron.pieces(entry, shape, trainer.tp, part):
                held[piece.hf].append((_LAYER.sub("layers.{}.", entry.megatron), holders, piece))
    tensors = hf_to_megatron.hf_shapes(shape)
    for rank in range(server.tp):
        for parameter in (hf_to_sglang.adapters if adapters else hf_to_sglang.table)(shape, server, rank):
            shared = (block for part in parameter.parts for block in _shared(rank, parameter, part, held[part.hf]))
            found = _merged(shared)
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
            ("rows", "columns"), part.shard_index[-2:], part.hf_index, sides, tensors[part.hf], strict=True
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


def _shared(rank: int, parameter: Parameter, part: Piece, held: Iterable[_Held]) -> Iterator[WeightBlock]:
    """The blocks that a part of a server's parameter shares with the pieces of its tensor."""
    name = _LAYER.sub("layers.{}.", parameter.name)
    leading = part.shard_index[: -len(part.hf_index)]
    for shard, holders, piece in held:
        both = zip(part.hf_index, piece.hf_index, strict=True)
        bounds = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both)
        if all(cut.start < cut.stop for cut in bounds):
            there = _moved(bounds, piece.hf_index, piece.shard_index)
            here = (*leading, *_moved(bounds, part.hf_index, part.shard_index[len(leading) :]))
            yield WeightBlock(rank, holders, shard, there, name, here, parameter.quantised)


def _moved(bounds: Index, origin: Index, place: Index) -> Index:
    """`bounds`, relative to a tensor, in a parameter that holds the tensor's block `origin` at `place`."""
    shifts = (b.start - a.start for a, b in zip(origin, place, strict=True))
    return tuple(slice(cut.start + shift, cut.stop + shift) for cut, shift in zip(bounds, shifts, strict=True))


def _merged(blocks: Iterable[WeightBlock]) -> list[WeightBlock]:
    """Merge blocks that are adjacent by rows on both sides: where the cuts are equal, a shard is sent as one."""
    found: list[WeightBlock] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and (last.shard, last.holders) == (block.shard, block.holders):
            there = _joined(last.shard_index, block.shard_index, 0)
            here = _joined(last.target_index, block.target_index, block.axis)
            if there and here:
                found[-1] = replace(block, shard_index=there, target_index=here)
                continue
        found.append(block)
    return found


def _joined(first: Index, second: Index, dimension: int) -> Index | None:
    """Both as one, where the second follows the first in that dimension and equals it in the others."""
    start, middle, stop = first[dimension].start, first[dimension].stop, second[dimension].stop
    return with_bounds(first, dimension, start, stop) if second == with_bounds(first, dimension, middle, stop) else None


def with_bounds(index: Index, dimension: int, start: int, stop: int) -> Index:
    """The index with other bounds in one dimension."""
    return (*index[:dimension], slice(start, stop), *index[dimension + 1 :])
