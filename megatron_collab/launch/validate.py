"""What cannot run, refused before any process is started: ConfigError with one line that names the setting."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from megatron_collab import patches
from megatron_collab.algo.advantages import GROUPED
from megatron_collab.config import (
    MODES,
    WORLDS,
    Config,
    ConfigError,
    RewardConfig,
    future_range,
    reward_to_go_gamma,
    uses_wandb,
)
from megatron_collab.config.refuse import one_of, require
from megatron_collab.launch import validate_layout, validate_servers
from megatron_collab.models import hf_config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.reward import metrics
from megatron_collab.rollout import tools
from megatron_collab.runtime import device, network, redact


def check(config: Config) -> None:
    """Cross-checks that need no process and no model in memory."""
    _check_values(config)
    _check_machine(config)
    _check_stage(config)


def check_settings(config: Config) -> None:
    """Those of `check` that would fail on any machine."""
    _check_values(config)
    _check_stage(config)


def _check_values(config: Config) -> None:
    redact.refuse_keys(asdict(config))
    one_of("train.stage", config.train.stage, ["rl", "sft"])
    one_of("launch.device", config.launch.device, device.SETTINGS)
    one_of("model.dtype", config.model.dtype, ["bfloat16", "float32"])
    one_of("optim.schedule", config.optim.schedule, ["constant", "linear"])
    one_of("reward.mode", config.reward.mode, MODES)
    one_of("rollout.train_turns", config.rollout.train_turns, ["first", "all"])
    one_of("publish.transport", config.publish.transport, ["auto", "memory", "network", "disk"])
    require(config.publish.verify >= 0, f"publish.verify={config.publish.verify}: must be 0 or greater")
    one_of("data.world", config.data.world, [None, *WORLDS])
    for setting, value in _positive(config):
        require(value > 0, f"{setting}={value}: must be greater than 0")
    for name in ("beta1", "beta2"):
        beta = getattr(config.optim, name)
        require(0 <= beta < 1, f"optim.{name}={beta}: must be from 0 to below 1")
    warmup = config.optim.warmup_steps
    require(warmup >= 0, f"optim.warmup_steps={warmup}: must be 0 or greater")
    nodes = config.launch.nodes
    require(
        nodes == 1 or config.launch.interface is not None,
        f"launch.nodes={nodes}: needs launch.interface, the network interface that the nodes talk over, as ib0",
    )
    validate_layout.check(config)


def _check_machine(config: Config) -> None:
    """Devices, libraries and files."""
    _check_device(config)
    _check_interface(config)
    validate_layout.check_machine(config)
    validate_servers.check_machine(config)
    if config.data.world is None or Path(config.model.path).exists():
        check_model(config)
    _check_files(config)
    require(
        not uses_wandb(config.run) or find_spec("wandb") is not None,
        f"run.wandb_project={config.run.wandb_project}: WANDB_API_KEY is set, but wandb is not installed; "
        f"pip install wandb, or set run.wandb_project=null",
    )


def _check_stage(config: Config) -> None:
    if config.train.stage == "rl":
        _check_reward(config.reward)
        _check_rollout(config)
        validate_servers.check(config)
        _check_algo(config)
        _check_budget(config)


def _check_reward(reward: RewardConfig) -> None:
    weights = reward.weights
    require(any(weights.values()), "reward.weights: no metric has a weight; give one, as in reward.weights.accuracy=1")
    for setting, names in (("reward.metrics", reward.metrics), ("reward.clamp", reward.clamp)):
        for name in names:
            require(name in weights, f"{setting}.{name}: not in reward.weights; add reward.weights.{name}=WEIGHT")
    for name in weights:
        try:
            metric, settings = metrics.split(name, reward.metrics.get(name, {}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        reason = metric.unavailable(settings)
        require(reason is None, f"reward.weights.{name}: {reason}")
        needs_judge = metric.judged(settings) and not (reward.judge.model or getattr(settings, "model", None))
        require(
            not needs_judge, f"reward.weights.{name}: needs a judge; set reward.judge.model to a model of LiteLLM's"
        )
    require(
        not reward.clamp or reward.mode in ("mr", "single_turn"),
        f"reward.clamp: reward.mode={reward.mode} is a published formula; remove one of them",
    )


def _check_budget(config: Config) -> None:
    """A budget holds only where the prices are known; the run's own model and scripted users cost nothing."""
    if config.llm.budget_usd is None:
        return
    patches.apply("litellm")
    from megatron_collab.llm.client import priced

    for setting, model in (("user.model", config.user.model), ("reward.judge.model", config.reward.judge.model)):
        require(
            model is None or model == "policy" or priced(model),
            f"llm.budget_usd={config.llm.budget_usd:g}: LiteLLM knows no price of {setting}={model}, so the budget "
            f"cannot be held; choose a model with a price, or set llm.budget_usd=null",
        )


def _check_rollout(config: Config) -> None:
    rollout, reward = config.rollout, config.reward
    try:
        futures, _ = future_range(rollout.futures)
    except ValueError as error:
        raise ConfigError(f"rollout.futures={rollout.futures}: {error}") from error
    try:
        reward_to_go_gamma(reward.turn_credit)
    except ValueError as error:
        raise ConfigError(f"reward.turn_credit={reward.turn_credit}: {error}") from error
    if rollout.train_turns == "all":
        require(futures > 1, "rollout.train_turns=all: compares sibling futures; set rollout.futures to 2 or more")
        require(
            rollout.turn.temperature == rollout.future.temperature,
            f"rollout.future.temperature={rollout.future.temperature}: rollout.train_turns=all trains these turns too; "
            f"set it to rollout.turn.temperature={rollout.turn.temperature}",
        )
    if futures == 0:
        require(
            not reward.weights.get("turn_rewards"),
            "reward.weights.turn_rewards: with rollout.futures=0 these rewards are credited to their turns already; "
            "set it to 0",
        )
    for name in rollout.tools:
        require(name in tools.known(), f"rollout.tools={name}: no such tool; known are {', '.join(tools.known())}")


