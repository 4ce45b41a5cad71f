"""What a trainer builds and learns, settled before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_collab.settings import (
    AlgoConfig,
    OptimConfig,
    ParallelConfig,
    SamplingConfig,
    TrainConfig,
    TrainingModelConfig,
)


@dataclass(frozen=True)
class NetworkSpec:
    """A network on the ranks. `device`: auto, cpu or cuda; `seed`: of adapters and dropout."""

    model: TrainingModelConfig
    parallel: ParallelConfig
    device: str
    seed: int


@dataclass(frozen=True)
class TrainerSpec:
    """What the policy learns from, and how. `objective` and `reference`: as in Config.

    `teacher`: a network besides these that teaches (algo.teacher.model); None: there is none.
    `turn`: how the policy is sampled; `replay`: tokens are routed to the experts that the server chose. `colocated`:
    the servers use the trainer's devices while they sample.
    """

    network: NetworkSpec
    train: TrainConfig
    algo: AlgoConfig
    optim: OptimConfig
    objective: str
    reference: str | None
    teacher: NetworkSpec | None
    turn: SamplingConfig
    replay: bool
    colocated: bool
    run_dir: Path
