"""A whole run on paper: its servers, then a rank of every class, each from its weights to a step and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_collab.config import Config, ConfigError, require
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning.memory import MemoryPart
from megatron_collab.planning.rehearsal import checkpoint, publishing, servers
from megatron_collab.planning.rehearsal.classes import RankClass, classes
from megatron_collab.planning.rehearsal.rank import make_trainer, parts_of, passes, step
from megatron_collab.planning.rehearsal.world import rank_on_paper

# What the run's own code and its libraries raise where something does not fit.
_FAULTS = (ValueError, RuntimeError, AssertionError, KeyError, IndexError)

Counted = tuple[int, Sequence[MemoryPart]]  # in a step: the most bytes at once, and the parts


@dataclass(frozen=True)
class Rehearsed:
    """What the ranks of a class hold: `parts` as the plan has them, `peak` bytes at once in a step, `snapshot` in host
    memory while a checkpoint is written. `rank` is the one that was taken."""

    kind: RankClass
    ranks: Sequence[int]
    rank: int
    parts: Sequence[MemoryPart]
    peak: float
    snapshot: float


def rehearse(config: Config, shape: ModelShape, hf: Mapping[str, Any], every: bool = False) -> Iterator[Rehearsed]:
    """One rank of every class, or `every` rank, in order; `hf`: the model's config.json.

    Of classes that differ only in what they save, one takes a step for all; `every` rank takes its own.
    ConfigError with the first rank where something does not fit, which names the tensor.
    """
    if config.launch.device == "cpu":
        message = "only TransformerEngine's layers have it; rehearse without launch.device=cpu"
        require(config.parallel.cp == 1, f"<parallel.cp>: {message}", config)
        require(not config.model.fp8, f"<model.fp8>: {message}", config)
    served, publish = list[MemoryPart](), None
    if config.train.stage == "rl":
        publish = publishing.Publishing.of(config, shape)
        served = _servers(publish, dict(hf))
    contents, counted = checkpoint.Contents(), dict[RankClass, Counted]()
    for kind, members in classes(config, shape, publish.places if publish else None).items():
        for rank in members if every else members[:1]:
            try:
                found = _one(config, shape, kind, rank, publish, contents, {} if every else counted)
            except _FAULTS as error:
                text = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(f"rank {rank} of the trainer, pipeline stage {kind.stage}: {text}") from error
            parts = [*found.parts, *(served if kind.serves else [])]
            own = [rank] if every else members
            yield Rehearsed(kind, own, rank, parts, found.peak, found.snapshot)
    try:
        contents.check_read()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _servers(publish: publishing.Publishing, hf: dict[str, Any]) -> list[MemoryPart]:
    """The parts of a server's fullest rank; ConfigError for the first rank that is not as the plan has it."""
    found = servers.rehearse(publish.order(hf))
    for one in found:
        if one.fault:
            raise ConfigError(f"rank {one.rank} of a server: {one.fault}")
    stays = max(one.adapters for one in found)
    return [
        MemoryPart("server: weights", 0, max(one.weights for one in found)),
        *([MemoryPart("server: adapters", stays, stays)] if stays else []),
        MemoryPart("server: KV cache", 0, max(one.kv_cache for one in found)),
    ]


def _one(
    config: Config,
    shape: ModelShape,
    kind: RankClass,
    rank: int,
    publish: publishing.Publishing | None,
    contents: checkpoint.Contents,
    counted: dict[RankClass, Counted],
) -> Rehearsed:
    with rank_on_paper(config, shape, rank) as ledger:
        trainer = make_trainer(config, shape, ledger)
        buckets = publish.write(rank, trainer.chunks, ledger) if publish else []
        alike = kind.stepping()
        if alike not in counted:
            step(trainer, config, passes(config, kind.stage), ledger)
            counted[alike] = ledger.held.peak, parts_of(trainer, ledger)
        peak, parts = counted[alike]
        buckets.clear()
        snapshot = checkpoint.save_and_load(trainer, rank, contents, ledger)
    return Rehearsed(kind, [rank], rank, parts, peak, snapshot)
