"""Settles what a trainer builds, learns from and publishes, before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.models.parallel_layout import TrainerLayout
from megatron_collab.settings.schema import TrainingModelConfig
from megatron_collab.trainer.spec import NetworkSpec, TrainerSpec
from megatron_collab.weight_sync.plan import SyncSpec


def trainer_layout(config: Config) -> TrainerLayout:
    """The layout of the trainer's weights."""
    parallel = config.parallel
    return TrainerLayout(parallel.tp, parallel.pp, parallel.vpp, parallel.cp, parallel.ep, config.launch.ranks)


def network_spec(config: Config) -> NetworkSpec:
    """A network of the trainer: the policy, or the critic before it gets its head."""
    return NetworkSpec(config.model, config.parallel, config.launch.device, config.run.seed)


def teacher_model(config: Config) -> TrainingModelConfig | None:
    """The model of a teacher with weights of its own, in the policy's dtype and without FP8; None if there is none."""
    teacher = config.algo.teacher
    return TrainingModelConfig(path=teacher.model, dtype=config.model.dtype) if teacher.place == "model" else None


def trainer_spec(config: Config) -> TrainerSpec:
    """What the policy learns from, and how."""
    network, model = network_spec(config), teacher_model(config)
    return TrainerSpec(
        network=network,
        train=config.train,
        algo=config.algo,
        optim=config.optim,
        objective=config.objective,
        reference=config.reference,
        teacher=replace(network, model=model) if model else None,
        turn=config.rollout.turn,
        replay=config.rollout.routing_replay,
        colocated=config.rollout.server.colocated,
        run_dir=Path(config.run.dir),
    )


def sync_spec(config: Config) -> SyncSpec:
    """How weights reach the servers: while these sample, their requests go on with the new weights."""
    pause = "retract" if config.rollout.max_staleness and not config.rollout.server.colocated else "abort"
    return SyncSpec(trainer_layout(config), config.publish, pause, config.launch.timeout)
