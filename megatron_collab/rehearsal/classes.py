"""Groups the ranks of a run that hold the same. Imports no framework."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_collab.config import Config
from megatron_collab.inference.spec import Placement
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.weight_sync.node_routing import Places


@dataclass(frozen=True)
class RankClass:
    """A class of ranks that build, hold, write and save the same.

    `vocabulary`: real rows of the embedding and the head; `saves`: whether they write their weights to a checkpoint,
    `saves_experts`: whether they write their experts; `serves`: whether a server runs on their device; `segments`: the
    number of server ranks for which they keep buckets.
    """

    stage: int
    vocabulary: int
    saves: bool
    saves_experts: bool
    serves: bool
    segments: int

    def stepping(self) -> RankClass:
        """The class without what is saved, which makes no difference during a step."""
        return replace(self, saves=False, saves_experts=False)


def class_of(
    config: Config, shape: ModelShape, placement: Placement | None, places: Places | None, rank: int
) -> RankClass:
    """The class of a rank; `placement` of the policy's servers, `places` of the weight sync: None if supervised."""
    parallel = config.parallel
    size = config.launch.ranks // parallel.pp
    stage, stage_rank = divmod(rank, size)
    tp_rank, replica = stage_rank % parallel.tp, stage_rank // parallel.tp
    rows = -(-shape.vocab // parallel.tp)
    ends = stage in (0, parallel.pp - 1)
    serving = placement.occupied if placement and placement.colocated else set[int]()
    return RankClass(
        stage=stage,
        vocabulary=min(rows, max(0, shape.vocab - tp_rank * rows)) if ends else 0,
        saves=replica == 0,
        saves_experts=shape.experts is not None and stage_rank < parallel.ep,
        serves=rank % config.launch.nproc_per_node in serving,
        segments=sum(places.keeps(rank, t) for t in range(placement.tp)) if placement and places else 0,
    )


def classes(
    config: Config, shape: ModelShape, placement: Placement | None, places: Places | None
) -> dict[RankClass, list[int]]:
    """Every class of ranks of the run with its ranks, in order; see class_of."""
    ranks_by_class: dict[RankClass, list[int]] = defaultdict(list)
    for rank in range(config.launch.ranks):
        ranks_by_class[class_of(config, shape, placement, places, rank)].append(rank)
    return dict(ranks_by_class)
