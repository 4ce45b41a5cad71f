"""Checks before any process starts; each raises a ConfigError of one line that names the setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_collab.algo.advantages import GROUPED
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.config import (
    Config,
    ConfigError,
    PlayConfig,
    TrainingModelConfig,
    check_declared,
    compose,
    nearest,
    read_prompt,
    require,
    uses_wandb,
)
from megatron_collab.config.extension import make, make_absolute
from megatron_collab.config.load import leaves
from megatron_collab.data import sources
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.formats import STAGES
from megatron_collab.launch import endpoints, servers
from megatron_collab.launch.machine import check_processes
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.models import hf_config, lora, parallel_layout
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.users import DEFAULT, split_user
from megatron_collab.rollout.users.llm import users_prompt
from megatron_collab.runtime import device, gpu_environment, hub, network
from megatron_collab.runtime.redact import redacted
from megatron_collab.weight_sync.plan import trainer_layout

# recipe: compute capability from which TransformerEngine 2.20 supports it, the first without support, and the reason
_FP8_DEVICES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "delayed": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "tensorwise": ((8, 9), (100, 0), "FP8 matrix units came with Ada and Hopper"),
    "blockwise": ((9, 0), (100, 0), "block scaling came with Hopper"),
    "mxfp8": ((10, 0), (12, 0), "only Blackwell's data center GPUs, below 12.0, have MXFP8"),
}


def load(overrides: Sequence[str]) -> Config:
    """The settings of a run on this machine, composed and validated. Raises ConfigError."""
    config = make_absolute(compose(overrides))
    validate(config)
    return config


def validate(config: Config) -> None:
    """Cross-checks that need no process and no model in memory. Sets a rank's environment in this process."""
    spec = check_settings(config)
    gpu_environment.enter(config)  # libraries imported below may initialize CUDA
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
    if not makes_world:
        sources.check_exists(spec.data.train, "data.train")
        sources.check_exists(spec.data.all_sets, "data.eval")
    check_files_of_users(spec)
    if config.rollout.system_prompt:
        read_prompt("rollout.system_prompt", config.rollout.system_prompt, "", ())
    message = "<run.wandb_project>: WANDB_API_KEY is set; install wandb, or set run.wandb_project=null"
    require(not uses_wandb(config.run) or find_spec("wandb") is not None, message, config)


def check_settings(config: Config) -> RunSpec:
    """The settled settings (see spec.py), after the checks of `validate` that do not depend on the machine."""
    check = partial(require, config=config)
    check_options(config, "algo.loss", "publish.transport")
    reads = STAGES[config.train.stage]
    message = f"<data.format>: custom readers give tasks, and <train.stage> reads {reads}s; set it to auto"
    check(":" not in config.data.format or config.train.stage == "rl", message)
    train, rollout = config.train, config.rollout
    samples = train.prompts_per_step  # every optimizer step needs at least one
    if config.objective == "policy":
        samples *= train.rollouts_per_prompt * (1 + (rollout.futures if rollout.train_turns == "all" else 0))
    unit = "pairs" if config.objective == "dpo" else "samples"
    message = f"<algo.mini_batches>: a step has at most {samples} {unit}; choose at most as many"
    check(config.algo.mini_batches <= samples, message)
    message = "<optim.warmup_steps>: ends beyond the run, <train.steps>; lower it"
    check(config.optim.warmup_steps <= train.steps, message)
    message = f"<rollout.routing_replay>: {train.stage} samples no tokens to replay; set it to false"
    check(train.stage == "rl" or not rollout.routing_replay, message)
    check_layout(config)
    spec = run_spec(config)
    if not spec.play:
        _check_no_play(config, spec.data.eval_sets)
    _check_best(config, spec.data.eval_sets)
    dpo = config.algo.dpo
    message = "<algo.dpo.label_smoothing>: algo.dpo.loss=ipo has no labels; set it to 0, or choose sigmoid"
    check(config.objective != "dpo" or dpo.loss != "ipo" or dpo.label_smoothing == 0, message)
    message = "<algo.dpo.refresh>: <train.stage> keeps the first policy as reference; set it to 0"
    check(train.stage != "dpo" or dpo.refresh == 0, message)
    message = "<algo.dpo.refresh>: with <model.lora.rank> the reference is the model without adapters; set it to 0"
    check(config.objective != "dpo" or dpo.refresh == 0 or config.model.lora.rank is None, message)
    if spec.play and spec.serving:
        check_played(config, spec)
        _check_trained_turns(config)
        (_check_algo if config.objective == "policy" else _check_choice)(config)
        servers.check_servers(config, spec.serving)
    return spec


