"""Which trainer ranks hold which block of which Hugging Face tensor: the table, and where a layout puts its shards.

Ranks are counted as Megatron-Core 0.16.1 does (parallel_state.RankGenerator, order tp-cp-ep-dp-pp): the ranks of a
pipeline stage follow one another; within it the tensor parallel rank counts fastest, for experts, which are not cut,
the expert parallel one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Cut, Entry, Piece
from megatron_collab.models.parallel_layout import stage_layers


@dataclass(frozen=True)
class TrainerLayout:
    """`ranks`: all of them; what tp, pp and cp leave of them is data parallel. `vpp`: virtual stages of a stage."""

    tp: int
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class Holders:
    """Within a pipeline stage, its ranks `first`, `first` + `step`, `first` + 2 `step`, …: all hold the same."""

    first: int = 0
    step: int = 1

    def ranks(self, trainer: TrainerLayout, stage: int) -> range:
        """The ranks themselves, in pipeline stage `stage`."""
        size = trainer.ranks // trainer.pp
        return range(stage * size + self.first, (stage + 1) * size, self.step)


@dataclass(frozen=True)
class Held:
    """A piece of a shard, and who has it in the stage that has the shard."""

    shard: str
    piece: Piece
    holders: Holders


def held(entry: Entry, shape: ModelShape, trainer: TrainerLayout) -> list[Held]:
    """All pieces of an entry, each of them once however many ranks hold it."""
    if entry.expert:
        assert shape.experts is not None
        number = int(entry.megatron.split(".experts.")[1].split(".")[0])
        owners = {0: Holders(number * trainer.ep // shape.experts.count, trainer.ep)}
    elif entry.cut is Cut.WHOLE:
        owners = {0: Holders()}
    else:
        owners = {part: Holders(part, trainer.tp) for part in range(trainer.tp)}
    return [
        Held(entry.megatron, piece, holders)
        for part, holders in owners.items()
        for piece in hf_to_megatron.pieces(entry, shape, trainer.tp, part)
    ]


def stages(shape: ModelShape, trainer: TrainerLayout) -> list[int]:
    """The pipeline stage of every layer; virtual stages go round over the stages."""
    counts = stage_layers(shape.layers, trainer.pp * trainer.vpp)
    return [virtual % trainer.pp for virtual, count in enumerate(counts) for _ in range(count)]
