"""What cannot run, refused before any process is started: ConfigError with one line that names the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from megatron_collab import patches
from megatron_collab.algo.advantages import GROUPED
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.config import Config, ConfigError, check_declared, compose, require, uses_wandb
from megatron_collab.config.extension import make, make_absolute
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
    try:
        device.select(config.launch.device)
        network.address(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    validate_layout.check_machine(config)
    validate_servers.check_machine(config)
    made = config.data.world is not None
    if not made or Path(config.model.path).exists():
        check_model(config)
    files = {} if made else {"data.train": config.data.train, "data.eval": config.data.eval}
    if config.train.stage == "rl":
        files["user.personas"] = config.user.personas
    for setting, file in files.items():
        require(file is None or Path(file).is_file(), f"{setting}={file}: no such file")
    message = "<run.wandb_project>: WANDB_API_KEY is set; install wandb, or set run.wandb_project=null"
    require(not uses_wandb(config.run) or find_spec("wandb") is not None, message, config)


def check_settings(config: Config) -> None:
    """Those of `validate` that would fail on any machine."""
    check = partial(require, config=config)
    redact.refuse_keys(asdict(config))
    check_declared(config)
    message = "<launch.nodes>: needs launch.interface, the network interface that the nodes talk over, as ib0"
    check(config.launch.nodes == 1 or config.launch.interface is not None, message)
    for setting in ("reward.mode", "algo.loss", "data.world", "data.format"):
        options = attrgetter(f"{setting}_options")(config)
        message = f"{setting}_options: <{setting}> has no options; remove them"
        check(not options or ":" in str(attrgetter(setting)(config)), message)
    message = "<data.format>: readers give tasks, and <train.stage> reads conversations; set it to auto"
    check(config.data.format == "auto" or config.train.stage == "rl", message)
    train, rollout = config.train, config.rollout
    samples = train.prompts_per_step  # of which every optimizer step needs one
    if train.stage == "rl":
        samples *= train.rollouts_per_prompt * (1 + (rollout.futures if rollout.train_turns == "all" else 0))
    message = f"<algo.mini_batches>: a step has at most {samples} samples; choose at most as many"
    check(config.algo.mini_batches <= samples, message)
    validate_layout.validate_layout(config)
    if train.stage == "rl":
        _check_reward(config)
        _check_rollout(config)
        validate_servers.validate_servers(config)
        _check_algo(config)
        _check_budget(config)


def _check_reward(config: Config) -> None:
    check = partial(require, config=config)
    reward, weights = config.reward, config.reward.weights
    require(any(weights.values()), "reward.weights: no metric has a weight; give one, as in reward.weights.accuracy=1")
    for setting, names in (("reward.metrics", reward.metrics), ("reward.clamp", reward.clamp)):
        for name in names:
            require(name in weights, f"{setting}.{name}: not in reward.weights; add reward.weights.{name}=WEIGHT")
    for name in weights:
        metric, settings = metrics.split(name, reward.metrics.get(name, {}))
        reason = metric.unavailable(settings)
        require(reason is None, f"reward.weights.{name}: {reason}")
        judged = reward.judge.model or getattr(settings, "model", None) or not metric.judged(settings)
        check(bool(judged), f"reward.weights.{name}: needs a judge; set reward.judge.model to a model of LiteLLM's")
    clamps = reward.mode in ("mr", "single_turn")
    check(not reward.clamp or clamps, "reward.clamp: <reward.mode> does not clamp; remove one of them")
    reward_function(reward)


def _check_budget(config: Config) -> None:
    """A budget holds only where the prices are known; the run's own model and scripted users cost nothing."""
    if config.llm.budget_usd is None:
        return
    patches.apply("litellm")
    from megatron_collab.llm.client import priced  # LiteLLM takes seconds to import

    for setting, model in (("user.model", config.user.model), ("reward.judge.model", config.reward.judge.model)):
        message = f"LiteLLM has no pricing for {setting}={model}; choose another model, or set llm.budget_usd=null"
        require(model in (None, "policy") or priced(model), f"llm.budget_usd={config.llm.budget_usd:g}: {message}")


def _check_rollout(config: Config) -> None:
    check = partial(require, config=config)
    rollout = config.rollout
    if rollout.train_turns == "all":
        check(rollout.futures > 1, "<rollout.train_turns>: compares sibling futures; set rollout.futures to 2 or more")
        message = "<rollout.train_turns> trains these turns too; set it to <rollout.turn.temperature>"
        same = rollout.turn.temperature == rollout.future.temperature
        check(same, f"<rollout.future.temperature>: {message}")
    message = "with rollout.futures=0 these rewards are credited to their turns already; set it to 0"
    credited_once = rollout.futures > 0 or not config.reward.weights.get("turn_rewards")
    check(credited_once, f"reward.weights.turn_rewards: {message}")
    tools.make_tools(rollout)
    for setting, sampling in (("rollout.turn", rollout.turn), ("rollout.future", rollout.future)):
        require(sampling.top_k != 0, f"{setting}.top_k=0: samples from no token; set -1 for all, or 1 or more")
        message = f"<{setting}.max_new_tokens>: leaves no room for a prompt in <rollout.context_length>; lower it"
        check(sampling.max_new_tokens < rollout.context_length, message)


def _check_algo(config: Config) -> None:
    check = partial(require, config=config)
    algo, grouped = config.algo, config.algo.advantage in GROUPED
    whole = algo.loss == "gspo"
    if ":" in algo.loss:
        loss = make(algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options.")
        whole = getattr(loss, "whole_sequences", False)
    check(algo.correction_low < algo.correction_high, "<algo.correction_low>: must be less than <algo.correction_high>")
    message = "<algo.kl_in>: algo.kl_coef=0 leaves no KL; set algo.kl_coef above 0, or algo.kl_in=loss"
    check(algo.kl_in == "loss" or algo.kl_coef > 0, message)
    message = "<algo.advantage>: compares the rollouts of a task; set train.rollouts_per_prompt to 2 or more"
    check(not grouped or config.train.rollouts_per_prompt > 1, message)
    message = "<algo.dynamic_sampling>: with <algo.advantage> groups of equal rewards teach as well; set it to 0"
    check(grouped or algo.dynamic_sampling == 0, message)
    message = "<algo.loss>: needs whole sequences on a rank, and <parallel.cp> cuts them; set parallel.cp=1"
    check(not whole or config.parallel.cp == 1, message)
    message = "<reward.turn_credit>: <algo.advantage> makes returns itself, from algo.gamma; set it to equal or last"
    check(algo.advantage != "gae" or config.reward.turn_credit != "reward_to_go", message)


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
