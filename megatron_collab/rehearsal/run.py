"""Simulates a run: its servers, then a rank of every class, each from its weights to a step and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.planning.memory import MemoryPart
from megatron_collab.rehearsal import checkpoint, publishing, servers
from megatron_collab.rehearsal.classes import RankClass, classes
from megatron_collab.rehearsal.rank import make_trainer, parts_of, passes, step
from megatron_collab.rehearsal.world import rank_on_paper
from megatron_collab.settings import ConfigError, require

# Errors of the run's code and its libraries if something does not fit.
_FAULTS = (ValueError, RuntimeError, AssertionError, KeyError, IndexError)

StepMemory = tuple[int, Sequence[MemoryPart]]  # (peak bytes in a step, the parts)


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks of a class: `parts` as in the plan, `peak` bytes in a step, `snapshot` bytes of host memory
    while a checkpoint is written. `rank` is the rank that was simulated."""

    kind: RankClass
    ranks: Sequence[int]
    rank: int
    parts: Sequence[MemoryPart]
    peak: float
    snapshot: float


def rehearse(config: Config, shape: ModelShape, hf: Mapping[str, Any], all_ranks: bool = False) -> Iterator[RankMemory]:
    """Simulate one rank of every class, or `all_ranks`, in order; `hf`: the model's config.json.

    Of classes that differ only in what they save, one takes a step for all; with `all_ranks` each takes its own.
    Raises ConfigError for the first rank where something does not fit; it names the tensor.
    """
    if config.launch.device == "cpu":
        message = "only TransformerEngine's layers support it; rehearse without launch.device=cpu"
        require(config.parallel.cp == 1, f"parallel.cp={config.parallel.cp}: {message}")
        require(not config.model.fp8, f"model.fp8={config.model.fp8}: {message}")
    served, publish, placement, places = list[MemoryPart](), None, None, None
    if config.train.stage == "rl":
        publish = publishing.Publishing.of(config, shape)
        placement, places = publish.policy.placement, publish.places
        served = _servers(publish, dict(hf))
    contents, counted = checkpoint.Contents(), dict[RankClass, StepMemory]()
    for kind, members in classes(config, shape, placement, places).items():
        for rank in members if all_ranks else members[:1]:
            try:
                memory = _rehearse_rank(config, shape, kind, rank, publish, contents, {} if all_ranks else counted)
            except _FAULTS as error:
                text = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(f"rank {rank} of the trainer, pipeline stage {kind.stage}: {text}") from error
            parts = [*memory.parts, *(served if kind.serves else [])]
            covered = [rank] if all_ranks else members
            yield RankMemory(kind, covered, rank, parts, memory.peak, memory.snapshot)
    try:
        contents.check_read()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _servers(publish: publishing.Publishing, hf: dict[str, Any]) -> list[MemoryPart]:
    """The parts of a server's fullest rank; raises ConfigError for the first rank that differs from the plan."""
    server_ranks = servers.rehearse(publish.order(hf))
    for server in server_ranks:
        if server.fault:
            raise ConfigError(f"rank {server.rank} of a server: {server.fault}")
    adapters = max(server.adapters for server in server_ranks)
    return [
        MemoryPart("server: weights", 0, max(server.weights for server in server_ranks)),
        *([MemoryPart("server: adapters", adapters, adapters)] if adapters else []),
        MemoryPart("server: KV cache", 0, max(server.kv_cache for server in server_ranks)),
    ]


def _rehearse_rank(
    config: Config,
    shape: ModelShape,
    kind: RankClass,
    rank: int,
    publish: publishing.Publishing | None,
    contents: checkpoint.Contents,
    counted: dict[RankClass, StepMemory],
) -> RankMemory:
    with rank_on_paper(config, shape, rank) as ledger:
        trainer = make_trainer(config, shape, ledger)
        buckets = publish.write(rank, trainer.chunks, ledger) if publish else []
        step_class = kind.stepping()
        if step_class not in counted:
            step(trainer, config, passes(config, kind.stage), ledger)
            counted[step_class] = ledger.usage.peak, parts_of(trainer, config, ledger)
        peak, parts = counted[step_class]
        buckets.clear()
        snapshot = checkpoint.save_and_load(trainer, rank, contents, ledger)
    return RankMemory(kind, [rank], rank, parts, peak, snapshot)
