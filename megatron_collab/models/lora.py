"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): names, shapes and tensor-parallel cuts.

    y = W x + alpha / rank B A x,   A [rank, columns], B [rows, rank]        (equation 3)

Every matrix W [rows, columns] of a Hugging Face folder has its own A and B, as in PEFT, even if Megatron fuses several
matrices into one parameter. If the columns of W are cut over the tensor-parallel ranks, A is; if its rows are, B is.
The other factor is whole on every rank. Experts, norms, embedding and head have no adapters. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import Shape, TensorCut, WeightEntry, divide, pieces, table
from megatron_collab.settings import LoraConfig

_CUTS = {None: TensorCut.WHOLE, 0: TensorCut.ROWS, 1: TensorCut.COLUMNS}


@dataclass(frozen=True)
class ServedAdapters:
    """Low-rank adapters that policy servers hold besides the base; see model.lora."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


LoraSettings = LoraConfig | ServedAdapters  # without a rank there are no adapters


@dataclass(frozen=True)
class Factor:
    """A full A [rank, columns] or B [rows, rank]; `axis`: the dimension cut over the ranks, if any.

    `key` is its name in a checkpoint; a PEFT folder prefixes it.
    """

    key: str
    shape: Shape
    axis: int | None

    def local(self, tp: int) -> Shape:
        """The shape on one of `tp` ranks."""
        return tuple(divide(size, tp) if axis == self.axis else size for axis, size in enumerate(self.shape))


class Adapter(NamedTuple):
    """The adapter of one matrix; `projection`: the last part of its module name, such as q_proj."""

    projection: str
    a: Factor
    b: Factor


# Row blocks of a parameter, in order: (index of the adapter or None, number of rows).
Blocks = list[tuple[int | None, int]]


def scale(lora: LoraSettings) -> float:
    """The factor of B A: alpha / rank."""
    assert lora.rank is not None
    return lora.alpha / lora.rank


def adapters(entry: WeightEntry, lora: LoraSettings) -> tuple[Adapter, ...]:
    """Adapters of the matrices of a Megatron parameter that are targets, in order."""
    if entry.expert or entry.cut not in (TensorCut.ROWS, TensorCut.COLUMNS) or lora.rank is None:
        return ()
    matched = []
    for name, sides in zip(entry.hf, entry.shapes, strict=True):
        module, _, kind = name.rpartition(".")
        projection = module.rpartition(".")[2]
        if kind == "weight" and projection in lora.targets:
            rows, columns = sides
            a = Factor(f"{module}.lora_A.weight", (lora.rank, columns), 1 if entry.cut is TensorCut.COLUMNS else None)
            b = Factor(f"{module}.lora_B.weight", (rows, lora.rank), 0 if entry.cut is TensorCut.ROWS else None)
            matched.append(Adapter(projection, a, b))
    return tuple(matched)


def lora_entries(shape: ModelShape, lora: LoraSettings) -> Iterator[tuple[WeightEntry, tuple[Adapter, ...]]]:
    """Yield every Megatron parameter that has adapters with its adapters, in forward order."""
    for entry in table(shape):
        if entry_adapters := adapters(entry, lora):
            yield entry, entry_adapters


def factors(shape: ModelShape, lora: LoraSettings) -> list[Factor]:
    """Every A and B of a model."""
    return [factor for _, group in lora_entries(shape, lora) for adapter in group for factor in (adapter.a, adapter.b)]


def factor_table(shape: ModelShape, lora: LoraSettings) -> tuple[WeightEntry, ...]:
    """Entries for every A and B, like those of `table`; both names are the key."""
    return tuple(
        WeightEntry(factor.key, (factor.key,), (factor.shape,), _CUTS[factor.axis]) for factor in factors(shape, lora)
    )


def projections(shape: ModelShape, lora: LoraSettings) -> list[str]:
    """The targets for which the model has adapters."""
    return sorted({adapter.projection for _, entry_adapters in lora_entries(shape, lora) for adapter in entry_adapters})


def blocks(entry: WeightEntry, shape: ModelShape, lora: LoraSettings, tp: int) -> Blocks:
    """Row blocks of a parameter on one of `tp` ranks; the rows of every local B come in the same order."""
    keys = [adapter.b.key for adapter in adapters(entry, lora)]
    row_blocks: Blocks = []
    for piece in pieces(entry, shape, tp, 0):  # other ranks have other rows in the same order
        key = f"{piece.hf.removesuffix('.weight')}.lora_B.weight"
        rows = piece.shard_index[0].stop - piece.shard_index[0].start
        row_blocks.append((keys.index(key) if key in keys else None, rows))
    return row_blocks


def without_adapters(shape: ModelShape, lora: LoraSettings) -> int | None:
    """The first layer without any target; None if every layer has one."""
    adapted_layers = {entry.megatron.split(".")[2] for entry, _ in lora_entries(shape, lora)}
    return next((layer for layer in range(shape.layers) if str(layer) not in adapted_layers), None)


def from_state(saved: Mapping[str, object]) -> LoraConfig | None:
    """LoRA settings from a checkpoint's state; None if the checkpoint holds full weights."""
    settings = saved.get("lora")
    return LoraConfig(**settings) if isinstance(settings, dict) else None
