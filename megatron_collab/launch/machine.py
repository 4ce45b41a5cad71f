"""Checks that this machine has enough memory for the processes of a run, before they load any model."""

from __future__ import annotations

from operator import attrgetter

import psutil

from megatron_collab.config import Config
from megatron_collab.launch import server_specs
from megatron_collab.runtime import device
from megatron_collab.settings import require

# Lower bound in MiB per process: USS in a booking run on a CPU (Linux, Python 3.11).
RANK, CONVERSATION_WORKER, REWARD_WORKER, CPU_SERVER = 300, 200, 75, 400


def check_processes(config: Config) -> None:
    """Raises ConfigError if memory is too small for all processes; it names the setting that needs most."""
    nodes = config.launch.nodes
    needed = {"launch.nproc_per_node": config.launch.nproc_per_node * RANK}
    if config.train.stage == "rl":
        needed["rollout.workers"] = -(-config.rollout.workers // nodes) * CONVERSATION_WORKER
        needed["reward.workers"] = -(-config.reward.workers // nodes) * REWARD_WORKER
        if device.select(config.launch.device).type == "cpu":
            needed["rollout.server.replicas"] = server_specs.training(config).policy.placement.per_node * CPU_SERVER
    total, available = sum(needed.values()), psutil.virtual_memory().total >> 20
    setting = max(needed, key=needed.__getitem__)
    require(
        total <= available,
        f"{setting}={attrgetter(setting)(config)}: the processes of a node need {total / 1024:.0f} GiB before they "
        f"load any model, and this machine has {available / 1024:.0f}; lower it",
    )
