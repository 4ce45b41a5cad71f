"""Prepares an evaluation without training: its settings, the model as a folder, and checks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from megatron_collab import environments, patches
from megatron_collab.checkpoint import storage
from megatron_collab.config import SETTINGS, Config, ConfigError, compose, read_prompt, read_settings, require
from megatron_collab.config.extension import make_absolute
from megatron_collab.config.schema import (
    AlgoConfig,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    PublishConfig,
    SamplingConfig,
    TrainConfig,
)
from megatron_collab.data import assistants, sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec, data_spec
from megatron_collab.launch import endpoints, models, prepare, servers, validate
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.llm.endpoint import token_budget
from megatron_collab.observability import evaluations, records
from megatron_collab.rollout import llm_endpoints
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.runtime import gpu_environment, hub, network
from megatron_collab.runtime.process import RunStopped

logger = logging.getLogger(__name__)

FOLDER = "hf"  # in run.dir: the evaluated checkpoint as a Hugging Face folder
_FILE_BYTES = 5 * 10**9
_UNUSED = "unused"
_SET_OPTIONS = (
    "samples",
    "temperature",
    "user",
    "max_user_turns",
    "max_assistant_turns",
    "max_messages",
    "max_new_tokens",
)
_WITHOUT_POLICY = re.compile(r"assistant\.model=|build\.assistants=(?!.*\bpolicy\b)")  # then model.path is not used


def load(arguments: Sequence[str], defaults: Mapping[str, Any] = {}, builds: bool = False) -> Config:
    """The settings of an evaluation, composed like those of a run; training settings keep their defaults.

    Evaluates model.path (a Hugging Face folder, or a checkpoint as RUN, RUN@STEP or RUN@best) or assistant.model.
    `defaults`: values of options by name, in place of the schema's. `builds`: conversations are built; the candidates
    of a turn take the place of a group's rollouts. Raises ConfigError.
    """
    unused = [f"data.train={_UNUSED}"]
    if any(_WITHOUT_POLICY.match(argument) for argument in arguments):
        unused.append(f"model.path={_UNUSED}")
    config = make_absolute(compose([*unused, *arguments], defaults))
    if builds:
        _resolve_assistants(config)
    assistant, rollout, eval_sets = config.assistant, config.rollout, data_spec(config).eval_sets
    language_models = llm_endpoints.assistant_endpoints(config, eval_sets)
    rollouts = config.build.candidates if builds else TrainConfig.rollouts_per_prompt
    server = replace(rollout.server, fp8=False)  # only a trainer quantizes weights
    if assistant.model:
        endpoints.check_assistants(config, language_models)
        budget = token_budget(assistant)
        sampling = SamplingConfig(budget)
        # Only reply tokens are counted, and the context has room for all: the endpoint enforces its own limit.
        budgets = (
            (eval_set.max_new_tokens or budget) * (eval_set.max_assistant_turns or rollout.max_assistant_turns)
            for eval_set in eval_sets
        )
        rollout = replace(rollout, turn=sampling, future=sampling, context_length=2 * max(budgets, default=1))
    config = replace(
        config,
        launch=replace(config.launch, nproc_per_node=1),
        model=replace(
            config.model,
            fp8=None,
            fp8_recipe="delayed",
            fp8_params=False,
            fp8_skip_first=0,
            fp8_skip_last=0,
            lora=LoraConfig(),
        ),
        parallel=ParallelConfig(),
        optim=OptimConfig(),
        algo=AlgoConfig(),
        train=replace(TrainConfig(eval_tasks=config.train.eval_tasks), rollouts_per_prompt=rollouts),
        rollout=replace(rollout, server=server, train_turns="first", max_staleness=0, routing_replay=False),
        publish=PublishConfig(),
    )
    require(config.data.eval is not None, "data.eval: not set; give the tasks to evaluate")
    if builds:
        check_building(config, eval_sets)
    require(bool(eval_sets), "train.eval_tasks=0: nothing is evaluated; set it to 1 or more")
    _check_no_tools(config, language_models)
    spec = validate.check_settings(config, evaluates=True)
    gpu_environment.enter(config)
    validate.check_files_of_users(spec)
    for eval_set in eval_sets if assistant.model and assistant.temperature is None else ():
        message = f"{eval_set.setting}: temperature={eval_set.temperature}"
        out = "but assistant.temperature=null sends none; remove one"
        require(eval_set.temperature is None, f"{message}, {out}")
    if assistant.model and assistant.temperature is not None:  # may be 0 (greedy), unlike that of a policy that learns
        config.rollout.turn.temperature = config.rollout.future.temperature = assistant.temperature
    return config


def _resolve_assistants(config: Config) -> None:
    """Resolve build.assistants in `config`; if the policy is not among them, the first one becomes config.assistant.

    Raises ConfigError.
    """
    by_name = assistants.assistant_configs(config)
    if not by_name:
        return
    message = f"assistant.model={config.assistant.model}: not used with build.assistants; add it to them"
    require(config.assistant.model is None, message)
    config.build.assistants = assistants.with_all_settings(by_name)
    if all(by_name.values()):
        config.assistant = next(endpoint for endpoint in by_name.values() if endpoint)


def _check_no_tools(config: Config, assistants: Sequence[NamedEndpoint]) -> None:
    """Raises ConfigError if a language model in place of the policy is to call tools."""
    for assistant in assistants:
        out = "remove rollout.tools and rollout.mcp_servers, or evaluate model.path"
        message = f"{assistant.setting}={assistant.endpoint.model}: cannot call tools yet; {out}"
        require(not (config.rollout.tools or config.rollout.mcp_servers), message)


def check_building(config: Config, eval_sets: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError if conversations cannot be built with these settings."""
    rollout = config.rollout
    require(rollout.max_messages is not None, "rollout.max_messages: not set; give the longest conversation, e.g. 14")
    require(rollout.futures > 0, "rollout.futures=0: the user's next message comes from a future; set 1 or more")
    message = "plays no futures, which supply the user's next message; choose another"
    require(config.reward.mode != "single_turn", f"reward.mode=single_turn: {message}")
    require(bool(config.reward.weights), "reward.weights: not set; give the metrics that rank the candidates")
    for eval_set in eval_sets:
        for name in _SET_OPTIONS:
            message = "conversations are built with the settings of rollout and user; set those"
            require(getattr(eval_set, name) == getattr(EvaluationSet, name), f"{eval_set.setting}.{name}: {message}")
    if config.build.push_to_hub is not None:
        hub.check_upload(config.build.push_to_hub, "build.push_to_hub")
    read_prompt("build.prompt", config.build.prompt, "collaborator", ())


