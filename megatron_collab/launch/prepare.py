"""Preparation before the ranks start: make the world, check model and data, become torchrun."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_collab import environments
from megatron_collab.config import Config, PlayConfig, changes, read_settings
from megatron_collab.data import sources
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.served import score_fault
from megatron_collab.launch import models, server_specs, tasks
from megatron_collab.launch.fork import fork
from megatron_collab.launch.inputs import check_inputs, draft_inputs
from megatron_collab.launch.remarks import remarks
from megatron_collab.launch.servers import check_arguments
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.launch.teacher import SETTING as TEACHER
from megatron_collab.launch.validate import check_model, check_teacher
from megatron_collab.observability import evaluations, records
from megatron_collab.rollout.tools.mcp_server import McpTools
from megatron_collab.rollout.tools.toolbox import ToolSpec
from megatron_collab.runtime import hub, keys, network
from megatron_collab.runtime.process import LAUNCHER, STEPS, RunStopped, global_rank, under_torchrun
from megatron_collab.runtime.run_lock import RunLock
from megatron_collab.settings import ConfigError, ServedConfig, address_fault, check_written, replaced, require
from megatron_collab.settings.values import leaves

logger = logging.getLogger(__name__)


def run_lock(config: PlayConfig) -> AbstractContextManager[object]:
    """Lock run.dir for this run, in its first process and before anything else.

    Raises ConfigError if it is in use, or if this machine cannot write a file or folder of the settings.
    """
    if LAUNCHER in os.environ or global_rank():  # the process that became torchrun holds it for its ranks
        return nullcontext()
    check_written(config)
    return RunLock(Path(config.run.dir))


def prepare(config: Config) -> tuple[Config, RunSpec]:
    """Make the world, pin Hub names, then run all checks that need files: model, data, ports.

    Returns the settings with pinned names and train.steps, and their values. Raises ConfigError before anything is
    started.
    """
    check_nodes(config, "megatron_collab.train", config.launch.nproc_per_node, config.train.stage == "rl")
    try:
        environments.prepare(config.data, config.run.seed)
        config = _pinned(config)
        spec = run_spec(config)
        if LAUNCHER in os.environ:  # a rank: the process that became its torchrun has done the rest
            counted = config.train.epochs is not None
            return replaced(config, {"train.steps": int(os.environ[STEPS])}) if counted else config, spec
        shape = check_model(config, spec)
        check_teacher(config)
        check_same_run(config, spec.data)
        models.check_models(config, spec, shape)
        if spec.serving:
            check_arguments(spec.serving)
        schemas = spec.tools.schemas()
        if schemas:
            models.check_rendering(spec, schemas)
        config, data = tasks.read_data(config, spec, schemas)
        if not under_torchrun():
            network.bindable(
                "rollout.server.port", config.rollout.server.port, network.address(config.launch.interface)
            )
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    compare_tools(Path(config.run.dir), spec.tools)
    fork(config)
    draft_inputs(config, spec.data)
    if global_rank() == 0:
        logger.info("\n".join([line for dataset in data for line in dataset.lines()] + remarks(config)))
    return config, spec


def check_nodes(config: PlayConfig, module: str, ranks: int = 1, plays: bool = True) -> None:
    """Raises ConfigError if on several nodes torchrun was not started by hand, or Ray if the program `plays`.

    It raises it too if RAY_ADDRESS is none. `ranks`: of the program on a node.
    """
    nodes = config.launch.nodes
    command = f"python -m megatron_collab.launch.torchrun --nnodes {nodes} --nproc-per-node"
    require(
        nodes == 1 or under_torchrun(),
        f"launch.nodes={nodes}: only this node's ranks can be started from here; start {command} "
        f"{ranks} … -m {module} on each node, or set launch.nodes=1",
    )
    require(
        nodes == 1 or not plays or os.environ.get("RAY_ADDRESS", "local") != "local",
        f"launch.nodes={nodes}: RAY_ADDRESS is not set, so Ray would run on one node only; start Ray on every node in "
        "this folder, and set RAY_ADDRESS to HOST:PORT of its head, or set launch.nodes=1",
    )
    if plays and (head := os.environ.get("RAY_ADDRESS", "auto")) not in ("auto", "local"):
        fault = address_fault(head if "://" in head else f"ray://{head}", ("ray",))
        fault = fault or ("" if head.rpartition(":")[2].isdigit() else "has no port; give HOST:PORT of Ray's head")
        require(not fault, f"RAY_ADDRESS={head}: {fault}, or unset it for a cluster of this run")


def compare_tools(run_dir: Path, spec: ToolSpec) -> None:
    """Print a line for each MCP server whose tools differ from those at the run's start, recorded in hub.json."""
    for tools in spec.toolsets:
        if isinstance(tools, McpTools):
            setting = f"rollout.mcp_servers.{tools.options.name}"
            schemas = {schema["name"]: json.dumps(schema, sort_keys=True) for schema in tools.schemas}
            digests = {name: hashlib.sha256(schema.encode()).hexdigest() for name, schema in schemas.items()}
            first_digests = json.loads(hub.pinned_value(run_dir, f"tools of {setting}", partial(json.dumps, digests)))
            names = digests.keys() | first_digests.keys()
            if changed_names := sorted(name for name in names if digests.get(name) != first_digests.get(name)):
                changed = "its tools have changed since the run began, which changes samples"
                logger.warning(f"{setting}: {changed}: {', '.join(changed_names)}")