def check_options(config: PlayConfig, *extensible: str) -> None:
    """The first checks of any program that plays conversations: single options. Raises ConfigError.

    `extensible`: further settings that may name a class, whose options are in NAME_options.
    """
    check = partial(require, config=config)
    refuse_keys(asdict(config))
    check_declared(config)  # again: a program may have changed composed values
    message = "<launch.nodes>: needs launch.interface, the network interface between nodes, e.g. ib0"
    check(config.launch.nodes == 1 or config.launch.interface is not None, message)
    for setting in ("reward.mode", "data.world", "data.format", "rollout.player", *extensible):
        options = attrgetter(f"{setting}_options")(config)
        message = f"{setting}_options: <{setting}> has no options; remove them"
        check(not options or ":" in str(attrgetter(setting)(config)), message)


def check_played(config: PlayConfig, spec: RunSpec) -> None:
    """Checks of reward, turns, what is served and called, in any program that plays conversations.

    Raises ConfigError.
    """
    assert spec.play and spec.serving
    check_reward(config, spec.play.reward)
    _check_turns(config, spec.data.eval_sets)
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
    message = "<train.keep_best>: needs a checkpoint at every evaluation; set train.eval_every to a multiple of"
    aligned = train.eval_every > 0 and train.eval_every % train.checkpoint_every == 0
    require(aligned, f"{message} <train.checkpoint_every>", config)


def check_reward(config: PlayConfig, spec: RewardSpec) -> None:
    """Checks the metrics and the reward formula. Raises ConfigError."""
    check = partial(require, config=config)
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
        check(bool(judge), f"reward.weights.{name}: needs a judge; set reward.judge.model to a LiteLLM model")
    message = "<reward.malformed_worst>: needs a reward for malformed turns; set reward.malformed, or set it to false"
    check(not reward.malformed_worst or reward.malformed is not None, message)
    clamps = reward.mode in ("mr", "single_turn")
    check(not reward.clamp or clamps, "reward.clamp: <reward.mode> does not clamp; remove one of them")


def _check_llm_endpoints(config: PlayConfig, spec: RunSpec) -> None:
    """Checks the models of users, judges and assistant before the tasks are read; tasks may name further users."""
    users = [*config.users, *(["llm"] if config.user.model else [])]
    language_models = [*spec.endpoints_of(users), *spec.judges, *spec.assistants]
    endpoints.check_served(config, language_models)
    endpoints.check_prices(config, language_models)


def _check_trained_turns(config: Config) -> None:
    check, rollout = partial(require, config=config), config.rollout
    if rollout.train_turns == "all":
        check(rollout.futures > 1, "<rollout.train_turns>: compares sibling futures; set rollout.futures to 2 or more")
        message = "<rollout.train_turns> trains these turns too; set it to <rollout.turn.temperature>"
        same = rollout.turn.temperature == rollout.future.temperature
        check(same, f"<rollout.future.temperature>: {message}")


def _check_turns(config: PlayConfig, eval_sets: Sequence[EvaluationSet]) -> None:
    check = partial(require, config=config)
    rollout = config.rollout
    message = "with rollout.futures=0 these rewards are credited to their turns already; set it to 0"
    credited_once = rollout.futures > 0 or not config.reward.weights.get("turn_rewards")
    check(credited_once, f"reward.weights.turn_rewards: {message}")
    for eval_set in eval_sets:
        message = f"{eval_set.setting}: max_new_tokens={eval_set.max_new_tokens} leaves no room for a prompt in"
        fits = (eval_set.max_new_tokens or 0) < rollout.context_length
        check(fits, f"{message} <rollout.context_length>; lower it")
    for setting, sampling in (("rollout.turn", rollout.turn), ("rollout.future", rollout.future)):
        require(sampling.top_k != 0, f"{setting}.top_k=0: samples from no token; set -1 for all, or 1 or more")
        message = f"<{setting}.max_new_tokens>: leaves no room for a prompt in <rollout.context_length>; lower it"
        check(sampling.max_new_tokens < rollout.context_length, message)
        message = f"<{setting}.thinking_budget>: with {setting}.max_new_tokens leaves no room for a prompt in"
        check(sampling.longest < rollout.context_length, f"{message} <rollout.context_length>; lower it")
        thinks = sampling.enable_thinking
        thinks = config.model.chat_template_args.get("enable_thinking", True) if thinks is None else thinks
        message = f"<{setting}.thinking_budget>: enable_thinking=false leaves no thoughts in these turns; remove one"
        check(sampling.thinking_budget is None or thinks, message)


