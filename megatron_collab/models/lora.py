"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): which there are, their shapes, and how ranks cut them.

    y = W x + alpha / rank B A x,   A [rank, columns], B [rows, rank]        (equation 3)

Every matrix W [rows, columns] of a Hugging Face folder has an A and a B of its own, as in PEFT, also where Megatron
holds several of them in one parameter. A is cut over the tensor-parallel ranks where the columns of W are, B where its
rows are; the other one is whole on every rank. Experts, norms, embedding and head have no adapters. Nothing here
imports a framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_collab.config import LoraConfig
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Shape, TensorCut, WeightEntry, divide, pieces, table

_CUTS = {None: TensorCut.WHOLE, 0: TensorCut.ROWS, 1: TensorCut.COLUMNS}


@dataclass(frozen=True)
class Factor:
    """An A or a B as a whole, [rank, columns] or [rows, rank]; `axis` is the dimension that ranks cut, if any.

    `key` is its name in a checkpoint; a PEFT folder has a prefix before it.
    """

    key: str
    shape: Shape
    axis: int | None

    def local(self, tp: int) -> Shape:
        """Its shape on one of `tp` ranks."""
        return tuple(divide(size, tp) if axis == self.axis else size for axis, size in enumerate(self.shape))


class Adapter(NamedTuple):
    """Of one matrix, whose last name is `projection`, as q_proj."""

    projection: str
    a: Factor
    b: Factor


# What the rows of a parameter are, in order: (number of the adapter, how many rows of its B). None: no adapter's.
Blocks = list[tuple[int | None, int]]


def scale(lora: LoraConfig) -> float:
    """What B A is multiplied by."""
    assert lora.rank is not None
    return lora.alpha / lora.rank


def adapters(entry: WeightEntry, lora: LoraConfig) -> tuple[Adapter, ...]:
    """Of the matrices that make up a Megatron parameter, in their order; of those that are no target none."""
    if entry.expert or entry.cut not in (TensorCut.ROWS, TensorCut.COLUMNS) or lora.rank is None:
        return ()
    found = []
    for name, sides in zip(entry.hf, entry.shapes, strict=True):
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if kind == "weight" and projection in lora.targets:
            rows, columns = sides
            a = Factor(f"{module}.lora_A.weight", (lora.rank, columns), 1 if entry.cut is TensorCut.COLUMNS else None)
            b = Factor(f"{module}.lora_B.weight", (rows, lora.rank), 0 if entry.cut is TensorCut.ROWS else None)
            found.append(Adapter(projection, a, b))
    return tuple(found)


def adapted(shape: ModelShape, lora: LoraConfig) -> Iterator[tuple[WeightEntry, tuple[Adapter, ...]]]:
    """Every Megatron parameter that has adapters, with them, in the order of a forward pass."""
    for entry in table(shape):
        if found := adapters(entry, lora):
            yield entry, found


def factors(shape: ModelShape, lora: LoraConfig) -> list[Factor]:
    """Every A and B of a model."""
    return [factor for _, found in adapted(shape, lora) for adapter in found for factor in (adapter.a, adapter.b)]


def factor_table(shape: ModelShape, lora: LoraConfig) -> tuple[WeightEntry, ...]:
    """Every A and B as `table` has the parameters: both of its names are the key."""
    return tuple(
        WeightEntry(factor.key, (factor.key,), (factor.shape,), _CUTS[factor.axis]) for factor in factors(shape, lora)
    )


def projections(shape: ModelShape, lora: LoraConfig) -> list[str]:
    """The targets that a model has adapters of."""
    return sorted({adapter.projection for _, found in adapted(shape, lora) for adapter in found})


def blocks(entry: WeightEntry, shape: ModelShape, lora: LoraConfig, tp: int) -> Blocks:
    """What the rows of a parameter are on one of `tp` ranks; those of each B there follow one another in that order."""
    keys = [adapter.b.key for adapter in adapters(entry, lora)]
    found: Blocks = []
    for piece in pieces(entry, shape, tp, 0):  # other ranks have other rows in the same order
        key = f"{piece.hf.removesuffix('.weight')}.lora_B.weight"
        rows = piece.shard_index[0].stop - piece.shard_index[0].start
        found.append((keys.index(key) if key in keys else None, rows))
    return found


def without_adapters(shape: ModelShape, lora: LoraConfig) -> int | None:
    """The first layer in which nothing is a target; None where every layer has one."""
    having = {entry.megatron.split(".")[2] for entry, _ in adapted(shape, lora)}
    return next((layer for layer in range(shape.layers) if str(layer) not in having), None)


def from_state(saved: Mapping[str, object]) -> LoraConfig | None:
    """The settings of the adapters that a checkpoint holds, from its state; None where it holds whole weights."""
    found = saved.get("lora")
    return LoraConfig(**found) if isinstance(found, dict) else None