def finished_steps(config: Config) -> int:
    """The steps of the finished run in run.dir; 0 if there is none, or if this one has more. Raises ConfigError."""
    folder = Path(config.run.dir)
    settings = read_settings(folder)
    if settings is None or not records.finished(folder):
        return 0
    steps = dict(leaves(settings)).get("train.steps")
    return steps if isinstance(steps, int) and config.train.steps <= steps else 0


def variables_of_ranks(config: PlayConfig) -> dict[str, str]:
    """Environment variables for the ranks: the steps that train.epochs gives, as this process has counted the rows."""
    return {STEPS: str(config.train.steps)} if isinstance(config, Config) and config.train.epochs is not None else {}


def replace_by_torchrun(ranks: int, module: str, arguments: list[str]) -> NoReturn:
    """Replace this process by torchrun … -m `module` with `ranks` and the same arguments; does not return."""
    keys.put_away()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "megatron_collab.launch.torchrun", "--max-restarts=0"]
    command += [f"--nproc-per-node={ranks}", "-m", module, *arguments]
    logger.debug(shlex.join(command))
    os.execve(sys.executable, command, environment)


def _pinned(config: Config) -> Config:
    """The settings with Hub names pinned to the commits of the run's first start; downloads the model to this node."""
    run_dir, data, teacher = Path(config.run.dir), config.data, config.algo.teacher
    names: dict[str, Any] = {"model.path": hub.fetch_model(config.model.path, "model.path", run_dir)}
    if teacher.place == "model":
        names["algo.teacher.model"] = hub.fetch_model(teacher.model, TEACHER, run_dir)
    if config.train.stage == "rl":
        names |= fetch_served_models(config)
    names["data.train"] = sources.pin_sources(data.train, "data.train", run_dir)
    if data.eval:
        names["data.eval"] = sources.pin_sources(data.eval, "data.eval", run_dir)
    return replaced(config, names)


def fetch_served_models(config: PlayConfig) -> dict[str, Any]:
    """As `_pinned`, for the served models beside the policy: the options that name them, with pinned names.

    Raises ConfigError if a reward model gives no score.
    """
    served = server_specs.served_models(config)
    paths = fetch_models(served, Path(config.run.dir))
    of_metrics = {name: model for name, model in served.items() if name not in config.servers}
    for name, (group, _) in of_metrics.items():
        fault = score_fault(paths[name])
        require(fault is None, f"{group}.model={fault}")
    return {
        "servers": with_paths(config.servers, served, paths),
        "reward.metrics": with_paths(config.reward.metrics, of_metrics, paths),
    }


Served = Mapping[str, tuple[str, ServedConfig]]  # models by name, each with the group of its settings


def fetch_models(served: Served, run_dir: Path) -> dict[str, str]:
    """The models `served`, downloaded to this node, by name."""
    return {name: hub.fetch_model(model.model, f"{group}.model", run_dir) for name, (group, model) in served.items()}


def with_paths(
    entries: Mapping[str, dict[str, Any]], served: Served, paths: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """`entries`, settings by name, with the path of each model that they have served in place of its name."""

    def settled(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        model = served[name][1].model
        return {key: paths[name] if value == model else value for key, value in settings.items()}

    return {name: settled(name, entry) if name in served else entry for name, entry in entries.items()}


def check_same_run(config: PlayConfig, data: DataSpec) -> None:
    """Raises ConfigError if run.dir has a run with incompatible settings or inputs, or its files are damaged."""
    for change in changes(config):
        reason = f"holds a run with {change.setting}={change.before}, not {change.after}"
        require(change.allowed, f"run.dir={config.run.dir}: {reason}; choose another run.dir, or remove that folder")
    check_inputs(config, data)
    folder = Path(config.run.dir)
    for file in folder.glob("*.json*"):
        require(file.is_file(), f"{file}: is not a file, but a run writes one; remove it, or choose another run.dir")
    evaluations.read(folder)
