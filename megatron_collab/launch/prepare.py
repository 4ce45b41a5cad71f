"""What happens before the ranks: make the world, refuse what cannot run, become torchrun."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_collab import environments
from megatron_collab.config import AlgoConfig, Config, ConfigError, changes, read_settings, require
from megatron_collab.config.extension import NoOptions
from megatron_collab.config.load import leaves
from megatron_collab.config.schema import BuildConfig
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet, evaluation_sets
from megatron_collab.inference.served import score_fault
from megatron_collab.launch import endpoints, models
from megatron_collab.launch.fork import fork
from megatron_collab.launch.servers import check_arguments, idle_gpus
from megatron_collab.launch.validate import check_model
from megatron_collab.observability import evaluations, records
from megatron_collab.reward import metrics
from megatron_collab.rollout import asked_models, users
from megatron_collab.rollout.needs import USER, WEIGHTS, needs
from megatron_collab.rollout.tools import Toolset, toolbox
from megatron_collab.rollout.tools.mcp_server import McpTools
from megatron_collab.rollout.users.named import user_of
from megatron_collab.runtime import device, hub, keys, network
from megatron_collab.runtime.process import (
    LAUNCHER,
    RunStopped,
    first_on_node,
    global_rank,
    under_torchrun,
)
from megatron_collab.runtime.run_lock import RunLock
from megatron_collab.types import Task

if TYPE_CHECKING:
    from megatron_collab.data.datasets import SurveyedSources
    from megatron_collab.data.survey import Survey

# Settings of algo that algo.objective=policy alone reads.
_OF_POLICY_LOSS = (
    *("advantage", "loss", "average", "clip_low", "clip_high", "clip_dual", "kl", "kl_in", "entropy_coef"),
    *("correction", "later_weight", "overlong", "critic_warmup"),
)


def locked(config: Config) -> AbstractContextManager[object]:
    """run.dir, for this run alone: its first process takes the lock before all else. ConfigError where it cannot."""
    first = LAUNCHER not in os.environ and global_rank() == 0  # the process that became torchrun has it for its ranks
    return RunLock(Path(config.run.dir)) if first else nullcontext()


def prepare(config: Config) -> None:
    """Make the world, pin the names of the Hub (in `config`), then check all that needs files: model, data, ports.

    ConfigError before anything is started.
    """
    check_nodes(config, "megatron_collab.train")
    message = "is evaluated by `megatron-collab evaluate`, and not trained; remove it"
    require(config.assistant.model is None, f"assistant.model={config.assistant.model}: {message}")
    require(config.build == BuildConfig(), "build: is of `megatron-collab build-dataset`, and nothing here; remove it")
    try:
        environments.prepare(config)
        _pin(config)
        if LAUNCHER in os.environ:  # a rank: the process that became its torchrun has done and said all else
            return
        shape = check_model(config)
        check_same_run(config)
        models.check_models(config, shape)
        check_arguments(config)
        tools = toolbox.make_tools(config.rollout) if config.train.stage == "rl" else []
        schemas = toolbox.schemas(tools)
        if schemas:
            models.check_rendering(config, schemas)
        data = read_data(config, schemas)
        if not under_torchrun():
            network.bindable("rollout.server.port", config.rollout.server.port, network.address(config))
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    compare_tools(Path(config.run.dir), tools)
    fork(config)
    if global_rank() == 0:
        print("\n".join([line for given in data for line in given.lines()] + remarks(config)))


def remarks(config: Config) -> list[str]:
    """What the console says before the start about settings that work and waste something, a line each."""
    on_gpus = device.select(config.launch.device).type == device.GPU
    return [*without_effect(config), *(idle_gpus(config) if on_gpus else [])]


def without_effect(config: Config) -> list[str]:
    """Settings of the algorithm that cannot change anything beside the others, each with the way out."""
    algo, usual = config.algo, AlgoConfig()
    if config.train.stage != "rl":
        return []
    if config.objective != "policy":
        differ = [name for name in _OF_POLICY_LOSS if getattr(algo, name) != getattr(usual, name)]
        said = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in differ)
        return [f"{said}: without effect with algo.objective={algo.objective}; remove it"] if differ else []
    lines = []
    names = [] if algo.loss == usual.loss else ["loss"]
    names += [name for name in ("clip_low", "clip_high", "clip_dual") if getattr(algo, name) != getattr(usual, name)]
    if algo.mini_batches * algo.epochs == 1 and names and ":" not in algo.loss:
        given = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in names)
        lines.append(
            f"{given}: without effect, since with one update a batch every importance ratio is 1; "
            "set algo.mini_batches=2 or more, or leave it at the policy gradient"
        )
    if algo.kl == "k1" and algo.kl_in == "loss" and algo.kl_coef > 0:
        lines.append("algo.kl=k1: without effect in the loss, as its mean gradient is 0; set k3, or algo.kl_in=reward")
    return lines


def check_nodes(config: Config, module: str) -> None:
    """On several nodes torchrun was started by hand, and Ray too where conversations are played."""
    nodes = config.launch.nodes
    command = f"python -m megatron_collab.launch.torchrun --nnodes {nodes} --nproc-per-node"
    require(
        nodes == 1 or under_torchrun(),
        f"launch.nodes={nodes}: only this node's ranks can be started from here; start {command} "
        f"{config.launch.nproc_per_node} … -m {module} on each node, or set launch.nodes=1",
    )
    require(
        nodes == 1 or config.train.stage != "rl" or "RAY_ADDRESS" in os.environ,
        f"launch.nodes={nodes}: RAY_ADDRESS is not set, and Ray would be on one node only; start Ray on every node in "
        "this folder, and set RAY_ADDRESS to HOST:PORT of its head, or set launch.nodes=1",
    )


def read_data(config: Config, schemas: Sequence[Mapping[str, Any]], trains: bool = True) -> list[SurveyedSources[Any]]:
    """data.train, unless nothing `trains`, and the sets of data.eval: every row is read, and its user can be asked.

    `schemas`: the tools that the prompt tells the policy of.
    Raises ConfigError, and ValueError or RunStopped for what cannot be read.
    """
    from megatron_collab.data import datasets

    data: list[SurveyedSources[Any]] = [datasets.TrainingData(config, schemas, needs)] if trains else []
    if sets := evaluation_sets(config):
        data.append(datasets.SurveyedSources(config, "data.eval", sets, schemas, needs))
    if config.train.stage == "rl":
        endpoints.check_recordings(config)
        surveyed = [one for given in data for one in _surveyed(given)]
        examples = users_of_tasks(config, surveyed)
        check_users(config, examples)
        for given in data:
            check_needs(config, given, trained=given.setting == "data.train")
        if first_on_node():  # LiteLLM is slow to import
            asked = [*asked_models.of_users(config, examples), *asked_models.of_judges(config)]
            asked += asked_models.of_assistant(config)
            endpoints.check_served(config, asked)
            unpriced = endpoints.check_prices(config, asked)
            endpoints.check_support(config, asked)
            for line in unpriced if global_rank() == 0 else ():
                print(f"megatron-collab: {line}", file=sys.stderr)
    return data


def compare_tools(run_dir: Path, toolsets: Iterable[Toolset]) -> None:
    """Say in a line where an MCP server has other tools than when the run began, which hub.json holds."""
    for tools in toolsets:
        if isinstance(tools, McpTools):
            setting = f"rollout.mcp_servers.{tools.options.name}"
            said = {schema["name"]: json.dumps(schema, sort_keys=True) for schema in tools.schemas}
            now = {name: hashlib.sha256(schema.encode()).hexdigest() for name, schema in said.items()}
            began = json.loads(hub.found_first(run_dir, f"tools of {setting}", partial(json.dumps, now)))
            if other := sorted(name for name in now.keys() | began.keys() if now.get(name) != began.get(name)):
                changed = "its tools are not those that it had when the run began, which changes samples"
                print(f"megatron-collab: {setting}: {changed}: {', '.join(other)}", file=sys.stderr)


def users_of_tasks(config: Config, surveyed: Iterable[tuple[Config, str, Survey]]) -> dict[str, str]:
    """The names of the users of the settings and of the tasks, each with an example.

    `surveyed`: the settings under which a source is played, what messages call it, and its survey.
    """
    examples: dict[str, str] = {name: f"users.{name}" for name in config.users}
    for settings, where, found in surveyed:
        for user, task in found.users.items():
            name = user_of(Task(task, (), "", "", user), settings)
            examples[name] = f"{where}, task {task}"
    return examples


def check_needs(config: Config, data: SurveyedSources[Any], trained: bool) -> None:
    """Users must have tasks to play in each source, and what is `trained` some tasks for each weighted metric.

    Sources share the weights, and each metric picks its tasks (docs/decisions/0006-not-applying-is-not-missing.md).
    """
    given = list(zip(data.sources, data.sets, data.surveys, strict=True))
    # By setting, of each source in which no task has what it needs, its name and what they lack.
    none: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for source, tasks, found in given:
        for setting, lacking in found.lacking.items():
            if sum(lacking.values()) == len(tasks):
                none[setting].append((source.source, " or ".join(lacking)))
    for setting, places in none.items():
        where, what = places[0]
        said = f"{data.setting}={where}: none of its tasks has {what}"
        require(setting != USER, f"{said}, which its user needs; give tasks that have it, or another user.name")
        weight = config.reward.weights.get(setting.removeprefix(WEIGHTS), 0)
        require(
            not trained or len(places) < len(given) or not weight,
            f"{setting}={weight:g}: {said}, without which the metric does not apply; give tasks that have it, or set "
            f"{setting}=0",
        )


def _surveyed(data: SurveyedSources[Any]) -> Iterable[tuple[Config, str, Survey]]:
    for source, found in zip(data.sources, data.surveys, strict=True):
        setting = source.setting if isinstance(source, EvaluationSet) else data.setting
        yield data.settings(source), f"{setting}={source.source}", found


def finished(config: Config) -> int:
    """The steps of the finished run in run.dir; 0 where there is none, or train.steps asks for more. ConfigError."""
    folder = Path(config.run.dir)
    settings = read_settings(folder)
    if settings is None or not records.finished(folder):
        return 0
    steps = dict(leaves(settings)).get("train.steps")
    return steps if isinstance(steps, int) and config.train.steps <= steps else 0


def replace_by_torchrun(config: Config, module: str, arguments: list[str]) -> NoReturn:
    """Become torchrun … -m `module` with the same arguments; does not return."""
    keys.put_away()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "megatron_collab.launch.torchrun", "--max-restarts=0"]
    command += [f"--nproc-per-node={config.launch.nproc_per_node}", "-m", module, *arguments]
    os.execve(sys.executable, command, environment)


def _pin(config: Config) -> None:
    """Names of the Hub become those of the commits that the run goes by, and the model comes to this node."""
    run_dir, data = Path(config.run.dir), config.data
    config.model.path = hub.fetched(config.model.path, "model.path", run_dir)
    if config.train.stage == "rl":
        fetch_served_models(config)
    data.train = sources.pinned(data.train, "data.train", run_dir)
    data.eval = sources.pinned(data.eval, "data.eval", run_dir) if data.eval else data.eval


def fetch_served_models(config: Config) -> None:
    """As `_pin`, for the models beside the policy that the run serves. ConfigError for one that gives no score."""
    for name, (group, model) in metrics.served_models(config).items():
        path = hub.fetched(model.model, f"{group}.model", Path(config.run.dir))
        given = config.servers[name] if name in config.servers else config.reward.metrics.get(name, {})
        given.update({key: path for key, value in given.items() if value == model.model})
        fault = None if name in config.servers else score_fault(path)
        require(fault is None, f"{group}.model={fault}")


def check_users(config: Config, examples: Mapping[str, str]) -> None:
    """Every task needs a user: the one that it names, or that user.name names for all. `examples`: tasks by user."""
    for name, example in examples.items():
        reason = users.check_user(name, config)
        require(reason is None, f"{example}: {reason}")
    takes = any(users.resolve_user(name, config)[0].Options is not NoOptions for name in examples)
    require(takes or not config.user.options, "user.options: no user of the tasks has options; remove them")


def check_same_run(config: Config) -> None:
    """A run goes on only with settings that do not make another run of it, and with the evaluations that it has."""
    for change in changes(config):
        found = f"holds a run with {change.setting}={change.before}, not {change.after}"
        require(change.allowed, f"run.dir={config.run.dir}: {found}; choose another run.dir, or remove that folder")
    folder = Path(config.run.dir)
    for file in folder.glob("*.json*"):
        require(file.is_file(), f"{file}: is no file, and a run writes one there; remove it, or choose another run.dir")
    evaluations.read(folder)
