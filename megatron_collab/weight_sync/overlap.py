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
_ShardPiece = tuple[str, Holders, Piece]  # a piece of a shard


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """target[target_index] of server rank `rank` = shard[shard_index] of any of `holders`.

    Both blocks have equal shape and order of elements, as in a Piece. In parameter names {} stands for the layer.
    """

    rank: int
    holders: Holders
    shard: str
    shard_index: Index
    target: str
    target_index: Index
    quantized: bool

    @property
    def axis(self) -> int:
        """The dimension of the target's rows."""
        return len(self.target_index) - len(self.shard_index)


def placed(
    shape: ModelShape, trainer: TrainerLayout, server: ServerLayout, adapters: bool = False
) -> Iterator[tuple[int, int | None, WeightBlock]]:
    """(pipeline stage, layer, block) of the whole model. All layers share the blocks of a one-layer model.

    `adapters`: plan the adapters that the server holds beside the model instead of the model.
    Raises ValueError, which names the setting, if a layout cannot hold the model or cuts FP8 blocks.
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
    """Blocks that cover every element of every server rank once, as large as both sides allow."""
    entries = hf_to_megatron.table(shape)
    if adapters:
        assert server.lora is not None
        entries = lora.factor_table(shape, server.lora)
    pieces: dict[str, list[_ShardPiece]] = defaultdict(list)
    for entry in entries:
        parts = parallel_layout.holders(entry, shape, trainer) if entry.exported else {}
        for part, holders in parts.items():
            for piece in hf_to_megatron.pieces(entry, shape, trainer.tp, part):
                pieces[piece.hf].append((_LAYER.sub("layers.{}.", entry.megatron), holders, piece))
    tensors = hf_to_megatron.hf_shapes(shape)
    for rank in range(server.tp):
        for parameter in (hf_to_sglang.adapters if adapters else hf_to_sglang.table)(shape, server, rank):
            shared = (block for part in parameter.parts for block in _shared(rank, parameter, part, pieces[part.hf]))
            blocks = _merged(shared)
            if parameter.quantized:
                _check_fp8(parameter, tensors, blocks, trainer)
            yield from blocks


def _check_fp8(
    parameter: Parameter, tensors: Mapping[str, Shape], blocks: Iterable[WeightBlock], trainer: TrainerLayout
) -> None:
    """Reject cuts within blocks of 128 x 128: SGLang has one scale per block, computed from all of its elements."""
    sides = parameter.shape[-2:]
    for part in parameter.parts:
        for axis, cut, hf_cut, size, hf_size in zip(
            ("rows", "columns"), part.shard_index[-2:], part.hf_index, sides, tensors[part.hf], strict=True
        ):
            count = cut.stop - cut.start
            uncut = count == size and hf_cut.stop - hf_cut.start == hf_size
            if not uncut and count % FP8_BLOCK:
                raise ValueError(
                    f"rollout.server.fp8=true: {part.hf} has {count} {axis} on a server's rank, not a multiple of "
                    f"{FP8_BLOCK}; lower rollout.server.tp, or set rollout.server.fp8=false"
                )
    for block in blocks:
        for axis, cut, size in zip(("row", "column"), block.target_index[-2:], sides, strict=True):
            at = next((bound for bound in (cut.start, cut.stop) if bound % FP8_BLOCK and bound != size), None)
            if at is not None:
                raise ValueError(
                    f"rollout.server.fp8=true: {parameter.name} is split at {axis} {at}, not a multiple of "
                    f"{FP8_BLOCK}, with parallel.tp={trainer.tp}; choose another, or set rollout.server.fp8=false"
                )


def _shared(rank: int, parameter: Parameter, part: Piece, shard_pieces: Iterable[_ShardPiece]) -> Iterator[WeightBlock]:
    """The blocks that a part of a server's parameter shares with the pieces of its tensor."""
    name = _LAYER.sub("layers.{}.", parameter.name)
    leading = part.shard_index[: -len(part.hf_index)]
    for shard, holders, piece in shard_pieces:
        cuts = zip(part.hf_index, piece.hf_index, strict=True)
        bounds = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in cuts)
        if all(cut.start < cut.stop for cut in bounds):
            shard_index = _moved(bounds, piece.hf_index, piece.shard_index)
            target_index = (*leading, *_moved(bounds, part.hf_index, part.shard_index[len(leading) :]))
            yield WeightBlock(rank, holders, shard, shard_index, name, target_index, parameter.quantized)


def _moved(bounds: Index, origin: Index, place: Index) -> Index:
    """Translate `bounds` of a tensor to a parameter that holds the tensor's block `origin` at `place`."""
    shifts = (b.start - a.start for a, b in zip(origin, place, strict=True))
    return tuple(slice(cut.start + shift, cut.stop + shift) for cut, shift in zip(bounds, shifts, strict=True))


def _merged(blocks: Iterable[WeightBlock]) -> list[WeightBlock]:
    """Merge blocks that are adjacent by rows on both sides; if both sides cut alike, a shard is one block."""
    merged: list[WeightBlock] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if last is not None and (last.shard, last.holders) == (block.shard, block.holders):
            shard_index = _joined(last.shard_index, block.shard_index, 0)
            target_index = _joined(last.target_index, block.target_index, block.axis)
            if shard_index and target_index:
                merged[-1] = replace(block, shard_index=shard_index, target_index=target_index)
                continue
        merged.append(block)
    return merged


def _joined(first: Index, second: Index, dimension: int) -> Index | None:
    """The union, if the second index follows the first in that dimension and equals it in the others; else None."""
    start, middle, stop = first[dimension].start, first[dimension].stop, second[dimension].stop
    return with_bounds(first, dimension, start, stop) if second == with_bounds(first, dimension, middle, stop) else None


def with_bounds(index: Index, dimension: int, start: int, stop: int) -> Index:
    """The index with new bounds in one dimension."""
    return (*index[:dimension], slice(start, stop), *index[dimension + 1 :])
