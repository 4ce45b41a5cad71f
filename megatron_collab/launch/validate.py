"""Checks before any process starts; each raises a ConfigError of one line that names the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_collab import environments
from megatron_collab.config import Config, PlayConfig, compose
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.formats import STAGES
from megatron_collab.launch import endpoints, layout, objective, servers, teacher
from megatron_collab.launch.extensions import check_extensions
from megatron_collab.launch.machine import check_processes
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.launch.trainer_specs import teacher_model, trainer_layout
from megatron_collab.models.hf_config import ModelShape, shape_of_setting
from megatron_collab.observability.writers import writer_kinds
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.users import DEFAULT, split_user
from megatron_collab.rollout.users.llm import users_prompt
from megatron_collab.runtime import device, gpu_environment, hub, network
from megatron_collab.runtime.redact import redacted
from megatron_collab.settings import ConfigError, Shown, check_declared, nearest, read_prompt, require
from megatron_collab.settings.extension import make_absolute
from megatron_collab.settings.values import leaves


def load(overrides: Sequence[str]) -> Config:
    """The settings of a run on this machine, composed and validated. Raises ConfigError."""
    config = composed(overrides, constructs=True)
    validate(config)
    return config


def composed(overrides: Sequence[str], *, constructs: bool = False) -> Config:
    """The settings of a run on any machine, whose code has been tried; `check_settings` follows. Raises ConfigError.

    `constructs`: see `check_extensions`; a plan makes nothing.
    """
    config: Config = make_absolute(compose(overrides))
    check_extensions(config, constructs=constructs)
    return config


def validate(config: Config) -> None:
    """Cross-checks that need no process and no model in memory. Sets a rank's environment in this process."""
    spec = check_settings(config)
    # Libraries imported below may initialize CUDA.
    gpu_environment.enter(gpu_environment.rank_variables(config.launch.device, config.parallel, config.model))
    try:
        device.select(config.launch.device)
        device.refuse_unusable_driver(config.launch.device)
        network.address(config.launch.interface)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    layout.check_layout_on_machine(config)
    check_processes(config)
    if spec.serving:
        servers.check_servers_on_machine(config, spec.serving)
    makes_world = config.data.world is not None
    if not (makes_world or hub.parse(config.model.path)) or Path(config.model.path).exists():
        check_model(config, spec)
    if not hub.parse(config.algo.teacher.model) or Path(config.algo.teacher.model).exists():
        check_teacher(config)
    if not makes_world:
        sources.check_exists(spec.data.train, "data.train")
        sources.check_exists(spec.data.all_sets, "data.eval")
    check_files_of_users(spec)
    if config.rollout.system_prompt:
        read_prompt("rollout.system_prompt", config.rollout.system_prompt, "", ())


def check_settings(config: Config) -> RunSpec:
    """The settled settings (see spec.py), after the checks of `validate` that do not depend on the machine."""
    shown = Shown(config)
    check_options(config, "algo.loss", "publish.transport")
    reads = STAGES[config.train.stage]
    message = f"{shown.data.format}: custom readers give tasks, and {shown.train.stage} reads {reads}s; set it to auto"
    require(":" not in config.data.format or config.train.stage == "rl", message)
    train, rollout = config.train, config.rollout
    samples = train.prompts_per_step  # every optimizer step needs at least one
    if config.objective == "policy":
        samples *= train.rollouts_per_prompt * (1 + (rollout.futures if rollout.train_turns == "all" else 0))
    unit = "pairs" if config.objective == "dpo" else "samples"
    message = f"{shown.algo.mini_batches}: a step has at most {samples} {unit}; choose at most as many"
    require(config.algo.mini_batches <= samples, message)
    if train.epochs is None:
        objective.check_steps(config)
    message = f"{shown.data.max_prompt_tokens}: {shown.train.stage} has no prompts to sample from; remove it, and set "
    require(train.stage == "rl" or config.data.max_prompt_tokens is None, f"{message}rollout.context_length")
    message = f"{shown.rollout.routing_replay}: {train.stage} samples no tokens to replay; set it to false"
    require(train.stage == "rl" or not rollout.routing_replay, message)
    layout.check_layout(config)
    teacher.check_settings(config)
    spec = run_spec(config)
    if not spec.play:
        _check_no_play(config, spec.data.eval_sets)
    _check_best(config, spec.data.eval_sets)
    objective.check_dpo(config)
    if spec.play and spec.serving:
        check_played(config, spec)
        objective.check_played(config, spec.play.reward)
        servers.check_servers(config, spec.serving)
    return spec


