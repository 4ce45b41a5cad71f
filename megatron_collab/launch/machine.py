"""Whether this machine could hold the processes of a run at all: what they take before they have any model."""

from __future__ import annotations

from operator import attrgetter

import psutil

from megatron_collab.config import Config, require
from megatron_collab.models import parallel_layout
from megatron_collab.runtime import device

# MiB that one has for itself, at least: USS of the processes of a booking run on a CPU (Linux, Python 3.11).
RANK, CONVERSATION_WORKER, REWARD_WORKER, CPU_SERVER = 300, 200, 75, 400


def check_processes(config: Config) -> None:
    """Raises ConfigError naming the setting that asks for most, where the memory is too small for all of them."""
    nodes = config.launch.nodes
    needed = {"launch.nproc_per_node": config.launch.nproc_per_node * RANK}
    if config.train.stage == "rl":
        needed["rollout.workers"] = -(-config.rollout.workers // nodes) * CONVERSATION_WORKER
        needed["reward.workers"] = -(-config.reward.workers // nodes) * REWARD_WORKER
        if device.select(config.launch.device).type == "cpu":
            needed["rollout.server.replicas"] = parallel_layout.servers_per_node(config) * CPU_SERVER
    total, here = sum(needed.values()), psutil.virtual_memory().total >> 20
    setting = max(needed, key=needed.__getitem__)
    require(
        total <= here,
        f"{setting}={attrgetter(setting)(config)}: the processes of a node need {total / 1024:.0f} GiB before they "
        f"have any model, and this machine has {here / 1024:.0f}; lower it",
    )
