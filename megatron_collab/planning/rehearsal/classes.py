"""Which ranks of a run differ in what they hold. Numbers only, no framework."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.parallel_layout import ranks, serving
from megatron_collab.weight_sync.node_routing import Places


@dataclass(frozen=True)
class RankClass:
    """What ranks have in common: no two of them differ in what they build, hold, write or save.

    `vocabulary`: real rows of the embedding and the head, `saves`: whether they write their weights to a checkpoint,
    and `saves_experts` their experts, `serves`: whether a server stands on their device, `segments`: for how many
    server ranks they keep buckets.
    """

    stage: int
    vocabulary: int
    saves: bool
    saves_experts: bool
    serves: bool
    segments: int

    def stepping(self) -> RankClass:
        """The same but for what is saved, in which ranks do not differ while they step."""
        return replace(self, saves=False, saves_experts=False)


def class_of(config: Config, shape: ModelShape, places: Places | None, rank: int) -> RankClass:
    """`places`: of the weight sync, None in supervised training."""
    parallel = config.parallel
    size = ranks(config) // parallel.pp
    stage, own = divmod(rank, size)
    tp_rank, replica = own % parallel.tp, own // parallel.tp
    rows = -(-shape.vocab // parallel.tp)
    ends = stage in (0, parallel.pp - 1)
    keeps = places is not None and config.rollout.server.colocated
    return RankClass(
        stage=stage,
        vocabulary=min(rows, max(0, shape.vocab - tp_rank * rows)) if ends else 0,
        saves=replica == 0,
        saves_experts=shape.experts is not None and own < parallel.ep,
        serves=keeps and rank % config.launch.nproc_per_node in serving(config),
        segments=sum(places.keeps(rank, t) for t in range(config.rollout.server.tp)) if places else 0,
    )


def classes(config: Config, shape: ModelShape, places: Places | None) -> dict[RankClass, list[int]]:
    """Every class of ranks of the run, with its ranks in order."""
    found: dict[RankClass, list[int]] = defaultdict(list)
    for rank in range(ranks(config)):
        found[class_of(config, shape, places, rank)].append(rank)
    return dict(found)
