"""Preparation before the ranks start: make the world, check model and data, become torchrun."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_collab import environments
from megatron_collab.algo.teacher_prompts import CONTEXT
from megatron_collab.config import (
    AlgoConfig,
    Config,
    ConfigError,
    PlayConfig,
    ServedConfig,
    TrainingRewardConfig,
    UserConfig,
    address_fault,
    changes,
    check_written,
    read_settings,
    require,
)
from megatron_collab.config.extension import NoOptions
from megatron_collab.config.load import leaves
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec
from megatron_collab.data.survey import TaskRequirements
from megatron_collab.inference.served import score_fault
from megatron_collab.inference.spec import CPU_CACHE_TOKENS
from megatron_collab.launch import endpoints, models, server_specs
from megatron_collab.launch.fork import fork
from megatron_collab.launch.inputs import check_inputs, draft_inputs
from megatron_collab.launch.objective import check_steps
from megatron_collab.launch.servers import check_arguments, idle_gpus
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.launch.teacher import SETTING as TEACHER
from megatron_collab.launch.validate import check_model, check_teacher
from megatron_collab.llm.endpoint import POLICY
from megatron_collab.observability import evaluations, records
from megatron_collab.rollout.task_requirements import USER, WEIGHTS, requirements_at_start
from megatron_collab.rollout.tools.mcp_server import McpTools
from megatron_collab.rollout.tools.toolbox import ToolSpec
from megatron_collab.rollout.users import User, UserDirectory
from megatron_collab.rollout.users.llm import LlmUser
from megatron_collab.runtime import device, hub, keys, network
from megatron_collab.runtime.process import (
    LAUNCHER,
    STEPS,
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


logger = logging.getLogger(__name__)
# Settings of algo that only algo.objective=policy reads.
_OF_POLICY_LOSS = (
    *("advantage", "loss", "average", "clip_low", "clip_high", "clip_dual", "kl", "kl_in", "entropy_coef"),
    *("correction", "later_weight", "overlong", "critic_warmup"),
)
_OF_WHOLE_CONVERSATIONS = ("turn_credit", "turn_credit_options")


def run_lock(config: PlayConfig) -> AbstractContextManager[object]:
    """Lock run.dir for this run, in its first process and before anything else.

    Raises ConfigError if it is in use, or if this machine cannot write a file or folder of the settings.
    """
    if LAUNCHER in os.environ or global_rank():  # the process that became torchrun holds it for its ranks
        return nullcontext()
    check_written(config)
    return RunLock(Path(config.run.dir))


def prepare(config: Config) -> RunSpec:
    """Make the world, pin Hub names in `config`, then run all checks that need files: model, data, ports.

    Returns the settled settings. Raises ConfigError before anything is started.
    """
    check_nodes(config, "megatron_collab.train", config.launch.nproc_per_node, config.train.stage == "rl")
    try:
        environments.prepare(config)
        _pin(config)
        spec = run_spec(config)
        if LAUNCHER in os.environ:  # a rank: the process that became its torchrun has done the rest
            if config.train.epochs is not None:
                config.train.steps = int(os.environ[STEPS])
            return spec
        shape = check_model(config, spec)
        check_teacher(config)
        check_same_run(config, spec.data)
        models.check_models(config, spec, shape)
        if spec.serving:
            check_arguments(spec.serving)
        schemas = spec.tools.schemas()
        if schemas:
            models.check_rendering(spec, schemas)
        data = read_data(config, spec, schemas)
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
    return spec


def remarks(config: Config) -> list[str]:
    """Console lines before the start about settings that work but waste something."""
    on_gpus = device.select(config.launch.device).type == device.GPU
    share = config.rollout.server.memory_share
    on_cpu = f"rollout.server.memory_share={share}: is of a GPU; on the CPU a KV cache has {CPU_CACHE_TOKENS} tokens"
    lines = idle_gpus(config) if on_gpus else [on_cpu] if share and config.train.stage == "rl" else []
    return [*without_effect(config), *lines]


def without_effect(config: Config) -> list[str]:
    """Lines about algorithm settings that have no effect in this combination, each with a fix."""
    algo, defaults = config.algo, AlgoConfig()
    if config.train.stage != "rl":
        return []
    lines = _unused_turn_credit(config)
    if config.objective != "policy":
        changed = [name for name in _OF_POLICY_LOSS if getattr(algo, name) != getattr(defaults, name)]
        settings = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in changed)
        unused = f"{settings}: without effect with algo.objective={algo.objective}; remove it"
        return [*lines, unused] if changed else lines
    names = [] if algo.loss == defaults.loss else ["loss"]
    names += [name for name in ("clip_low", "clip_high", "clip_dual") if getattr(algo, name) != getattr(defaults, name)]
    if algo.mini_batches * algo.epochs == 1 and names and ":" not in algo.loss:
        settings = ", ".join(f"algo.{name}={getattr(algo, name)}" for name in names)
        lines.append(
            f"{settings}: without effect, since with one update per batch every importance ratio is 1; "
            "set algo.mini_batches=2 or more, or accept the plain policy gradient"
        )
    if algo.kl == "k1" and algo.kl_in == "loss" and algo.kl_coef > 0:
        lines.append("algo.kl=k1: without effect in the loss, as its mean gradient is 0; set k3, or algo.kl_in=reward")
    return lines


def _unused_turn_credit(config: Config) -> list[str]:
    """A line about settings of turn credit, if conversations are not trained as a whole; else none."""
    reward, defaults, futures = config.reward, TrainingRewardConfig(), config.rollout.futures
    names = [name for name in _OF_WHOLE_CONVERSATIONS if getattr(reward, name) != getattr(defaults, name)]
    settings = ", ".join(f"reward.{name}={getattr(reward, name)}" for name in names)
    if not names or (reward.mode != "single_turn" and futures == 0):
        return []
    if reward.mode == "single_turn":
        return [f"{settings}: without effect with reward.mode=single_turn; remove it"]
    return [f"{settings}: without effect with rollout.futures={futures}; set rollout.futures=0, or remove it"]


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
        nodes == 1 or not plays or "RAY_ADDRESS" in os.environ,
        f"launch.nodes={nodes}: RAY_ADDRESS is not set, so Ray would run on one node only; start Ray on every node in "
        "this folder, and set RAY_ADDRESS to HOST:PORT of its head, or set launch.nodes=1",
    )
    if plays and (head := os.environ.get("RAY_ADDRESS", "auto")) not in ("auto", "local"):
        fault = address_fault(head if "://" in head else f"ray://{head}", ("ray",))
        fault = fault or ("" if head.rpartition(":")[2].isdigit() else "has no port; give HOST:PORT of Ray's head")
        require(not fault, f"RAY_ADDRESS={head}: {fault}, or unset it for a cluster of this run")


def read_data(config: Config, spec: RunSpec, schemas: Sequence[Mapping[str, Any]]) -> list[SurveyedSources[Any]]:
    """Read and check every row of data.train and data.eval (see `check_data`); settle train.steps in `config`.

    `schemas`: the tools that the policy's prompt lists.
    Raises ConfigError, and ValueError or RunStopped for unreadable data.
    """
    from megatron_collab.data import datasets

    requirements = partial(requirements_at_start, spec.play) if spec.play else lambda source: TaskRequirements()
    training = datasets.TrainingData[Any](spec.data, schemas, requirements)
    config.train.steps = training.steps
    check_steps(config)
    data: list[SurveyedSources[Any]] = [training]
    if sets := spec.data.eval_sets:
        data.append(datasets.SurveyedSources(spec.data, "data.eval", sets, schemas, requirements))
    if spec.play:
        check_data(config, spec, data)
    return data


def check_data(config: PlayConfig, spec: RunSpec, data: Sequence[SurveyedSources[Any]]) -> None:
    """Check the users and metrics of all tasks, and the language models in use. Raises ConfigError."""
    assert spec.play and spec.serving
    endpoints.check_recordings(config.llm, Path(config.run.dir))
    users = spec.play.users
    surveyed = [source for dataset in data for source in _surveys(users, dataset)]
    examples = users_of_tasks(users, surveyed)
    if not plays_users(config, data):
        examples = {name: example for name, example in examples.items() if name in users.named or acts(users, name)}
    check_users(users, examples)
    for dataset in data:
        check_needs(config, dataset, trained=dataset.setting == "data.train")
    called = spec.endpoints_of(examples)
    for user in called if not spec.serving.policy.placement.replicas else ():
        message = f"{user.setting}={POLICY}: is not served if assistant.model is set; choose another"
        require(user.endpoint.model != POLICY, message)
    if isinstance(config, Config) and config.rollout.max_staleness and config.rollout.server.colocated:
        ahead = f"rollout.max_staleness={config.rollout.max_staleness}: its servers pause in the middle of its messages"
        for user in called:
            message = f"{user.setting}={POLICY}: {ahead}; set rollout.server.colocated=false, or max_staleness to 0"
            require(user.endpoint.model != POLICY, message)
    if first_on_node():  # LiteLLM is slow to import
        language_models = [*called, *spec.judges, *spec.assistants]
        endpoints.check_served(config, language_models)
        unpriced = endpoints.check_prices(config, language_models)
        endpoints.check_support(config, language_models)
        for line in [*unpriced, *forms_without_effect(users, examples)] if global_rank() == 0 else ():
            logger.warning(line)


def plays_users(config: PlayConfig, data: Sequence[SurveyedSources[Any]]) -> bool:
    """Whether a user writes a message: not if the policy has one turn and the tasks of all sources are opened."""
    turns = [config.rollout.max_assistant_turns]
    turns += [getattr(source, "max_assistant_turns", None) or 1 for dataset in data for source in dataset.sources]
    return max(turns) > 1 or any(survey.unopened for dataset in data for survey in dataset.surveys)


def acts(users: UserDirectory, name: str) -> bool:
    """Whether users with that name do something even if they write no message. It is so if they do not exist."""
    try:
        kind = users.find(name).kind
    except ConfigError:  # a conversation could not start
        return True
    return kind.start is not User.start or kind.finish is not User.finish


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


def users_of_tasks(users: UserDirectory, surveyed: Iterable[tuple[UserDirectory, str, Survey]]) -> dict[str, str]:
    """The names of the users in the settings and in the tasks, each with an example.

    `surveyed`: of each source, the users it is played with, its name in messages, and its survey.
    """
    examples: dict[str, str] = {name: f"users.{name}" for name in users.named}
    for source_users, place, survey in surveyed:
        for user, task in survey.users.items():
            name = source_users.name_of(Task(task, (), "", "", user))
            examples[name] = f"{place}, task {task}"
    return examples


def check_needs(config: PlayConfig, data: SurveyedSources[Any], trained: bool) -> None:
    """Raises ConfigError if a source has no task that its user can play, or no `trained` source fits a weighted metric.

    Sources share the weights, and each metric picks its tasks (docs/decisions/0006-not-applying-is-not-missing.md).
    """
    surveyed = list(zip(data.sources, data.sets, data.surveys, strict=True))
    # By setting: the sources in which no task meets its requirements, with what the tasks lack.
    unmet: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for source, tasks, survey in surveyed:
        for setting, (count, tried, example) in survey.unscorable.items():
            weight = config.reward.weights.get(setting.removeprefix(WEIGHTS), 0)
            message = f"{setting}={weight:g}: gives no task of {data.setting}={source.source} a score ({tried} tried)"
            scores = count < tried or (trained and not weight)
            require(scores, f"{message}; {example}, or give other tasks or another metric")
        for setting, lacking in survey.lacking.items():
            if sum(lacking.values()) == len(tasks):
                unmet[setting].append((source.source, " or ".join(lacking)))
    for setting, places in unmet.items():
        place, requirement = places[0]
        message = f"{data.setting}={place}: none of its tasks has {requirement}"
        require(setting != USER, f"{message}, which its user needs; give tasks that have it, or another user.name")
        refusal = f"{message}, which the teacher is to be told; give tasks that have it, or another {CONTEXT}"
        require(setting != CONTEXT or len(places) < len(surveyed), refusal)
        weight = config.reward.weights.get(setting.removeprefix(WEIGHTS), 0)
        require(
            not trained or len(places) < len(surveyed) or not weight,
            f"{setting}={weight:g}: {message}, without which the metric does not apply; give tasks that have it, or "
            f"set {setting}=0",
        )


def _surveys(users: UserDirectory, data: SurveyedSources[Any]) -> Iterable[tuple[UserDirectory, str, Survey]]:
    for source, survey in zip(data.sources, data.surveys, strict=True):
        is_set = isinstance(source, EvaluationSet)
        setting = source.setting if is_set else data.setting
        yield users.for_set(source.user) if is_set else users, f"{setting}={source.source}", survey


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


def _pin(config: Config) -> None:
    """Pin Hub names in `config` to the commits of the run's first start, and download the model to this node."""
    run_dir, data = Path(config.run.dir), config.data
    config.model.path = hub.fetch_model(config.model.path, "model.path", run_dir)
    if config.algo.teacher.place == "model":
        config.algo.teacher.model = hub.fetch_model(config.algo.teacher.model, TEACHER, run_dir)
    if config.train.stage == "rl":
        fetch_served_models(config)
    data.train = sources.pin_sources(data.train, "data.train", run_dir)
    data.eval = sources.pin_sources(data.eval, "data.eval", run_dir) if data.eval else data.eval


