"""The parallel layout of the trainer: constraints on settings and data, and which ranks hold which shard.

Numbers only, no framework. Ranks are counted as Megatron-Core 0.19.2 does (parallel_state.RankGenerator, order
tp-cp-ep-dp-pp): the ranks of a pipeline stage follow one another; within it the tensor parallel rank counts fastest,
for experts, which are not cut, the expert parallel one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import TensorCut, WeightEntry

# recipe: what the sides of FP8 matrices are multiples of
FP8_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
# What the tokens of a rank are a multiple of, so that sequence parallelism gathers them in FP8: TransformerEngine's
# Float8BlockQuantizer.is_quantizable (tensor/float8_blockwise_tensor.py) needs whole blocks, else it gathers 16 bits.
FP8_GATHERED = FP8_MULTIPLE | {"blockwise": 128}


def ranks(config: Config) -> int:
    """Trainer ranks over all nodes."""
    return config.launch.nodes * config.launch.nproc_per_node


def servers_per_node(config: Config) -> int:
    """SGLang servers that each node has, or has a part of."""
    return config.rollout.server.replicas * config.rollout.server.nnodes // config.launch.nodes


def server_nodes(config: Config, server: int) -> range:
    """The nodes of server `server`, in the order of its ranks; as many servers as a node has share them."""
    count = config.rollout.server.nnodes
    first = server // servers_per_node(config) * count
    return range(first, first + count)


def server_ranks_per_node(config: Config) -> int:
    """Ranks of a server on each of its nodes."""
    return config.rollout.server.tp // config.rollout.server.nnodes


def first_gpu(config: Config, server: int) -> int:
    """The device, of each of its nodes, of the first rank that server `server` has there; others have the next ones.

    Colocated servers are spread over the devices of the trainer, so that each stands with as many of its ranks.
    """
    here, launch, options = servers_per_node(config), config.launch, config.rollout.server
    if options.colocated:
        return server % here * (launch.nproc_per_node // here)
    return launch.nproc_per_node + server % here * server_ranks_per_node(config)


def serving(config: Config) -> set[int]:
    """The devices of a node that have a rank of a server."""
    here, width = range(servers_per_node(config)), range(server_ranks_per_node(config))
    return {first_gpu(config, server) + own for server in here for own in width}


def alignment(config: Config) -> tuple[int, int]:
    """(tokens, tokens): what the length of every packed sequence, and of a micro-batch, must be a multiple of.

    Context parallelism gives each rank two pieces of every sequence. Sequence parallelism gives each rank the
    same part of what remains, whose tokens are a side of FP8's matrices.
    """
    parallel = config.parallel
    sequence = 2 * parallel.cp if parallel.cp > 1 else 1
    multiples = FP8_GATHERED if parallel.sequence_parallel else FP8_MULTIPLE
    fp8 = multiples[config.model.fp8_recipe] if config.model.fp8 else 1
    part = fp8 * (parallel.tp if parallel.sequence_parallel else 1)
    return sequence, lcm(sequence, part * parallel.cp)


def stage_layers(layers: int, stages: int) -> list[int]:
    """How many layers each pipeline stage has; where the stages do not divide them, the first take one more.

    Virtual stages are stages here, in the order in which a token passes them: rank r of p has r, r + p, …
    """
    each, rest = divmod(layers, stages)
    return [each + (stage < rest) for stage in range(stages)]


@dataclass(frozen=True)
class TrainerLayout:
    """`ranks`: the world size; what tp, pp and cp leave of it is data parallel. `vpp`: virtual stages per stage."""

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


def holders(entry: WeightEntry, shape: ModelShape, trainer: TrainerLayout) -> dict[int, Holders]:
    """By part of an entry (its tensor-parallel rank), the ranks that hold it, however many."""
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
