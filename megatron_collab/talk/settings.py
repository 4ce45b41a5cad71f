"""The settings under which the models of a run are served: its recorded ones, without what only a training needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_collab.config import EvaluateConfig, recorded_values
from megatron_collab.launch import evaluation, servers, validate
from megatron_collab.launch.spec import RunSpec, evaluation_spec
from megatron_collab.runtime import device, gpu_environment
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import ConfigError, replaced, require

_NOT_RECORDED = ("llm.record", "llm.replay", "llm.replay_missing", "llm.replay_latency")  # calls of a chat are new
_ON_THIS_NODE: dict[str, Any] = {"launch.nodes": 1, "launch.interface": None, "reward.workers": 1, "rollout.workers": 1}
_ON_THIS_NODE |= {"rollout.server.replicas": 1, "rollout.server.nnodes": 1, "rollout.server.port": 0}
_ON_THIS_NODE |= {"rollout.player": "futures", "rollout.player_options": {}, "rollout.max_messages": None}
_DECIDED = ("model.path", "run.dir", "rollout.player", "rollout.server.replicas")


class GpuShare(NamedTuple):
    """A process's share of this node's GPUs, `part` of `parts` equal ones: several processes serve a run each."""

    part: int = 0
    parts: int = 1

    def servers(self, models: int, needed: int, gpus: int | None) -> tuple[int, int]:
        """How many places servers of `models` get, and the first GPU for them; `gpus`: of the node, None on CPUs.

        Each model has its own place if that leaves enough GPUs for all servers, also those of users, judges and reward
        models; then they use `needed` GPUs. Otherwise the models share a place, and all processes the first GPUs.
        """
        if gpus is None:
            return models, 0
        room = gpus // self.parts
        return (models, self.part * room) if needed <= room else (1, 0)


WHOLE = GpuShare()


def run_settings(
    run: Path, models: int, overrides: Sequence[str], share: GpuShare = WHOLE, *, scores: bool = True
) -> tuple[EvaluateConfig, int]:
    """The settings of the run in folder `run`, changed by `overrides`, to serve that many of its `models` on this node;
    and the first GPU for them. `scores`: whether conversations are played and scored. Raises ConfigError for settings
    that cannot work here.
    """
    for name in _DECIDED:
        set_here = any(override.lstrip("+").partition("=")[0] == name for override in overrides)
        require(not set_here, f"{name}: the model of the run and this command decide it; remove it")
    values = recorded_values(run, EvaluateConfig)
    recorded = {name: value for name, value in values.items() if name not in _NOT_RECORDED}
    config = evaluation.compose_absolute(EvaluateConfig, overrides, recorded, constructs=scores)
    gpu_environment.enter()
    config = replaced(config, _ON_THIS_NODE)
    try:
        spec = evaluation_spec(config)
        assert spec.serving
        servers.check_gpus(config, spec.serving)
        servers.check_arguments(spec.serving)
        gpus = device.count() if device.select(config.launch.device).type == device.GPU else None
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    validate.check_options(config)
    needed = max(served.placement.end for served in spec.serving.models) + (models - 1) * config.rollout.server.tp
    replicas, first_gpu = share.servers(models, needed, gpus)
    return replaced(config, {"rollout.server.replicas": replicas}), first_gpu


def spec_in(config: EvaluateConfig, folder: Path, model: Path) -> RunSpec:
    """The settled settings of `config` with the Hugging Face folder `model`, in a run folder `folder`."""
    return evaluation_spec(replaced(config, {"run.dir": str(folder), "model.path": str(model)}))
