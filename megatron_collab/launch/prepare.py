"""What happens before the ranks: make the world, refuse what cannot run, become torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_collab import environments
from megatron_collab.config import SETTINGS, Config, ConfigError, changes, require
from megatron_collab.config.extension import NoOptions
from megatron_collab.launch.validate import check_model
from megatron_collab.rollout import tools, users
from megatron_collab.runtime import network
from megatron_collab.runtime.network import bindable
from megatron_collab.runtime.process import FINISHED, LAUNCHER, under_torchrun
from megatron_collab.types import Task


def prepare(config: Config) -> None:
    """Make the shipped world where one is asked for, then check everything that needs files.

    Raises ConfigError; nothing has been started by then.
    """
    # Hugging Face's libraries take seconds to import, which refused settings need not wait for.
    from megatron_collab.data import datasets
    from megatron_collab.data.chat_template import ChatRenderer

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
            reader = datasets.task_reader(config.data)
            files = {"data.train": config.data.train, "data.eval": config.data.eval}
            tasks = {
                setting: datasets.load_tasks(Path(file), setting, reader) for setting, file in files.items() if file
            }
            _check_users(config, tasks)
        if not under_torchrun():
            ChatRenderer(config.model.path, tools.schemas(config.rollout.tools))
            bindable("rollout.server.port", config.rollout.server.port, network.address(config))
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    _check_same_run(config)


def finished(config: Config) -> int:
    """The steps of the finished run in run.dir; 0 where there is none, or train.steps asks for more."""
    folder = Path(config.run.dir)
    if not ((folder / FINISHED).is_file() and (folder / SETTINGS).is_file()):
        return 0
    steps = json.loads((folder / SETTINGS).read_text())["train"]["steps"]
    return steps if config.train.steps <= steps else 0


def replace_by_torchrun(config: Config, arguments: list[str]) -> NoReturn:
    """Become `agent … -m megatron_collab.train` with the same arguments; does not return."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "megatron_collab.launch.torchrun", "--max-restarts=0"]
    command += [f"--nproc-per-node={config.launch.nproc_per_node}", "-m", "megatron_collab.train", *arguments]
    os.execve(sys.executable, command, environment)


def _check_users(config: Config, tasks: Mapping[str, Sequence[Task]]) -> None:
    """Every task needs a user: the one that it names, or that user.name names for all. `tasks`: by their setting."""
    examples = {
        config.user.name or task.user: f"{setting}, task {task.id}"
        for setting in reversed(list(tasks))
        for task in reversed(tasks[setting])
    }
    for name, example in examples.items():
        reason = users.check_user(name, config)
        if reason:
            raise ConfigError(f"{example}: {reason}")
    takes = any(users.find_user(users.split_user(name)[0]).Options is not NoOptions for name in examples)
    require(takes or not config.user.options, "user.options: no user of the tasks has options; remove them")


def _check_same_run(config: Config) -> None:
    """A run goes on only with settings that do not make another run of it."""
    for change in changes(config):
        require(
            change.allowed,
            f"run.dir={config.run.dir}: holds a run with {change.setting}={change.before}, not {change.after}; choose "
            "another run.dir, or remove that folder",
        )
