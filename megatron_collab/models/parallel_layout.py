"""The parallel layout of the trainer: constraints on settings and data, and which ranks hold which shard.

Imports no framework. Ranks are numbered as in Megatron-Core 0.19.2 (parallel_state.RankGenerator, order
tp-cp-ep-dp-pp): the ranks of a pipeline stage are consecutive; within a stage the tensor parallel rank varies fastest.
Experts are not cut: for them the expert parallel rank varies fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import TensorCut, WeightEntry
from megatron_collab.settings import ParallelConfig, TrainingModelConfig

# recipe -> required multiple of the sides of FP8 matrices
FP8_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
# Required multiple of a rank's tokens for sequence parallelism to gather them in FP8: TransformerEngine's
# Float8BlockQuantizer.is_quantizable (tensor/float8_blockwise_tensor.py) needs whole blocks, else it gathers 16 bits.
FP8_GATHERED = FP8_MULTIPLE | {"blockwise": 128}


def alignment(parallel: ParallelConfig, model: TrainingModelConfig) -> tuple[int, int]:
    """(tokens, tokens): required multiple of the length of every packed sequence, and of a micro-batch.

    Context parallelism gives each rank two pieces of every sequence. Sequence parallelism splits these evenly over
    the tensor parallel ranks; the tokens of a rank are a side of the FP8 matrices.
    """
    sequence = 2 * parallel.cp if parallel.cp > 1 else 1
    multiples = FP8_GATHERED if parallel.sequence_parallel else FP8_MULTIPLE
    fp8 = multiples[model.fp8_recipe] if model.fp8 else 1
    part = fp8 * (parallel.tp if parallel.sequence_parallel else 1)
    return sequence, lcm(sequence, part * parallel.cp)


def stage_layers(layers: int, stages: int) -> list[int]:
    """Number of layers of each pipeline stage; if the stages do not divide `layers`, the first ones get one more.

    Virtual stages count as stages, in the order of a forward pass: rank r of p has stages r, r + p, …
    """
    quotient, remainder = divmod(layers, stages)
    return [quotient + (stage < remainder) for stage in range(stages)]


@dataclass(frozen=True)
class TrainerLayout:
    """`ranks`: world size, tp x pp x cp x data parallel. `vpp`: virtual stages per stage."""

    tp: int
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class Holders:
    """Ranks `first`, `first` + `step`, `first` + 2 `step`, … of a pipeline stage, which all hold the same shard."""

    first: int = 0
    step: int = 1

    def ranks(self, trainer: TrainerLayout, stage: int) -> range:
        """The global ranks, for pipeline stage `stage`."""
        size = trainer.ranks // trainer.pp
        return range(stage * size + self.first, (stage + 1) * size, self.step)


def holders(entry: WeightEntry, shape: ModelShape, trainer: TrainerLayout) -> dict[int, Holders]:
    """Tensor-parallel part of an entry -> the ranks that hold it."""
    if entry.expert:
        assert shape.experts is not None
        number = int(entry.megatron.split(".experts.")[1].split(".")[0])
        return {0: Holders(number * trainer.ep // shape.experts.count, trainer.ep)}
    if entry.cut is TensorCut.WHOLE:
        return {0: Holders()}
    return {part: Holders(part, trainer.tp) for part in range(trainer.tp)}


def stages(shape: ModelShape, trainer: TrainerLayout) -> list[int]:
    """The pipeline stage of every layer; virtual stages are assigned round-robin."""
    counts = stage_layers(shape.layers, trainer.pp * trainer.vpp)
    return [virtual % trainer.pp for virtual, count in enumerate(counts) for _ in range(count)]
