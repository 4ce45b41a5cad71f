"""What cannot run, refused before any process is started: ConfigError with one line that names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from megatron_collab import patches
from megatron_collab.algo.advantages import GROUPED
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.config import (
    Config,
    ConfigError,
    RewardConfig,
    check_declared,
    compose,
    make,
    make_absolute,
    require,
    uses_wandb,
)
from megatron_collab.launch import validate_layout, validate_servers
from megatron_collab.models import hf_config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.reward import metrics
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.rollout import tools
from megatron_collab.runtime import device, network, redact


def load(overrides: Sequence[str]) -> Config:
    """The settings of a run on this machine, composed and validated; raises ConfigError."""
    config = make_absolute(compose(overrides))
    validate(config)
    return config


def validate(config: Config) -> None:
    """Cross-checks that need no process and no model in memory."""
    check_settings(config)
    _check_machine(config)


def check_settings(config: Config) -> None:
    """Those of `validate` that would fail on any machine."""
    redact.refuse_keys(asdict(config))
    check_declared(config)
    nodes = config.launch.nodes
    require(
        nodes == 1 or config.launch.interface is not None,
        f"launch.nodes={nodes}: needs launch.interface, the network interface that the nodes talk over, as ib0",
    )
    _check_options(config)
    _check_batch(config)
    validate_layout.validate_layout(config)
    _check_stage(config)


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
        validate_servers.validate_servers(config)
        _check_algo(config)
        _check_budget(config)


def _check_options(config: Config) -> None:
    """Only what is given as package.module:Class has options."""
    reward, algo, data = config.reward, config.algo, config.data
    for setting, value, options in (
        ("reward.mode", reward.mode, reward.mode_options),
        ("algo.loss", algo.loss, algo.loss_options),
        ("data.world", data.world, data.world_options),
        ("data.format", data.format, data.format_options),
    ):
        require(not options or ":" in str(value), f"{setting}_options: {setting}={value} has no options; remove them")
    require(
        data.format == "auto" or config.train.stage == "rl",
        f"data.format={data.format}: readers give tasks, and train.stage=sft reads conversations; set it to auto",
    )


def _check_reward(reward: RewardConfig) -> None:
    weights = reward.weights
    require(any(weights.values()), "reward.weights: no metric has a weight; give one, as in reward.weights.accuracy=1")
    for setting, names in (("reward.metrics", reward.metrics), ("reward.clamp", reward.clamp)):
        for name in names:
            require(name in weights, f"{setting}.{name}: not in reward.weights; add reward.weights.{name}=WEIGHT")
    for name in weights:
        metric, settings = metrics.split(name, reward.metrics.get(name, {}))
        reason = metric.unavailable(settings)
        require(reason is None, f"reward.weights.{name}: {reason}")
        needs_judge = metric.judged(settings) and not (reward.judge.model or getattr(settings, "model", None))
        require(
            not needs_judge, f"reward.weights.{name}: needs a judge; set reward.judge.model to a model of LiteLLM's"
        )
    require(
        not reward.clamp or reward.mode in ("mr", "single_turn"),
        f"reward.clamp: reward.mode={reward.mode} does not clamp; remove one of them",
    )
    reward_function(reward)


def _check_budget(config: Config) -> None:
    """A budget holds only where the prices are known; the run's own model and scripted users cost nothing."""
    if config.llm.budget_usd is None:
        return
    patches.apply("litellm")
    from megatron_collab.llm.client import priced  # LiteLLM takes seconds to import

    for setting, model in (("user.model", config.user.model), ("reward.judge.model", config.reward.judge.model)):
        require(
            model is None or model == "policy" or priced(model),
            f"llm.budget_usd={config.llm.budget_usd:g}: LiteLLM knows no price of {setting}={model}, so the budget "
            f"cannot be held; choose a model with a price, or set llm.budget_usd=null",
        )


def _check_rollout(config: Config) -> None:
    rollout, reward = config.rollout, config.reward
    if rollout.train_turns == "all":
        require(
            rollout.futures > 1, "rollout.train_turns=all: compares sibling futures; set rollout.futures to 2 or more"
        )
        require(
            rollout.turn.temperature == rollout.future.temperature,
            f"rollout.future.temperature={rollout.future.temperature}: rollout.train_turns=all trains these turns too; "
            f"set it to rollout.turn.temperature={rollout.turn.temperature}",
        )
    if rollout.futures == 0:
        require(
            not reward.weights.get("turn_rewards"),
            "reward.weights.turn_rewards: with rollout.futures=0 these rewards are credited to their turns already; "
            "set it to 0",
        )
    tools.make_tools(rollout)
    for setting, sampling in (("rollout.turn", rollout.turn), ("rollout.future", rollout.future)):
        require(sampling.top_k != 0, f"{setting}.top_k=0: samples from no token; set -1 for all, or 1 or more")
        require(
            sampling.max_new_tokens < rollout.context_length,
            f"{setting}.max_new_tokens={sampling.max_new_tokens}: leaves no room for a prompt in "
            f"rollout.context_length={rollout.context_length}; lower it, or raise rollout.context_length",
        )


def _check_algo(config: Config) -> None:
    algo = config.algo
    whole = algo.loss == "gspo"
    if ":" in algo.loss:
        loss = make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")
        whole = getattr(loss, "whole_sequences", False)
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
        not whole or config.parallel.cp == 1,
        f"algo.loss={algo.loss}: needs whole sequences on a rank, and parallel.cp={config.parallel.cp} cuts them; set "
        "parallel.cp=1, or algo.loss=ppo",
    )
    require(
        algo.advantage != "gae" or config.reward.turn_credit != "reward_to_go",
        f"reward.turn_credit={config.reward.turn_credit}: algo.advantage=gae makes the returns itself, from algo.gamma "
        f"and the critic; set it to equal or last",
    )


def _check_batch(config: Config) -> None:
    """Every optimizer step needs a sample."""
    train, algo = config.train, config.algo
    samples = train.prompts_per_step
    if train.stage == "rl":
        futures = config.rollout.futures if config.rollout.train_turns == "all" else 0
        samples *= train.rollouts_per_prompt * (1 + futures)
    require(
        algo.mini_batches <= samples,
        f"algo.mini_batches={algo.mini_batches}: a step has at most {samples} samples; choose at most as many",
    )


def _check_device(config: Config) -> None:
    try:
        device.select(config.launch.device)
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
