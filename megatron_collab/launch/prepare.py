"""What happens before the ranks: make the world, refuse what cannot run, become torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from megatron_collab.config import Config, ConfigError
from megatron_collab.launch.validate import check_model
from megatron_collab.runtime import network
from megatron_collab.runtime.network import bindable
from megatron_collab.runtime.process import FINISHED, LAUNCHER, under_torchrun
from megatron_collab.types import Task

# Settings that may change when a run goes on; all others decide its numbers.
MAY_CHANGE = (
    "launch.",
    "llm.",
    "publish.",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "run.wandb_project",
    "rollout.server.port",
    "rollout.server.replicas",  # a sample follows from its seed, on whatever server
    "rollout.server.start_timeout",
    "rollout.max_staleness",  # what was in flight is in the checkpoint
)


def prepare(config: Config) -> None:
    """Make the shipped world where one is asked for, then check everything that needs files.

    Raises ConfigError; nothing has been started by then.
    """
    from megatron_collab import environments
    from megatron_collab.data import datasets
    from megatron_collab.data.chat_template import ChatRenderer
    from megatron_collab.rollout import tools

    nodes = config.launch.nodes
    if nodes > 1 and not under_torchrun():
        raise ConfigError(
            f"launch.nodes={nodes}: only the ranks of this node could be started from here; start "
            f"python -m megatron_collab.launch.torchrun --nnodes {nodes} --nproc-per-node "
            f"{config.launch.nproc_per_node} … -m megatron_collab.train on each node, or set launch.nodes=1"
        )
    if nodes > 1 and config.train.stage == "rl" and "RAY_ADDRESS" not in os.environ:
        raise ConfigError(
            f"launch.nodes={nodes}: RAY_ADDRESS is not set, and Ray would be on one node only; start Ray on every node "
            "in this folder, where relative paths begin, and set RAY_ADDRESS to HOST:PORT of its head, or set "
            "launch.nodes=1"
        )
    try:
        environments.prepare(config)
        check_model(config)
        if config.train.stage == "sft":
            datasets.load_conversations(Path(config.data.train), "data.train")
        else:
            _check_users(config, "data.train", datasets.load_tasks(Path(config.data.train), "data.train"))
            if config.data.eval:
                _check_users(config, "data.eval", datasets.load_tasks(Path(config.data.eval), "data.eval"))
        if not under_torchrun():
            ChatRenderer(config.model.path, tools.schemas(config.rollout.tools))
            bindable("rollout.server.port", config.rollout.server.port, network.address(config))
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    _check_same_run(config)


def finished(config: Config) -> bool:
    """Whether run.dir holds the whole run already."""
    return (Path(config.run.dir) / FINISHED).is_file()


def replace_by_torchrun(config: Config, arguments: list[str]) -> NoReturn:
    """Become `agent … -m megatron_collab.train` with the same arguments; does not return."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "megatron_collab.launch.torchrun", "--max-restarts=0"]
    command += [f"--nproc-per-node={config.launch.nproc_per_node}", "-m", "megatron_collab.train", *arguments]
    os.execve(sys.executable, command, environment)


def _check_users(config: Config, setting: str, tasks: Sequence[Task]) -> None:
    """Every task needs somebody to talk to: the user that it names, or that user.name names for all."""
    from megatron_collab.rollout import users

    examples = {config.user.name or task.user: task.id for task in reversed(tasks)}
    for name, example in examples.items():
        reason = users.check(name, config)
        if reason:
            raise ConfigError(f"{setting}, task {example}: {reason}")


def _check_same_run(config: Config) -> None:
    """A folder goes on with the settings it began with; other numbers need another folder."""
    file = Path(config.run.dir) / "config.json"
    if not file.is_file():
        return
    before, now = _flat(json.loads(file.read_text())), _flat(asdict(config))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and not name.startswith(MAY_CHANGE):
            raise ConfigError(
                f"run.dir={config.run.dir}: holds a run with {name}={before.get(name)}, not {now.get(name)}; "
                f"choose another run.dir, or remove that folder"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
