"""What happens before the ranks: make the world, refuse what cannot run, become torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_collab import environments
from megatron_collab.config import SETTINGS, Config, ConfigError, changes, require
from megatron_collab.config.extension import NoOptions
from megatron_collab.data import sources
from megatron_collab.data.sources import EvaluationSource
from megatron_collab.launch import endpoints
from megatron_collab.launch.validate import check_model
from megatron_collab.rollout import tools, users
from megatron_collab.rollout.users.named import user_of
from megatron_collab.runtime import hub, network
from megatron_collab.runtime.process import (
    FINISHED,
    LAUNCHER,
    RunStopped,
    first_on_node,
    global_rank,
    under_torchrun,
)
from megatron_collab.types import Task

if TYPE_CHECKING:
    from megatron_collab.data.survey import Survey


def prepare(config: Config) -> None:
    """Make the world, pin the names of the Hub (in `config`), then check all that needs files: model, data, ports.

    ConfigError before anything is started.
    """
    # Hugging Face's libraries take seconds to import, which refused settings need not wait for.
    from megatron_collab.data import chat_template, datasets

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
        _pin(config)
        check_model(config)
        _check_same_run(config)
        schemas = tools.schemas(config.rollout.tools) if config.train.stage == "rl" else []
        data: list[datasets.SurveyedSources[Any]] = [datasets.TrainingData(config, schemas)]
        if config.train.stage == "rl":
            if config.data.eval:
                data.append(datasets.SurveyedSources(config, "data.eval", EvaluationSource, schemas))
            examples = users_of_tasks(config, [(given.setting, one) for given in data for one in given.surveys])
            check_users(config, examples)
            if first_on_node():  # LiteLLM is slow to import
                asked = [*endpoints.of_users(config, examples), *endpoints.of_judges(config)]
                endpoints.check_prices(config, asked)
                endpoints.check_support(asked)
        if not under_torchrun():
            chat_template.policys(config, tools.schemas(config.rollout.tools))
            network.bindable("rollout.server.port", config.rollout.server.port, network.address(config))
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if global_rank() == 0 and LAUNCHER not in os.environ:  # the launcher has said it
        print("\n".join(line for given in data for line in given.lines()))


def users_of_tasks(config: Config, surveys: Iterable[tuple[str, Survey]]) -> dict[str, str]:
    """The names of the users of the settings and of the tasks, each with an example; `surveys` by their settings."""
    examples: dict[str, str] = {name: f"users.{name}" for name in config.users}
    for setting, found in surveys:
        for user, task in found.users.items():
            name = user_of(Task(task, (), "", "", user), config)
            examples[name] = f"{setting}, task {task}"
    return examples


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


def _pin(config: Config) -> None:
    """Names of the Hub become those of the commits that the run goes by, and the model comes to this node."""
    run_dir, data = Path(config.run.dir), config.data
    config.model.path = hub.pin(config.model.path, "model.path", run_dir)
    if hub.named(config.model.path):
        hub.download(config.model.path, "model.path")
    data.train = sources.pinned(data.train, "data.train", run_dir)
    data.eval = sources.pinned(data.eval, "data.eval", run_dir) if data.eval else data.eval


def check_users(config: Config, examples: Mapping[str, str]) -> None:
    """Every task needs a user: the one that it names, or that user.name names for all. `examples`: tasks by user."""
    for name, example in examples.items():
        reason = users.check_user(name, config)
        require(reason is None, f"{example}: {reason}")
    takes = any(users.resolve_user(name, config)[0].Options is not NoOptions for name in examples)
    require(takes or not config.user.options, "user.options: no user of the tasks has options; remove them")


def _check_same_run(config: Config) -> None:
    """A run goes on only with settings that do not make another run of it."""
    for change in changes(config):
        found = f"holds a run with {change.setting}={change.before}, not {change.after}"
        require(change.allowed, f"run.dir={config.run.dir}: {found}; choose another run.dir, or remove that folder")
