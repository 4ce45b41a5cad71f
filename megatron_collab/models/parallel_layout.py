"""What the layout of the ranks and FP8 ask of the settings and of the data; numbers only, no framework."""

from __future__ import annotations

from math import lcm

from megatron_collab.config import Config

# recipe: what the sides of FP8 matrices are multiples of
FP8_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def ranks(config: Config) -> int:
    """Trainer ranks over all nodes."""
    return config.launch.nodes * config.launch.nproc_per_node


def servers_per_node(config: Config) -> int:
    """SGLang servers on each node; server i is on node i // this."""
    return config.rollout.server.replicas // config.launch.nodes


def alignment(config: Config) -> tuple[int, int]:
    """(tokens, tokens): what the length of every packed sequence, and of a micro-batch, must be a multiple of.

    Context parallelism gives each rank two pieces of every sequence. Sequence parallelism gives each rank the
    same part of what remains, whose tokens are a side of FP8's matrices.
    """
    parallel = config.parallel
    sequence = 2 * parallel.cp if parallel.cp > 1 else 1
    fp8 = FP8_MULTIPLE[config.model.fp8_recipe] if config.model.fp8 else 1
    part = fp8 * (parallel.tp if parallel.sequence_parallel else 1)
    return sequence, lcm(sequence, part * parallel.cp)


def stage_layers(layers: int, stages: int) -> list[int]:
    """How many layers each pipeline stage has; where the stages do not divide them, the first take one more.

    Virtual stages are stages here, in the order in which a token passes them: rank r of p has r, r + p, …
    """
    each, rest = divmod(layers, stages)
    return [each + (stage < rest) for stage in range(stages)]