def check_options(config: PlayConfig, *extensible: str) -> None:
    """The first checks of any program that plays conversations: single options. Raises ConfigError.

    `extensible`: further settings that may name a class, whose options are in NAME_options.
    """
    shown = Shown(config)
    refuse_keys(asdict(config))
    check_declared(config)  # again: a program may have changed composed values
    writer_kinds(config.run)
    message = f"{shown.launch.nodes}: needs launch.interface, the network interface between nodes, e.g. ib0"
    require(config.launch.nodes == 1 or config.launch.interface is not None, message)
    for setting in ("reward.mode", "data.world", "data.format", "rollout.player", *extensible):
        name, options = (attrgetter(path)(config) for path in (setting, f"{setting}_options"))
        takes_options = ":" in str(name) or (setting == "data.world" and name in environments.WITH_OPTIONS)
        require(
            not options or takes_options, f"{setting}_options: {attrgetter(setting)(shown)} has no options; remove them"
        )


def check_played(config: PlayConfig, spec: RunSpec) -> None:
    """Checks of reward, turns, what is served and called, in any program that plays conversations.

    Raises ConfigError.
    """
    assert spec.play and spec.serving
    check_reward(config, spec.play.reward)
    _check_turns(config, spec.data.eval_sets)
    for tools in spec.play.tools.toolsets if config.rollout.futures else ():
        tools.check_copies()
    for group, user in spec.play.users.settings.items():
        spec.play.tools.check_user_tools(user.tools, group)
        message = f"rollout.max_tool_calls=0: leaves no round for calls of {group}.tools; raise it, or set these to []"
        require(config.rollout.max_tool_calls > 0 or not user.tools, message)
    servers.check_served(config, spec.play.reward, spec.serving)
    endpoints.check_settings(config, spec.play.users.settings)
    _check_llm_endpoints(config, spec)


