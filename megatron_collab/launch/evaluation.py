"""Prepares an evaluation without training: its settings, the model as a folder, and checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from megatron_collab import environments, patches
from megatron_collab.checkpoint import storage
from megatron_collab.config import EvaluateConfig, compose_program, read_settings
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec
from megatron_collab.launch import endpoints, models, prepare, servers, tasks, validate
from megatron_collab.launch.data_specs import evaluation_data
from megatron_collab.launch.extensions import check_extensions
from megatron_collab.launch.spec import RunSpec, evaluation_spec
from megatron_collab.llm.endpoint import token_budget
from megatron_collab.observability import evaluations, records
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.rollout import llm_endpoints
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.rollout.task_requirements import requirements_at_start
from megatron_collab.runtime import gpu_environment, hub, network
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import ConfigError, SamplingConfig, replaced, require
from megatron_collab.settings.extension import make_absolute

FOLDER = "hf"  # in run.dir: the evaluated checkpoint as a Hugging Face folder
_FILE_BYTES = 5 * 10**9
_SUPERVISED = re.compile(r"\+*train\.stage=(?!rl$)")


def load(arguments: Sequence[str], defaults: Mapping[str, Any] = {}) -> EvaluateConfig:
    """The settings of an evaluation; those of training are ignored.

    Evaluates model.path (a Hugging Face folder, or a checkpoint as RUN, RUN@STEP or RUN@best) or assistant.model.
    `defaults`: values of options by name, in place of the schema's. Raises ConfigError.
    """
    config = compose_absolute(EvaluateConfig, arguments, defaults)
    assistants = llm_endpoints.assistant_endpoints(config.assistant, evaluation_data(config).eval_sets)
    return checked_evaluation(config, assistants, evaluation_spec)


def compose_absolute[Program: EvaluateConfig](
    program: type[Program], arguments: Sequence[str], defaults: Mapping[str, Any], *, constructs: bool = True
) -> Program:
    """The settings of `program`, composed like those of a run. Raises ConfigError.

    `constructs`: see `check_extensions`.
    """
    for argument in arguments:
        message = f"{argument}: conversations are played, as in train.stage=rl; remove it"
        require(_SUPERVISED.match(argument) is None, message)
    config: Program = make_absolute(compose_program(program, arguments, defaults))
    check_extensions(config, constructs=constructs)
    return config


def checked_evaluation[Program: EvaluateConfig](
    config: Program, assistants: Sequence[NamedEndpoint], settle: Callable[[Program], RunSpec]
) -> Program:
    """`config` after the checks that do not depend on files; without the policy if a language model takes its place.

    `assistants`: the language models that play; `settle`: makes values of the settings. Raises ConfigError.
    """
    assistant, rollout, eval_sets = config.assistant, config.rollout, evaluation_data(config).eval_sets
    endpoints.check_assistants(config.llm, [*assistants, NamedEndpoint("assistant.model", "assistant", assistant)])
    if assistant.model:
        config = _without_policy(config, eval_sets)
    else:
        require(bool(config.model.path), "model.path: not set; give model.path=VALUE, or assistant.model=MODEL")
    require(config.data.eval is not None, "data.eval: not set; give the tasks to evaluate")
    require(bool(eval_sets), "train.eval_tasks=0: nothing is evaluated; set it to 1 or more")
    for called in assistants:
        out = "remove rollout.tools and rollout.mcp_servers, or evaluate model.path"
        message = f"{called.setting}={called.endpoint.model}: cannot call tools yet; {out}"
        require(not (rollout.tools or rollout.mcp_servers), message)
    validate.check_options(config)
    spec = settle(config)
    validate.check_played(config, spec)
    metrics = spec.play.reward.metrics if spec.play else {}
    readers = [f"reward.weights.{name}" for name, metric in metrics.items() if metric.answer_lead is not None]
    for called in assistants:
        message = f"{called.setting}={called.endpoint.model}: gives no log-probs of an answer, which"
        require(not readers, f"{message} {', '.join(readers)} reads; leave it out, or evaluate model.path")
    gpu_environment.enter()
    validate.check_files_of_users(spec)
    for eval_set in eval_sets if assistant.model and assistant.temperature is None else ():
        message = f"{eval_set.setting}: temperature={eval_set.temperature}"
        out = "but assistant.temperature=null sends none; remove one"
        require(eval_set.temperature is None, f"{message}, {out}")
    if not assistant.model or assistant.temperature is None:
        return config
    # May be 0 (greedy), unlike that of a policy that learns.
    return replaced(config, {f"rollout.{turn}.temperature": assistant.temperature for turn in ("turn", "future")})


def _without_policy[Program: EvaluateConfig](config: Program, eval_sets: Sequence[EvaluationSet]) -> Program:
    """The settings if assistant.model plays: its limits of turns, and no model.path."""
    rollout, budget = config.rollout, token_budget(config.assistant)
    # Only reply tokens are counted, and the context has room for all: the endpoint enforces its own limit.
    budgets = (
        (eval_set.max_new_tokens or budget) * (eval_set.max_assistant_turns or rollout.max_assistant_turns)
        for eval_set in eval_sets
    )
    limits = {"rollout.turn": SamplingConfig(budget), "rollout.future": SamplingConfig(budget)}
    return replaced(config, {**limits, "rollout.context_length": 2 * max(budgets, default=1), "model.path": ""})


def pinned[Program: EvaluateConfig](config: Program, module: str) -> tuple[Program, DataSpec]:
    """Make the world; the settings with Hub names and runs pinned to the commits and checkpoints of the evaluation's
    first start, and their data. Raises ConfigError.
    """
    run_dir = Path(config.run.dir)
    prepare.check_nodes(config, module)
    message = "contains a training run; give the evaluation another run.dir"
    require(not (run_dir / "metrics.jsonl").exists(), f"run.dir={run_dir}: {message}")
    try:
        environments.prepare(config.data, config.run.seed)
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    sources.check_exists(evaluation_data(config).all_sets, "data.eval")
    names = {"data.eval": sources.pin_sources(config.data.eval, "data.eval", run_dir)}
    names |= prepare.fetch_served_models(config)
    if config.model.path:
        names["model.path"] = _pinned_model(config.model.path, run_dir)
    config = replaced(config, names)
    return config, evaluation_data(config)


def _pinned_model(model: str, run_dir: Path) -> str:
    path = Path(model)
    run = storage.run_of(path)
    if run is None:
        return hub.pin(model, "model.path", run_dir)
    _, step = storage.split(path)
    if step == "best" or not (step or path.name.startswith("step_")):
        step = hub.pinned_value(run_dir, f"checkpoint {path.resolve()}", lambda: _checkpoint(path).name)
        return f"{run}@{step.removeprefix('step_')}"
    return model


def prepared[Program: EvaluateConfig](
    config: Program, settle: Callable[[Program], RunSpec] = evaluation_spec
) -> tuple[Program, RunSpec, int]:
    """The settings with the model as a folder for servers, their values, the step of its weights (0: not from a run).

    Runs all checks that need no started process, and converts a checkpoint. `settle`: see `checked_evaluation`.

    Raises ConfigError.
    """
    try:
        network.address(config.launch.interface)
        spec = settle(config)
        assert spec.serving
        servers.check_gpus(config, spec.serving)
        if config.assistant.model:
            models.check_served((model.setting, model.model) for model in spec.serving.by_name.values())
            servers.check_arguments(spec.serving)
            _read_data(config, spec, (), renders=False)
            return config, spec, 0
        folder, checkpoint = _model(config)
        serving = replaced(config, {"model.path": str(folder)})
        spec = settle(serving)
        assert spec.play and spec.serving
        shape = validate.read_shape(serving)
        servers.check_servers_of_model(serving, spec.serving.policy, shape, None)
        models.check_models(serving, spec, shape, weights=checkpoint is None)
        servers.check_arguments(spec.serving)
        schemas = spec.tools.schemas()
        if schemas:
            models.check_rendering(spec, schemas)
        _read_data(serving, spec, schemas)
        prepare.compare_tools(Path(config.run.dir), spec.tools)
    except (ValueError, OSError, RunStopped) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if checkpoint is None:
        return serving, spec, 0
    converted = _convert(config, checkpoint, folder)
    saved = storage.read_state(checkpoint) or {}
    serving = replaced(serving, {"model.path": str(converted)})
    return serving, settle(serving), int(saved.get("step", 0))


def _read_data(
    config: EvaluateConfig, spec: RunSpec, schemas: Sequence[Mapping[str, Any]], renders: bool = True
) -> None:
    """Read and check every row of data.eval, its user, and the language models in use. Raises ConfigError."""
    from megatron_collab.data.datasets import SurveyedSources

    assert spec.play
    requirements = partial(requirements_at_start, spec.play)
    data = SurveyedSources[Any](spec.data, "data.eval", spec.data.eval_sets, schemas, requirements, renders=renders)
    tasks.check_data(config, spec, [data])


def is_done(config: EvaluateConfig, data: DataSpec) -> bool:
    """Whether the sets are evaluated already. Raises ConfigError if run.dir has an evaluation with other settings."""
    prepare.check_same_run(config, data)
    folder = Path(config.run.dir)
    recorded = evaluations.read(folder)
    if not recorded:
        return False
    before = replaced(config, {"data.eval": (read_settings(folder) or {"data": {"eval": None}})["data"]["eval"]})
    known = {eval_set.name: eval_set for eval_set in evaluation_data(before).eval_sets}
    for eval_set in data.eval_sets:
        message = f"{eval_set.setting}: run.dir={folder} has this set with other settings"
        out = "rename the set, or choose another run.dir"
        require(known.get(eval_set.name, eval_set) == eval_set, f"{message}; {out}")
    names = {evaluations.name_of(eval_set.name, evaluations.MODEL) for eval_set in data.eval_sets}
    complete = {name for name, record in recorded.items() if evaluations.is_complete(record)}
    return names <= complete and records.finished(folder)


def _model(config: EvaluateConfig) -> tuple[Path, Path | None]:
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


def _convert(config: EvaluateConfig, checkpoint: Path, source: Path) -> Path:
    """`checkpoint` as a Hugging Face folder in run.dir, converted by the first process that needs it."""
    folder = Path(config.run.dir) / FOLDER
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{FOLDER}.lock")):
        if not folder.exists():
            patches.apply("megatron")
            from megatron_collab.checkpoint import convert

            convert.to_hf(checkpoint, folder, source, None, _FILE_BYTES)
    return folder