def _check_algo(config: Config) -> None:
    algo = config.algo
    one_of("algo.advantage", algo.advantage, [*GROUPED, "reinforce++", "gae"])
    one_of("algo.loss", algo.loss, ["ppo", "gspo", "cispo"])
    one_of("algo.average", algo.average, ["token", "sequence"])
    one_of("algo.kl", algo.kl, ["k1", "k2", "k3", "low_var_kl"])
    one_of("algo.kl_in", algo.kl_in, ["loss", "reward"])
    one_of("algo.correction", algo.correction, ["none", "truncated", "masked"])
    for name in ("clip_low", "gamma", "gae_lambda"):
        value = getattr(algo, name)
        require(0 <= value <= 1, f"algo.{name}={value}: must be from 0 to 1")
    for name in ("clip_high", "kl_coef", "entropy_coef", "correction_low", "dynamic_sampling"):
        value = getattr(algo, name)
        require(value >= 0, f"algo.{name}={value}: must be 0 or greater")
    for name in ("critic_lr", "critic_clip"):
        value = getattr(algo, name)
        require(value > 0, f"algo.{name}={value}: must be greater than 0")
    require(
        algo.correction_low < algo.correction_high,
        f"algo.correction_low={algo.correction_low}: must be less than algo.correction_high={algo.correction_high}",
    )
    require(
        algo.kl_in == "loss" or algo.kl_coef > 0,
        "algo.kl_in=reward: algo.kl_coef=0 leaves no KL; set algo.kl_coef above 0, or algo.kl_in=loss",
    )
    require(
        algo.advantage not in GROUPED or config.train.rollouts_per_prompt > 1,
        f"algo.advantage={algo.advantage}: compares the rollouts of a task; set train.rollouts_per_prompt to 2 or more",
    )
    require(
        algo.advantage in GROUPED or algo.dynamic_sampling == 0,
        f"algo.dynamic_sampling={algo.dynamic_sampling}: with algo.advantage={algo.advantage} groups of equal rewards "
        f"teach as well; set it to 0",
    )
    require(
        algo.loss != "gspo" or config.parallel.cp == 1,
        f"algo.loss=gspo: needs whole sequences on a rank, and parallel.cp={config.parallel.cp} cuts them; set "
        "parallel.cp=1, or algo.loss=ppo",
    )
    require(
        algo.advantage != "gae" or reward_to_go_gamma(config.reward.turn_credit) is None,
        f"reward.turn_credit={config.reward.turn_credit}: algo.advantage=gae makes the returns itself, from algo.gamma "
        f"and the critic; set it to equal or last",
    )


def _positive(config: Config) -> list[tuple[str, float]]:
    names = {
        "launch": ["nproc_per_node", "nodes", "timeout"],
        "parallel": ["tp", "pp", "vpp", "cp", "ep"],
        "optim": ["lr", "clip_grad"],
        "algo": ["mini_batches"],
        "train": [
            "steps",
            "prompts_per_step",
            "rollouts_per_prompt",
            "tokens_per_micro_batch",
            "checkpoint_every",
            "keep_checkpoints",
        ],
        "rollout": ["max_user_turns", "max_assistant_turns", "deadline", "workers", "context_length"],
        "rollout.turn": ["max_new_tokens", "temperature", "top_p"],
        "rollout.future": ["max_new_tokens", "temperature", "top_p"],
        "rollout.server": ["tp", "ep", "replicas"],
        "user": ["attempts", "max_tokens", "timeout", "deadline"],
        "reward": ["workers", "concurrency", "timeout"],
        "reward.judge": ["attempts", "max_tokens", "timeout", "deadline"],
        "llm": ["max_concurrent"],
    }
    return [(f"{group}.{name}", attrgetter(f"{group}.{name}")(config)) for group in names for name in names[group]]


def _check_device(config: Config) -> None:
    try:
        device.check_device(config.launch.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_interface(config: Config) -> None:
    try:
        network.address(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_model(config: Config, described: Path | None = None) -> ModelShape:
    """The model against the layout, from config.json in its folder or from the file `described`; its shape."""
    folder = Path(config.model.path)
    file = described or folder / "config.json"
    hint = "; experiment=booking_sft makes the one that booking starts from" if config.data.world == "booking" else ""
    require(file.is_file(), f"model.path={folder}: no config.json there; give the folder of a Hugging Face model{hint}")
    try:
        shape = hf_config.read(file)
    except ValueError as error:
        raise ConfigError(f"model.path={folder}: {error}; give another model") from error
    validate_layout.check_shape(config, shape)
    if config.train.stage == "rl":
        validate_servers.check_shape(config, shape)
    return shape


def _check_files(config: Config) -> None:
    files = {"data.train": config.data.train, "data.eval": config.data.eval} if config.data.world is None else {}
    if config.train.stage == "rl":
        files["user.personas"] = config.user.personas
    for setting, value in files.items():
        require(value is None or Path(value).is_file(), f"{setting}={value}: no such file")