def fetch_served_models(config: PlayConfig) -> None:
    """As `_pin`, for the served models beside the policy. Raises ConfigError if a reward model gives no score."""
    served, settings = server_specs.served_models(config), {**config.reward.metrics, **config.servers}
    for name, path in fetch_models(served, settings, Path(config.run.dir)).items():
        fault = None if name in config.servers else score_fault(path)
        require(fault is None, f"{served[name][0]}.model={fault}")


def fetch_models(
    served: Mapping[str, tuple[str, ServedConfig]], settings: Mapping[str, dict[str, Any]], run_dir: Path
) -> dict[str, str]:
    """The models `served`, downloaded to this node, by name; `settings`, by name, get their pinned names too."""
    paths = {}
    for name, (group, model) in served.items():
        path = paths[name] = hub.fetch_model(model.model, f"{group}.model", run_dir)
        entries = settings.get(name, {})
        entries.update({key: path for key, value in entries.items() if value == model.model})
    return paths


def check_users(users: UserDirectory, examples: Mapping[str, str]) -> None:
    """Raises ConfigError if a user of the tasks or of user.name cannot be used. `examples`: task by user."""
    for name, example in examples.items():
        reason = users.fault(name)
        require(reason is None, f"{example}: {reason}")
    takes = any(users.find(name).kind.Options is not NoOptions for name in examples)
    require(takes or not users.user.options, "user.options: no user of the tasks has options; remove them")


def forms_without_effect(users: UserDirectory, examples: Iterable[str]) -> list[str]:
    """Lines about settings `form` of users that no language model plays. `examples`: the names of all users."""
    resolved = [users.find(name) for name in examples]
    forms = {f"users.{name}": entry["form"] for name, entry in users.named.items() if "form" in (entry or {})}
    if users.user.form != UserConfig().form:  # named users inherit it
        forms["user"] = users.user.form
    lines = []
    for group, form in forms.items():
        kinds = [user.kind for user in resolved if group in ("user", user.group)]
        if kinds and not any(issubclass(kind, LlmUser) for kind in kinds):
            lines.append(f"{group}.form={form}: without effect, since only llm users have a form; remove it")
    return lines


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