def refuse_keys(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting that contains a key; it names the setting without its value."""
    options = dict(leaves(settings))
    if redacted(options) == options:  # all at once: finding the keys in the environment takes longer
        return
    for name, value in options.items():
        require(
            redacted({name: value}) == {name: value},
            f"{name}: contains a key or a password; remove it and set it in the environment "
            "(OPENAI_API_KEY for openai/… and so on)",
        )


def check_files_of_users(spec: RunSpec) -> None:
    """Checks the files of personas and prompts of the users. Raises ConfigError."""
    for group, user in spec.play.users.settings.items() if spec.play else ():
        file = user.personas
        require(file is None or Path(file).is_file(), f"{group}.personas={file}: no such file")
        if split_user(user.name or "")[0] == DEFAULT:  # custom user classes may read their prompt differently
            users_prompt(user, f"{group}.prompt")


def _check_no_play(config: Config, eval_sets: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError for settings of played conversations."""
    for eval_set in eval_sets:
        plain = EvaluationSet(eval_set.source, eval_set.name, eval_set.subset, eval_set.split, eval_set.tasks)
        option = next((name for name, value in vars(eval_set).items() if value != getattr(plain, name)), None)
        message = f"{option} is for played conversations, and {config.train.stage} plays none; remove it"
        require(option is None, f"{eval_set.setting}: {message}")


def _check_best(config: Config, eval_sets: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError unless train.keep_best is a metric of an evaluation, and evaluated steps have checkpoints."""
    train, sets = config.train, [eval_set.name for eval_set in eval_sets]
    if train.keep_best is None:
        return
    scored = {"rl": ["reward", *config.reward.weights], "sft": ["loss"], "dpo": ["loss", "accuracy", "margin"]}[
        train.stage
    ]
    known = ["/".join(filter(None, ["eval", set_name, metric])) for set_name in sets for metric in scored]
    metric_name = train.keep_best.removeprefix("-")
    available = f"there are {', '.join(known)}" if known else "data.eval has no sets"
    require(
        metric_name in known,
        f"train.keep_best={train.keep_best}: no such metric{nearest(metric_name, known)}; {available}",
    )
    message = f"train.keep_best={train.keep_best}: needs a checkpoint at every evaluation; set train.eval_every to"
    aligned = train.eval_every > 0 and train.checkpoint_due(train.eval_every)
    require(aligned, f"{message} a multiple of train.checkpoint_every={train.checkpoint_every}")


def check_reward(config: PlayConfig, spec: RewardSpec) -> None:
    """Checks the metrics and the reward formula. Raises ConfigError."""
    shown = Shown(config)
    reward, weights = config.reward, config.reward.weights
    require(any(weights.values()), "reward.weights: no metric has a weight; give one, e.g. reward.weights.accuracy=1")
    for setting, names in (("reward.metrics", reward.metrics), ("reward.clamp", reward.clamp)):
        for name in names:
            require(name in weights, f"{setting}.{name}: not in reward.weights; add reward.weights.{name}=WEIGHT")
    for name, metric in spec.metrics.items():
        replayed = config.llm.offline and metric.served is not None  # then its servers are not started
        reason = None if replayed else metric.kind.unavailable(metric.options)
        require(reason is None, f"reward.weights.{name}: {reason}")
        judge = reward.judge.model or metric.judge_model or not metric.judged
        require(bool(judge), f"reward.weights.{name}: needs a judge; set reward.judge.model to a LiteLLM model")
    message = f"{shown.reward.malformed_worst}: needs a reward for malformed turns; set reward.malformed, or"
    require(not reward.malformed_worst or reward.malformed is not None, f"{message} set it to false")
    clamps = reward.mode in ("mr", "single_turn")
    require(not reward.clamp or clamps, f"reward.clamp: {shown.reward.mode} does not clamp; remove one of them")


def _check_llm_endpoints(config: PlayConfig, spec: RunSpec) -> None:
    """Checks the models of users, judges and assistant before the tasks are read; tasks may name further users."""
    users = [*config.users, *(["llm"] if config.user.model else [])]
    language_models = [*spec.endpoints_of(users), *spec.judges, *spec.assistants]
    endpoints.check_served(config, language_models)
    endpoints.check_prices(config, language_models)


def _check_turns(config: PlayConfig, eval_sets: Sequence[EvaluationSet]) -> None:
    shown = Shown(config)
    rollout = config.rollout
    message = "with rollout.futures=0 these rewards are credited to their turns already; set it to 0"
    credited_once = rollout.futures > 0 or not config.reward.weights.get("turn_rewards")
    require(credited_once, f"reward.weights.turn_rewards: {message}")
    for eval_set in eval_sets:
        message = f"{eval_set.setting}: max_new_tokens={eval_set.max_new_tokens} leaves no room for a prompt in"
        fits = (eval_set.max_new_tokens or 0) < rollout.context_length
        require(fits, f"{message} {shown.rollout.context_length}; lower it")
    for setting, sampling in (("rollout.turn", rollout.turn), ("rollout.future", rollout.future)):
        require(sampling.top_k != 0, f"{setting}.top_k=0: samples from no token; set -1 for all, or 1 or more")
        full = f"leaves no room for a prompt in {shown.rollout.context_length}; lower it"
        most, budget = f"{setting}.max_new_tokens", f"{setting}.thinking_budget={sampling.thinking_budget}"
        require(sampling.max_new_tokens < rollout.context_length, f"{most}={sampling.max_new_tokens}: {full}")
        require(sampling.longest < rollout.context_length, f"{budget}: with {most} {full}")
        thinks = sampling.enable_thinking
        thinks = config.model.chat_template_args.get("enable_thinking", True) if thinks is None else thinks
        message = f"{budget}: enable_thinking=false leaves no thoughts in these turns; remove one"
        require(sampling.thinking_budget is None or thinks, message)


def check_model(config: Config, spec: RunSpec, described: Path | None = None) -> ModelShape:
    """Checks the model against the layouts; returns its shape, from its config.json or from the file `described`."""
    shape = read_shape(config, described)
    layout.check_layout_of_model(config, shape)
    if spec.serving:
        servers.check_servers_of_model(config, spec.serving.policy, shape, trainer_layout(config))
    return shape


def check_teacher(config: Config, described: Path | None = None) -> ModelShape | None:
    """As `check_model`, for a teacher with weights of its own; None if there is none."""
    model = teacher_model(config)
    if model is None:
        return None
    shape = teacher.read_shape(config, described)
    try:
        layout.check_layout_of_model(replace(config, model=model), shape)
    except ConfigError as error:
        raise ConfigError(f"{teacher.SETTING}={model.path}: {error}") from error
    return shape


def read_shape(config: PlayConfig, described: Path | None = None) -> ModelShape:
    """The shape of model.path, from its config.json or from the file `described`. Raises ConfigError."""
    world = config.data.world
    start = f"{world}_costs" if world == "desk" and config.data.world_options.get("costs") else world
    hint = f"; experiment={start}_sft trains the model {start} starts from" if world in ("booking", "desk") else ""
    return shape_of_setting("model.path", config.model.path, described, hint)