def pin(config: Config, module: str = "megatron_collab.evaluate") -> DataSpec:
    """Make the world, and pin Hub names and runs in `config` to the commits and checkpoints of the evaluation's first
    start; returns the pinned data. Raises ConfigError.
    """
    run_dir = Path(config.run.dir)
    prepare.check_nodes(config, module)
    message = "contains a training run; give the evaluation another run.dir"
    require(not (run_dir / "metrics.jsonl").exists(), f"run.dir={run_dir}: {message}")
    try:
        environments.prepare(config)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    sources.check_exists(data_spec(config).all_sets, "data.eval")
    config.data.eval = sources.pin_sources(config.data.eval, "data.eval", run_dir)
    prepare.fetch_served_models(config)
    model_path = Path(config.model.path)
    run = storage.run_of(model_path)
    if config.assistant.model or run is None:
        config.model.path = hub.pin(config.model.path, "model.path", run_dir)
        return data_spec(config)
    _, step = storage.split(model_path)
    if step == "best" or not (step or model_path.name.startswith("step_")):
        step = hub.pinned_value(run_dir, f"checkpoint {model_path.resolve()}", lambda: _checkpoint(model_path).name)
        config.model.path = f"{run}@{step.removeprefix('step_')}"
    return data_spec(config)


def prepared(config: Config) -> tuple[Config, RunSpec, int]:
    """The settings with the model as a folder for servers, their values, the step of its weights (0: not from a run).

    Runs all checks that need no started process, and converts a checkpoint. Raises ConfigError.
    """
    try:
        network.address(config.launch.interface)
        spec = run_spec(config, evaluates=True)
        assert spec.serving
        servers.check_servers_on_machine(config, spec.serving)
        if config.assistant.model:
            models.check_served(config)
            servers.check_arguments(spec.serving)
            prepare.read_data(config, spec, (), trains=False)
            return config, spec, 0
        folder, checkpoint = _model(config)
        serving = replace(config, model=replace(config.model, path=str(folder)))
        spec = run_spec(serving, evaluates=True)
        assert spec.play and spec.serving
        shape = validate.check_model(serving, spec)
        models.check_models(serving, shape, weights=checkpoint is None)
        servers.check_arguments(spec.serving)
        schemas = spec.tools.schemas()
        if schemas:
            models.check_rendering(serving, schemas)
        prepare.read_data(serving, spec, schemas, trains=False)
        prepare.compare_tools(Path(config.run.dir), spec.tools)
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if checkpoint is None:
        return serving, spec, 0
    converted = _convert(config, checkpoint, folder)
    saved = storage.read_state(checkpoint) or {}
    serving = replace(serving, model=replace(config.model, path=str(converted)))
    return serving, run_spec(serving, evaluates=True), int(saved.get("step", 0))