def _check_algo(config: Config) -> None:
    check = partial(require, config=config)
    algo, grouped = config.algo, config.algo.advantage in GROUPED
    whole_sequences = algo.loss == "gspo"
    if ":" in algo.loss:
        loss = make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")
        whole_sequences = getattr(loss, "whole_sequences", False)
    check(algo.correction_low < algo.correction_high, "<algo.correction_low>: must be less than <algo.correction_high>")
    message = "<algo.kl_in>: algo.kl_coef=0 leaves no KL; set algo.kl_coef above 0, or algo.kl_in=loss"
    check(algo.kl_in == "loss" or algo.kl_coef > 0, message)
    message = "<algo.advantage>: compares the rollouts of a task; set train.rollouts_per_prompt to 2 or more"
    check(not grouped or config.train.rollouts_per_prompt > 1, message)
    message = "<algo.advantage>: normalizes rewards of the trained turn only; set rollout.train_turns=first"
    check(algo.advantage != "gdpo" or config.rollout.train_turns == "first", message)
    message = "<algo.dynamic_sampling>: with <algo.advantage> groups of equal rewards teach as well; set it to 0"
    check(grouped or algo.dynamic_sampling == 0, message)
    message = "<algo.loss>: needs whole sequences on a rank, and <parallel.cp> cuts them; set parallel.cp=1"
    check(not whole_sequences or config.parallel.cp == 1, message)
    message = "<algo.correction_level>: needs whole sequences on a rank, and <parallel.cp> cuts them; set it to token"
    check(algo.correction_level == "token" or config.parallel.cp == 1, message)
    message = "<algo.critic_warmup>: <algo.advantage> has no critic; set it to 0, or algo.advantage=gae"
    check(algo.advantage == "gae" or algo.critic_warmup == 0, message)
    message = "<algo.critic_warmup>: leaves the policy none of <train.steps>; lower it"
    check(algo.critic_warmup < config.train.steps, message)
    message = "<reward.turn_credit>: <algo.advantage> computes returns itself, from algo.gamma; set it to equal or last"
    check(algo.advantage != "gae" or config.reward.turn_credit != "reward_to_go", message)


def _check_choice(config: Config) -> None:
    """Checks objectives that learn from the best rollout of a group (sft), or from best and worst (dpo)."""
    check = partial(require, config=config)
    algo, rollout = config.algo, config.rollout
    prefix = "<algo.objective>: chooses among the rollouts of a task"
    check(config.train.rollouts_per_prompt > 1, f"{prefix}; set train.rollouts_per_prompt to 2 or more")
    check(
        rollout.train_turns == "first", f"{prefix}, whose futures are not learned from; set rollout.train_turns=first"
    )
    conversations = config.reward.mode != "single_turn" and rollout.futures == 0
    equal = config.reward.turn_credit == "equal"
    message = "<reward.turn_credit>: <algo.objective> learns from all turns of a conversation; set it to equal"
    check(equal or not conversations, message)
    message = "<rollout.strip_thoughts>: <algo.objective> compares conversations of one sequence each; set it to false"
    check(algo.objective == "sft" or not (conversations and rollout.strip_thoughts), message)
    message = "<algo.dynamic_sampling>: with <algo.objective> every group teaches; set it to 0"
    check(algo.objective == "dpo" or algo.dynamic_sampling == 0, message)


