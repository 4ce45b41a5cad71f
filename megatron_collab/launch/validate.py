"""Checks before any process starts; each raises a ConfigError of one line that names the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_collab import environments
from megatron_collab.algo.advantages import make_advantage
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.algo.turn_credit import make_turn_credit
from megatron_collab.config import (
    Config,
    ConfigError,
    PlayConfig,
    Shown,
    TrainingModelConfig,
    check_declared,
    compose,
    nearest,
    read_prompt,
    require,
)
from megatron_collab.config.extension import make, make_absolute
from megatron_collab.config.load import leaves
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.formats import STAGES
from megatron_collab.launch import endpoints, servers, teacher
from megatron_collab.launch.extensions import check_extensions
from megatron_collab.launch.machine import check_processes
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.launch.trainer_specs import teacher_model, trainer_layout
from megatron_collab.models import lora, parallel_layout
from megatron_collab.models.hf_config import ModelShape, shape_of_setting
from megatron_collab.observability.writers import writer_kinds
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.users import DEFAULT, split_user
from megatron_collab.rollout.users.llm import users_prompt
from megatron_collab.runtime import device, gpu_environment, hub, network
from megatron_collab.runtime.redact import redacted

# recipe: compute capability from which TransformerEngine 2.20 supports it, the first without support, and the reason
_FP8_DEVICES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "delayed": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "tensorwise": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "blockwise": ((9, 0), (100, 0), "block scaling came with Hopper"),
    "mxfp8": ((10, 0), (12, 0), "only Blackwell's data center GPUs, below 12.0, have MXFP8"),
}


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
    check_layout_on_machine(config)
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
        check_steps(config)
    message = f"{shown.data.max_prompt_tokens}: {shown.train.stage} has no prompts to sample from; remove it, and set "
    require(train.stage == "rl" or config.data.max_prompt_tokens is None, f"{message}rollout.context_length")
    message = f"{shown.rollout.routing_replay}: {train.stage} samples no tokens to replay; set it to false"
    require(train.stage == "rl" or not rollout.routing_replay, message)
    check_layout(config)
    teacher.check_settings(config)
    spec = run_spec(config)
    if not spec.play:
        _check_no_play(config, spec.data.eval_sets)
    _check_best(config, spec.data.eval_sets)
    dpo = config.algo.dpo
    message = f"{shown.algo.dpo.label_smoothing}: algo.dpo.loss=ipo has no labels; set it to 0, or choose sigmoid"
    require(config.objective != "dpo" or dpo.loss != "ipo" or dpo.label_smoothing == 0, message)
    message = f"{shown.algo.dpo.loss}: regresses rewards, which the pairs of {shown.train.stage} lack; choose sigmoid"
    require(train.stage != "dpo" or dpo.loss != "refuel", message)
    message = f"{shown.algo.dpo.label_smoothing}: algo.dpo.loss=refuel has no labels; set it to 0, or choose sigmoid"
    require(config.objective != "dpo" or dpo.loss != "refuel" or dpo.label_smoothing == 0, message)
    message = f"{shown.algo.dpo.refresh}: algo.dpo.loss=refuel compares with the policy that sampled the replies"
    require(config.objective != "dpo" or dpo.loss != "refuel" or dpo.refresh == 1, f"{message}; set it to 1")
    message = f"{shown.algo.dpo.refresh}: {shown.train.stage} keeps the first policy as reference; set it to 0"
    require(train.stage != "dpo" or dpo.refresh == 0, message)
    message = f"{shown.algo.dpo.refresh}: with {shown.model.lora.rank} the reference is the model without adapters"
    fix = "remove the adapters" if dpo.loss == "refuel" else "set it to 0"
    require(config.objective != "dpo" or dpo.refresh == 0 or config.model.lora.rank is None, f"{message}; {fix}")
    if spec.play and spec.serving:
        check_played(config, spec)
        _check_trained_turns(config)
        if config.objective == "policy":
            _check_algo(config, spec.play.reward)
        else:
            _check_choice(config)
        servers.check_servers(config, spec.serving)
    return spec


def check_steps(config: Config) -> None:
    """Checks phases of a run against its steps, as soon as they are known. Raises ConfigError."""
    shown, steps = Shown(config), config.train.steps
    message = f"{shown.optim.warmup_steps}: ends beyond the run, {shown.train.steps}; lower it"
    require(config.optim.warmup_steps <= steps, message)
    message = f"{shown.algo.critic_warmup}: leaves the policy none of {shown.train.steps}; lower it"
    require(config.objective != "policy" or config.algo.critic_warmup < steps, message)


def check_options(config: PlayConfig, *extensible: str) -> None:
    """The first checks of any program that plays conversations: single options. Raises ConfigError.

    `extensible`: further settings that may name a class, whose options are in NAME_options.
    """
    shown = Shown(config)
    refuse_keys(asdict(config))
    check_declared(config)  # again: a program may have changed composed values
    writer_kinds(config)
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


def _check_trained_turns(config: Config) -> None:
    shown, rollout = Shown(config), config.rollout
    if rollout.train_turns == "all":
        message = f"{shown.rollout.train_turns}: compares sibling futures; set rollout.futures to 2 or more"
        require(rollout.futures > 1, message)
        message = f"{shown.rollout.train_turns} trains these turns too; set it to {shown.rollout.turn.temperature}"
        same = rollout.turn.temperature == rollout.future.temperature
        require(same, f"{shown.rollout.future.temperature}: {message}")


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


def _check_algo(config: Config, spec: RewardSpec) -> None:
    shown = Shown(config)
    algo, advantage, credit = config.algo, make_advantage(config.algo), make_turn_credit(config.reward)
    whole_sequences = algo.loss == "gspo"
    if ":" in algo.loss:
        loss = make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")
        whole_sequences = getattr(loss, "whole_sequences", False)
    message = f"{shown.algo.correction_low}: must be less than {shown.algo.correction_high}"
    require(algo.correction_low < algo.correction_high, message)
    message = f"{shown.algo.kl_in}: algo.kl_coef=0 leaves no KL; set algo.kl_coef above 0, or algo.kl_in=loss"
    require(algo.kl_in == "loss" or algo.kl_coef > 0, message)
    message = f"{shown.algo.advantage}: compares the rollouts of a task; set train.rollouts_per_prompt to 2 or more"
    compares = advantage.compares and algo.teacher.weight < 1
    require(not compares or config.train.rollouts_per_prompt > 1, message)
    message = f"{shown.algo.advantage}: normalizes rewards of the trained turn only; set rollout.train_turns=first"
    require(not advantage.decouples or config.rollout.train_turns == "first", message)
    message = f"{shown.algo.dynamic_sampling}: with {shown.algo.advantage} groups of equal rewards teach as well"
    require(advantage.compares or algo.dynamic_sampling == 0, f"{message}; set it to 0")
    message = f"{shown.algo.loss}: needs whole sequences on a rank, and {shown.parallel.cp} cuts them"
    require(not whole_sequences or config.parallel.cp == 1, f"{message}; set parallel.cp=1")
    message = f"{shown.algo.correction_level}: needs whole sequences on a rank, and {shown.parallel.cp} cuts them"
    require(algo.correction_level == "token" or config.parallel.cp == 1, f"{message}; set it to token")
    message = f"{shown.algo.critic_warmup}: {shown.algo.advantage} has no critic; set it to 0, or algo.advantage=gae"
    require(advantage.critic or algo.critic_warmup == 0, message)
    message = f"{shown.reward.turn_credit}: {shown.algo.advantage} computes returns itself, from algo.gamma; set it to"
    require(not advantage.critic or credit.rewards, f"{message} immediate, equal or last")
    message = f"{shown.reward.turn_credit}: its credits have to be compared with their peers, which"
    message = f"{message} {shown.algo.advantage} does not do; set it to grpo, dr_grpo or rloo"
    require(not credit.compared or (advantage.compares and not advantage.decouples), message)
    for name in credit.turn_metrics:
        metric = spec.metrics.get(name)
        message = (
            f"{shown.reward.turn_credit}: reads the turns' scores of {name}, which is not in reward.weights; add it"
        )
        require(metric is not None, message)
        message = f"{shown.reward.turn_credit}: {name} gives no score for each turn; choose a metric that does"
        require(metric is None or metric.scores_turns, message)


def _check_choice(config: Config) -> None:
    """Checks objectives that learn from the best rollout of a group (sft), or from best and worst (dpo)."""
    shown = Shown(config)
    algo, rollout = config.algo, config.rollout
    prefix = f"{shown.algo.objective}: chooses among the rollouts of a task"
    require(config.train.rollouts_per_prompt > 1, f"{prefix}; set train.rollouts_per_prompt to 2 or more")
    require(
        rollout.train_turns == "first", f"{prefix}, whose futures are not learned from; set rollout.train_turns=first"
    )
    conversations = config.reward.mode != "single_turn" and rollout.futures == 0
    equal = config.reward.turn_credit == "equal"
    message = f"{shown.reward.turn_credit}: {shown.algo.objective} learns from all turns of a conversation"
    require(equal or not conversations, f"{message}; set it to equal")
    message = f"{shown.rollout.strip_thoughts}: {shown.algo.objective} compares conversations of one sequence each"
    require(algo.objective == "sft" or not (conversations and rollout.strip_thoughts), f"{message}; set it to false")
    message = f"{shown.algo.dynamic_sampling}: with {shown.algo.objective} every group teaches; set it to 0"
    require(algo.objective == "dpo" or algo.dynamic_sampling == 0, message)


def check_model(config: Config, spec: RunSpec, described: Path | None = None) -> ModelShape:
    """Checks the model against the layouts; returns its shape, from its config.json or from the file `described`."""
    shape = read_shape(config, described)
    check_layout_of_model(config, shape)
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
        check_layout_of_model(replace(config, model=model), shape)
    except ConfigError as error:
        raise ConfigError(f"{teacher.SETTING}={model.path}: {error}") from error
    return shape


def read_shape(config: PlayConfig, described: Path | None = None) -> ModelShape:
    """The shape of model.path, from its config.json or from the file `described`. Raises ConfigError."""
    world = config.data.world
    start = f"{world}_costs" if world == "desk" and config.data.world_options else world
    hint = f"; experiment={start}_sft trains the model {start} starts from" if world in ("booking", "desk") else ""
    return shape_of_setting("model.path", config.model.path, described, hint)


def check_layout(config: Config) -> None:
    """Checks of the layout that need neither the model nor this machine. Raises ConfigError."""
    shown = Shown(config)
    parallel, ranks = config.parallel, config.launch.ranks
    size = parallel.tp * parallel.pp * parallel.cp
    require(
        ranks % size == 0,
        f"{shown.parallel.tp} x {shown.parallel.pp} x {shown.parallel.cp} does not divide the {ranks} ranks "
        f"({shown.launch.nodes} x {shown.launch.nproc_per_node}); set launch.nproc_per_node so that they are a "
        f"multiple of {size}",
    )
    message = f"{shown.parallel.sequence_parallel}: needs parallel.tp > 1; set it to false"
    require(parallel.tp > 1 or not parallel.sequence_parallel, message)
    require(parallel.pp > 1 or parallel.vpp == 1, f"{shown.parallel.vpp}: needs parallel.pp > 1; set parallel.vpp=1")
    stage = ranks // parallel.pp
    message = f"{shown.parallel.ep}: does not divide the {stage} ranks of a pipeline stage; choose a divisor"
    require(stage % parallel.ep == 0, message)
    _, multiple = parallel_layout.alignment(parallel, config.model)
    tokens = config.train.tokens_per_micro_batch
    fitting = -(-tokens // multiple) * multiple
    message = f"must be a multiple of {multiple} with this layout and precision; set {fitting}"
    require(tokens % multiple == 0, f"{shown.train.tokens_per_micro_batch}: {message}")
    model = config.model
    message = f"{shown.parallel.cp}: needs model.dtype=bfloat16, not {model.dtype}; set parallel.cp=1"
    require(parallel.cp == 1 or model.dtype == "bfloat16", message)
    targets = model.lora.targets
    require(bool(targets), "model.lora.targets=[]: nothing would be trained; name a layer, or set model.lora.rank=null")
    repeated = next((name for name in targets if targets.count(name) > 1), "")
    require(not repeated, f"model.lora.targets: {repeated} is named twice; name it once")
    message = f"{shown.model.lora.serve}: there are no adapters; set model.lora.rank, or model.lora.serve=merged"
    require(model.lora.serve == "merged" or model.lora.rank is not None, message)
    _check_fp8(config)


def _check_fp8(config: Config) -> None:
    shown, model = Shown(config), config.model
    if not model.fp8:
        for setting in ("fp8_recipe", "fp8_params", "fp8_skip_first", "fp8_skip_last"):
            default = getattr(model, setting) == getattr(TrainingModelConfig, setting)
            require(default, f"{getattr(shown.model, setting)}: needs model.fp8; set model.fp8=hybrid")
        return
    message = f"{shown.model.fp8}: needs model.dtype=bfloat16, not {model.dtype}; set model.fp8=null"
    require(model.dtype == "bfloat16", message)
    # Megatron-Core would need another layout of its buffers, which this trainer does not set up.
    message = f"{shown.model.fp8_params}: with model.fp8_recipe=mxfp8 is not supported"
    require(model.fp8_recipe != "mxfp8" or not model.fp8_params, f"{message}; set it to false, or another recipe")
    # TransformerEngine scales such parameters in the optimizer's step, which the reference does not have. With a scale
    # of 1 its weights would lose most of their digits.
    message = f"{shown.model.fp8_params}: with model.fp8_recipe=delayed"
    scaled = model.fp8_recipe != "delayed" or config.reference is None
    out = "choose model.fp8_recipe=blockwise, or set model.fp8_params=false"
    reason = "the reference, the first policy, is never scaled"
    require(scaled or not model.fp8_params, f"{message} {reason}; {out}")
    scaled = model.fp8_recipe != "delayed" or model.lora.rank is None
    reason = f"the weights that {shown.model.lora.rank} freezes are never scaled"
    require(scaled or not model.fp8_params, f"{message} {reason}; {out}")
    message = "keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise, or set model.fp8_skip_*=0"
    skips = model.fp8_skip_first + model.fp8_skip_last > 0
    require(model.fp8_recipe != "delayed" or not skips, f"{shown.model.fp8_recipe}: {message}")


def check_layout_on_machine(config: Config) -> None:
    """Checks that TransformerEngine and the device of this machine support the settings. Raises ConfigError."""
    shown = Shown(config)
    for setting, used, off in (("parallel.cp", config.parallel.cp > 1, "1"), ("model.fp8", config.model.fp8, "null")):
        if used:
            engine = device.probe("transformer_engine")
            message = f"{attrgetter(setting)(shown)}: needs TransformerEngine ({engine.detail}); set {setting}={off}"
            require(engine.available, message)
    if config.model.dtype == "bfloat16" and device.select(config.launch.device).type == device.GPU:
        # The plan counts the layers of TransformerEngine; Megatron's local ones keep larger activations.
        engine = device.probe("transformer_engine")
        message = f"on GPUs needs TransformerEngine ({engine.detail}); run make setup GPU=1, or set model.dtype=float32"
        require(engine.available, f"{shown.model.dtype}: {message}")
    if config.model.fp8:
        (first, end, reason), capability = _FP8_DEVICES[config.model.fp8_recipe], device.capability()
        present = "{}.{}".format(*capability) if capability else "none"
        require(
            capability is not None and first <= capability < end,
            f"{shown.model.fp8_recipe}: needs a device of compute capability {first[0]}.{first[1]} or higher "
            f"({reason}), found {present}; choose another recipe, or set model.fp8=null",
        )


def check_layout_of_model(config: Config, shape: ModelShape) -> None:
    """Checks the sizes of the model against the layout and FP8. Raises ConfigError."""
    shown = Shown(config)
    parallel, experts = config.parallel, shape.experts
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for name, count in sizes.items():
        require(
            count % parallel.tp == 0,
            f"{shown.parallel.tp}: does not divide the model's {count} {name}; choose a divisor",
        )
    stages = f"{shown.parallel.pp} x {shown.parallel.vpp}" if parallel.vpp > 1 else f"{shown.parallel.pp}"
    message = f"{stages}: the model has only {shape.layers} layers; choose at most {shape.layers} stages"
    require(parallel.pp * parallel.vpp <= shape.layers, message)
    if experts is None:
        require(parallel.ep == 1, f"{shown.parallel.ep}: the model has no experts; set parallel.ep=1")
    else:
        message = f"{shown.parallel.ep}: does not divide the model's {experts.count} experts; choose a divisor"
        require(experts.count % parallel.ep == 0, message)
        message = f"{shown.parallel.tp}: a model with experts also needs parallel.sequence_parallel=true; set it"
        require(parallel.tp == 1 or parallel.sequence_parallel, message)
    bare = lora.without_adapters(shape, config.model.lora) if config.model.lora.rank else None
    message = f"layer {bare} would have no adapters, since experts get none; add o_proj"
    require(bare is None, f"model.lora.targets={config.model.lora.targets}: {message}")
    if not config.model.fp8:
        return
    # TransformerEngine reads the scales of grouped experts before Megatron-Core has assembled them.
    message = "the experts' scales of model.fp8_recipe=delayed cannot be read from a checkpoint; choose tensorwise"
    unread = experts and config.model.fp8_params and config.model.fp8_recipe == "delayed"
    require(not unread, f"{shown.model.fp8_params}: {message}")
    # TransformerEngine multiplies FP8 matrices only if their sides are multiples of a block.
    model, tp = config.model, parallel.tp
    multiple = parallel_layout.FP8_MULTIPLE[model.fp8_recipe]
    sizes = {
        "hidden size": shape.hidden,
        "attention width": shape.heads * shape.head_dim // tp,
        "width of queries, keys and values": (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp,
        "feed-forward width": shape.ffn // tp,
        "width of an expert": shape.experts.ffn if shape.experts else multiple,
    }
    for name, size in sizes.items():
        message = f"{shown.model.fp8}: the {name} on a rank, {size}, is not a multiple of {multiple}; lower parallel.tp"
        require(size % multiple == 0, message)
    most = shape.layers // parallel.pp
    for setting in ("fp8_skip_first", "fp8_skip_last"):
        message = f"{getattr(shown.model, setting)}: a pipeline stage has {most} layers; choose at most {most}"
        require(getattr(model, setting) <= most, message)