def is_done(config: Config, eval_sets: Sequence[EvaluationSet]) -> bool:
    """Whether the sets are evaluated already. Raises ConfigError if run.dir has an evaluation with other settings."""
    prepare.check_same_run(config)
    folder = Path(config.run.dir)
    recorded = evaluations.read(folder)
    if not recorded:
        return False
    before = replace(config.data, eval=(read_settings(folder) or {"data": {"eval": None}})["data"]["eval"])
    known = {eval_set.name: eval_set for eval_set in data_spec(replace(config, data=before)).eval_sets}
    for eval_set in eval_sets:
        message = f"{eval_set.setting}: run.dir={folder} has this set with other settings"
        out = "rename the set, or choose another run.dir"
        require(known.get(eval_set.name, eval_set) == eval_set, f"{message}; {out}")
    names = {evaluations.name_of(eval_set.name, evaluations.MODEL) for eval_set in eval_sets}
    complete = {name for name, record in recorded.items() if evaluations.is_complete(record)}
    return names <= complete and records.finished(folder)


def _model(config: Config) -> tuple[Path, Path | None]:
    """The model's Hugging Face folder and None; for a checkpoint, its run's initial folder and the checkpoint."""
    model, path = config.model.path, Path(config.model.path)
    if storage.run_of(path) is None:
        if hub.parse(model):
            hub.download(model, "model.path")
        return hub.folder(model), None
    checkpoint = _checkpoint(path)
    run = checkpoint.parent.parent
    settings = read_settings(run)
    message = f"model.path={path}: {run} has no {SETTINGS}, which names its initial model"
    require(settings is not None, message)
    source = hub.folder((settings or {})["model"]["path"])
    message = f"model.path={path}: its run started from {source}, which no longer exists; restore it"
    require((source / "config.json").is_file(), message)
    return source, checkpoint


def _checkpoint(path: Path) -> Path:
    try:
        return storage.find_checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"model.path={error}") from error


def _convert(config: Config, checkpoint: Path, source: Path) -> Path:
    """`checkpoint` as a Hugging Face folder in run.dir, converted by the first process that needs it."""
    folder = Path(config.run.dir) / FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{FOLDER}.lock")):
        if not folder.exists():
            patches.apply("megatron")
            from megatron_collab.checkpoint import convert

            logger.info(f"{folder}: converting {checkpoint}")
            convert.to_hf(checkpoint, folder, source, None, _FILE_BYTES)
    return folder