def check_model(config: Config, spec: RunSpec, described: Path | None = None) -> ModelShape:
    """Checks the model against the layouts; returns its shape, from its config.json or from the file `described`."""
    shape = read_shape(config, described)
    check_layout_of_model(config, shape)
    if spec.serving:
        servers.check_servers_of_model(config, spec.serving.policy, shape, trainer_layout(config))
    return shape


def read_shape(config: PlayConfig, described: Path | None = None) -> ModelShape:
    """The shape of model.path, from its config.json or from the file `described`. Raises ConfigError."""
    path = config.model.path
    file = described or hub.folder(path) / "config.json"
    world = config.data.world
    hint = f"; experiment={world}_sft trains the model {world} starts from" if world in ("booking", "desk") else ""
    out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
    require(file.is_file(), f"model.path={path}: no config.json there; {out}{hint}")
    try:
        return hf_config.read_policy(file)
    except ValueError as error:
        raise ConfigError(f"model.path={path}: {error}; give another model") from error


def check_layout(config: Config) -> None:
    """Checks of the layout that need neither the model nor this machine. Raises ConfigError."""
    check = partial(require, config=config)
    parallel, ranks = config.parallel, parallel_layout.ranks(config)
    size = parallel.tp * parallel.pp * parallel.cp
    check(
        ranks % size == 0,
        f"<parallel.tp> x <parallel.pp> x <parallel.cp> does not divide the {ranks} ranks (<launch.nodes> x "
        f"<launch.nproc_per_node>); set launch.nproc_per_node so that they are a multiple of {size}",
    )
    message = "<parallel.sequence_parallel>: needs parallel.tp > 1; set it to false"
    check(parallel.tp > 1 or not parallel.sequence_parallel, message)
    check(parallel.pp > 1 or parallel.vpp == 1, "<parallel.vpp>: needs parallel.pp > 1; set parallel.vpp=1")
    stage = ranks // parallel.pp
    message = f"<parallel.ep>: does not divide the {stage} ranks of a pipeline stage; choose a divisor"
    check(stage % parallel.ep == 0, message)
    _, multiple = parallel_layout.alignment(config)
    tokens = config.train.tokens_per_micro_batch
    fitting = -(-tokens // multiple) * multiple
    message = f"must be a multiple of {multiple} with this layout and precision; set {fitting}"
    check(tokens % multiple == 0, f"<train.tokens_per_micro_batch>: {message}")
    model = config.model
    message = f"<parallel.cp>: needs model.dtype=bfloat16, not {model.dtype}; set parallel.cp=1"
    check(parallel.cp == 1 or model.dtype == "bfloat16", message)
    targets = model.lora.targets
    check(bool(targets), "model.lora.targets=[]: nothing would be trained; name a layer, or set model.lora.rank=null")
    repeated = next((name for name in targets if targets.count(name) > 1), "")
    check(not repeated, f"model.lora.targets: {repeated} is named twice; name it once")
    message = "<model.lora.serve>: there are no adapters; set model.lora.rank, or model.lora.serve=merged"
    check(model.lora.serve == "merged" or model.lora.rank is not None, message)
    if not model.fp8:
        for setting in ("fp8_recipe", "fp8_params", "fp8_skip_first", "fp8_skip_last"):
            default = getattr(model, setting) == getattr(TrainingModelConfig, setting)
            check(default, f"<model.{setting}>: needs model.fp8; set model.fp8=hybrid")
        return
    check(model.dtype == "bfloat16", f"<model.fp8>: needs model.dtype=bfloat16, not {model.dtype}; set model.fp8=null")
    # Megatron-Core would need another layout of its buffers, which this trainer does not set up.
    message = "<model.fp8_params>: with model.fp8_recipe=mxfp8 is not supported; set it to false, or another recipe"
    check(model.fp8_recipe != "mxfp8" or not model.fp8_params, message)
    # TransformerEngine scales such parameters in the optimizer's step, which the reference does not have. With a scale
    # of 1 its weights would lose most of their digits.
    message = "<model.fp8_params>: with model.fp8_recipe=delayed the reference, the first policy, is never scaled; "
    scaled = model.fp8_recipe != "delayed" or not config.refers
    out = "choose model.fp8_recipe=blockwise, or set model.fp8_params=false"
    check(scaled or not model.fp8_params, message + out)
    message = "<model.fp8_params>: with model.fp8_recipe=delayed the weights that <model.lora.rank> freezes are never "
    scaled = model.fp8_recipe != "delayed" or model.lora.rank is None
    check(scaled or not model.fp8_params, f"{message}scaled; {out}")
    message = "keeps no layers in bfloat16; choose model.fp8_recipe=tensorwise, or set model.fp8_skip_*=0"
    skips = model.fp8_skip_first + model.fp8_skip_last > 0
    check(model.fp8_recipe != "delayed" or not skips, f"<model.fp8_recipe>: {message}")


def check_layout_on_machine(config: Config) -> None:
    """Checks that TransformerEngine and the device of this machine support the settings. Raises ConfigError."""
    check = partial(require, config=config)
    for setting, used, off in (("parallel.cp", config.parallel.cp > 1, "1"), ("model.fp8", config.model.fp8, "null")):
        if used:
            engine = device.probe("transformer_engine")
            check(engine.available, f"<{setting}>: needs TransformerEngine ({engine.detail}); set {setting}={off}")
    if config.model.dtype == "bfloat16" and device.select(config.launch.device).type == device.GPU:
        # The plan counts the layers of TransformerEngine; Megatron's local ones keep larger activations.
        engine = device.probe("transformer_engine")
        message = f"on GPUs needs TransformerEngine ({engine.detail}); run make setup GPU=1, or set model.dtype=float32"
        check(engine.available, f"<model.dtype>: {message}")
    if config.model.fp8:
        (first, end, reason), capability = _FP8_DEVICES[config.model.fp8_recipe], device.capability()
        present = "{}.{}".format(*capability) if capability else "none"
        check(
            capability is not None and first <= capability < end,
            f"<model.fp8_recipe>: needs a device of compute capability {first[0]}.{first[1]} or higher ({reason}), "
            f"found {present}; choose another recipe, or set model.fp8=null",
        )


def check_layout_of_model(config: Config, shape: ModelShape) -> None:
    """Checks the sizes of the model against the layout and FP8. Raises ConfigError."""
    check = partial(require, config=config)
    parallel, experts = config.parallel, shape.experts
    sizes = {"attention heads": shape.heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for name, count in sizes.items():
        check(
            count % parallel.tp == 0,
            f"<parallel.tp>: does not divide the model's {count} {name}; choose a divisor",
        )
    stages = "<parallel.pp> x <parallel.vpp>" if parallel.vpp > 1 else "<parallel.pp>"
    message = f"{stages}: the model has only {shape.layers} layers; choose at most {shape.layers} stages"
    check(parallel.pp * parallel.vpp <= shape.layers, message)
    if experts is None:
        check(parallel.ep == 1, "<parallel.ep>: the model has no experts; set parallel.ep=1")
    else:
        message = f"<parallel.ep>: does not divide the model's {experts.count} experts; choose a divisor"
        check(experts.count % parallel.ep == 0, message)
        message = "<parallel.tp>: a model with experts also needs parallel.sequence_parallel=true; set it"
        check(parallel.tp == 1 or parallel.sequence_parallel, message)
    bare = lora.without_adapters(shape, config.model.lora) if config.model.lora.rank else None
    message = f"layer {bare} would have no adapters, since experts get none; add o_proj"
    require(bare is None, f"model.lora.targets={config.model.lora.targets}: {message}")
    if not config.model.fp8:
        return
    # TransformerEngine reads the scales of grouped experts before Megatron-Core has assembled them.
    message = "the experts' scales of model.fp8_recipe=delayed cannot be read from a checkpoint; choose tensorwise"
    unread = experts and config.model.fp8_params and config.model.fp8_recipe == "delayed"
    check(not unread, f"<model.fp8_params>: {message}")
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
        message = f"<model.fp8>: the {name} on a rank, {size}, is not a multiple of {multiple}; lower parallel.tp"
        check(size % multiple == 0, message)
    most = shape.layers // parallel.pp
    for setting in ("fp8_skip_first", "fp8_skip_last"):
        message = f"<model.{setting}>: a pipeline stage has {most} layers; choose at most {most}"
        check(getattr(model, setting) <= most, message)
