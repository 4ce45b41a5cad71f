"""What happens before the ranks: make the world, refuse what cannot run, become torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from megatron_collab import environments
from megatron_collab.config import SETTINGS, Config, ConfigError, changes, require
from megatron_collab.config.extension import NoOptions
from megatron_collab.launch.validate import check_model
from megatron_collab.rollout import users
from megatron_collab.rollout.tools import toolbox
from megatron_collab.runtime import network
from megatron_collab.runtime.process import FINISHED, LAUNCHER, under_torchrun


def prepare(config: Config) -> None:
    """Make the world that is asked for, then check all that needs files; ConfigError before anything is started."""
    # Hugging Face's libraries take seconds to import, which refused settings need not wait for.
    from megatron_collab.data import datasets
    from megatron_collab.data.chat_template import ChatRenderer

    nodes = config.launch.nodes
    command = f"python -m megatron_collab.launch.torchrun --nnodes {nodes} --nproc-per-node"
    require(
        nodes == 1 or under_torchrun(),
        f"launch.nodes={nodes}: only this node's ranks can be started from here; start {command} "
        f"{config.launch.nproc_per_node} … -m megatron_collab.train on each node, or set launch.nodes=1",
    )
    require(
        nodes == 1 or config.train.stage != "rl" or "RAY_ADDRESS" in os.environ,
        f"launch.nodes={nodes}: RAY_ADDRESS is not set, and Ray would be on one node only; start Ray on every node in "
        "this folder, and set RAY_ADDRESS to HOST:PORT of its head, or set launch.nodes=1",
    )
    try:
        environments.prepare(config)
        check_model(config)
        if config.train.stage == "sft":
            conversations = datasets.load_conversations(Path(config.data.train))
            if not under_torchrun():
                datasets.refuse_unwritable(conversations, ChatRenderer(config.model.path), config.data.train)
        else:
            examples: dict[str, str] = {}
            for setting, file in (("data.train", config.data.train), ("data.eval", config.data.eval)):
                for task in datasets.load_tasks(Path(file), setting, config.data) if file else ():
                    examples.setdefault(config.user.name or task.user, f"{setting}, task {task.id}")
            _check_users(config, examples)
        if not under_torchrun():
            ChatRenderer(config.model.path, toolbox.schemas(toolbox.make_tools(config.rollout)))
            network.bindable("rollout.server.port", config.rollout.server.port, network.address(config))
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


def _check_users(config: Config, examples: Mapping[str, str]) -> None:
    """Every task needs a user: the one that it names, or that user.name names for all. `examples`: tasks by user."""
    for name, example in examples.items():
        reason = users.check_user(name, config)
        require(reason is None, f"{example}: {reason}")
    takes = any(users.find_user(users.split_user(name)[0]).Options is not NoOptions for name in examples)
    require(takes or not config.user.options, "user.options: no user of the tasks has options; remove them")


def _check_same_run(config: Config) -> None:
    """A run goes on only with settings that do not make another run of it."""
    for change in changes(config):
        found = f"holds a run with {change.setting}={change.before}, not {change.after}"
        require(change.allowed, f"run.dir={config.run.dir}: {found}; choose another run.dir, or remove that folder")
