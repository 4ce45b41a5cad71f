"""Every option: one owner, one default, one line of help. Hydra composes, `check` refuses what cannot run.

The dataclasses are the schema; `conf/` holds only what differs from them. `load` raises `ConfigError` with
one line that names the setting and the way out, before any process is started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_collab import device
from megatron_collab.reward import metrics
from megatron_collab.rollout import tools

WORLDS = ("booking", "gsm8k")  # modules of data/worlds
MODES = ("mr", "single_turn", "paper", "collabllm", "verl")
CONF = Path(__file__).resolve().parent.parent / "conf"


# A value as adaptive(2,6), which Hydra would take for a function of its own unless it is quoted.
_CALL = re.compile(r"^([\w.]+=)(\w+\([\d., ]*\))$")


class ConfigError(ValueError):
    """A setting that cannot work; the message is one line that names it and the way out."""


def option(default: Any, text: str) -> Any:
    """A field with its one line of help."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class RunConfig:
    dir: str = option(MISSING, "folder of the run: metrics, transcripts, checkpoints, report")
    seed: int = option(0, "seed of data order, sampling and initialisation")
    wandb_project: str | None = option("megatron-collab", "Weights & Biases project, used where WANDB_API_KEY is set")


@dataclass
class LaunchConfig:
    nproc_per_node: int = option(1, "trainer ranks on this node, started under torchrun")
    device: str = option("auto", "auto, cpu or cuda")
    timeout: float = option(600.0, "seconds any collective may take before the run ends")


@dataclass
class ModelConfig:
    path: str = option(MISSING, "Hugging Face folder of the policy: config, tokenizer, safetensors")
    dtype: str = option("bfloat16", "bfloat16 or float32: parameters of trainer and server")
    fp8: str | None = option(None, "TransformerEngine FP8 format: hybrid or e4m3")


@dataclass
class ParallelConfig:
    tp: int = option(1, "tensor parallel size of the trainer")
    pp: int = option(1, "pipeline parallel size of the trainer; data parallel is what remains of the ranks")
    sequence_parallel: bool = option(False, "split norms and dropout over the tensor parallel ranks; needs tp > 1")


@dataclass
class OptimConfig:
    lr: float = option(1e-6, "peak learning rate of AdamW")
    schedule: str = option("constant", "constant or linear (to zero at train.steps), after the warm-up")
    warmup_steps: int = option(0, "steps of linear warm-up")
    beta1: float = option(0.9, "AdamW beta1")
    beta2: float = option(0.95, "AdamW beta2")
    weight_decay: float = option(0.0, "AdamW weight decay")
    clip_grad: float = option(1.0, "largest global gradient norm")


@dataclass
class AlgoConfig:
    clip_low: float = option(0.2, "PPO clip of the importance ratio below 1")
    clip_high: float = option(0.2, "PPO clip of the importance ratio above 1")
    kl_coef: float = option(1e-3, "weight of the k3 KL to the frozen first policy; 0: no reference model is kept")
    mini_batches: int = option(1, "optimizer steps per batch of rollouts")


@dataclass
class TrainConfig:
    stage: str = option("rl", "rl (multiturn-aware reward) or sft (supervised)")
    steps: int = option(100, "steps of the run")
    prompts_per_step: int = option(16, "tasks a step (rl) or conversations a step (sft)")
    rollouts_per_prompt: int = option(8, "trained turns sampled for each task: the group of GRPO")
    tokens_per_micro_batch: int = option(8192, "padded tokens a rank takes through the model at once")
    checkpoint_every: int = option(50, "steps between checkpoints; the last step always saves one")
    keep_checkpoints: int = option(2, "how many checkpoints stay on disk")
    eval_tasks: int = option(256, "tasks played before and after training; 0: none")


@dataclass
class ServerConfig:
    tp: int = option(1, "tensor parallel size of an SGLang server")
    replicas: int = option(1, "SGLang servers; the conversations of a prompt stay on one of them")
    port: int = option(0, "port of the first SGLang server, the others follow; 0: free ones")
    max_running_requests: int = option(256, "requests a server decodes at once")
    max_total_tokens: int | None = option(None, "tokens in a server's KV cache; none: SGLang decides")
    start_timeout: float = option(600.0, "seconds until the servers must be healthy")


@dataclass
class SamplingConfig:
    max_new_tokens: int = option(2048, "token budget of one turn")
    temperature: float = option(1.0, "sampling temperature, in training and evaluation")
    top_p: float = option(1.0, "probability mass that is sampled from; below 1 samples are off-policy")
    top_k: int = option(-1, "tokens that are sampled from; -1: all")


@dataclass
class RolloutConfig:
    futures: int | str = option(
        3,
        "conversations played on from each trained turn; adaptive(min,max): more where the reward is uncertain; "
        "0: one conversation a rollout, all its turns trained",
    )
    max_user_turns: int = option(2, "user turns after the trained turn; a message already in the task does not count")
    max_assistant_turns: int = option(3, "turns of the policy, the trained one included; tool calls do not count")
    train_turns: str = option("first", "first (the trained turn alone) or all (the later turns of its futures too)")
    turn: SamplingConfig = field(default_factory=SamplingConfig)
    future: SamplingConfig = field(default_factory=SamplingConfig)
    context_length: int = option(8196, "longest token stream of a conversation, reply included")
    deadline: float = option(900.0, "seconds one future may take; then it ends without a score")
    tools: list[str] = option([], "tools of the policy: modules of rollout/tools")
    tool_parser: str = option("qwen25", "SGLang's parser of the policy's tool calls: qwen25, llama3, mistral, …")
    max_tool_calls: int = option(
        8, "rounds of tool calls within one turn of the policy; what it says then is its reply"
    )
    workers: int = option(1, "Ray ConversationWorkers")
    turn_timeout: float = option(300.0, "seconds one request to the server may take")
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class EndpointConfig:
    """A language model behind LiteLLM."""

    model: str | None = option(None, "LiteLLM model")
    api_base: str | None = option(None, "endpoint of the model; its key comes from the environment")
    temperature: float = option(0.0, "sampling temperature")
    max_tokens: int = option(2048, "token budget of an answer")
    attempts: int = option(6, "tries until an answer counts as not to be had")
    timeout: float = option(60.0, "seconds one try may take")
    deadline: float = option(300.0, "seconds all tries together may take")


@dataclass
class UserConfig(EndpointConfig):
    name: str | None = option(None, "user of every task, instead of the one that the task names")
    model: str | None = option(None, "LiteLLM model of the users named llm; policy: the model that is trained")
    temperature: float = option(1.0, "sampling temperature of the user")
    max_tokens: int = option(512, "token budget of a user message")
    attempts: int = option(3, "tries before the future ends with an error")
    stop: str = option("[[TERMINATE CHAT]]", "text in the user's message that ends the conversation")
    personas: str | None = option(None, "text file, a persona a line; each llm user gets one drawn by the task")


@dataclass
class RewardConfig:
    mode: str = option(
        "mr",
        "mr (mean over the scored futures), single_turn (the trained turn alone), or a published formula: "
        "paper, collabllm, verl",
    )
    weights: dict[str, float] = option({}, "weight of each metric in the reward; 0: scored and shown only")
    metrics: dict[str, dict[str, Any]] = option({}, "settings of a metric by its name, as metrics.accuracy.judge=true")
    clamp: dict[str, float] = option({}, "largest absolute weighted part of a metric in the modes mr and single_turn")
    malformed: float | None = option(
        -1.0,
        "reward of a malformed trained turn (empty, broken <think>, cut by its budget), which has no futures; "
        "none: it is played on like any other",
    )
    turn_credit: str = option(
        "equal",
        "with futures=0, what a turn is rewarded for: last (the whole, on the last turn only), equal (the whole) or "
        "reward_to_go(gamma) (what follows it, discounted by turn)",
    )
    judge: EndpointConfig = field(default_factory=EndpointConfig)
    workers: int = option(1, "Ray RewardWorkers")
    concurrency: int = option(256, "scores of one metric that a RewardWorker makes at once")
    timeout: float = option(120.0, "seconds one score may take; judged ones have reward.judge.deadline instead")
    max_missing: float = option(0.2, "share of scores that may be missing in a step before the run stops")


@dataclass
class LlmConfig:
    """All calls of users and judges together, over all nodes."""

    requests_per_minute: int | None = option(None, "requests a minute; none: no limit")
    tokens_per_minute: int | None = option(None, "tokens a minute, prompts and answers; none: no limit")
    max_concurrent: int = option(256, "calls in flight at once")
    budget_usd: float | None = option(None, "what the run may spend in USD before it stops; none: no limit")
    cache: str | None = option(None, "folder of the judges' answers; none: llm_cache in run.dir")


@dataclass
class DataConfig:
    world: str | None = option(None, "shipped world that makes model and data on the spot: booking or gsm8k")
    dir: str | None = option(None, "folder where the world is made")
    path: str | None = option(None, "source data of the world, where it has one (gsm8k: folder with train.jsonl)")
    train: str = option(MISSING, "training tasks or conversations: JSONL or Parquet")
    eval: str | None = option(None, "tasks for evaluation: JSONL or Parquet")


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    user: UserConfig = field(default_factory=UserConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    llm: LlmConfig = field(default_factory=LlmConfig)
    data: DataConfig = field(default_factory=DataConfig)


def _schema() -> DictConfig:
    schema = OmegaConf.structured(Config)
    for node in (schema.reward.weights, schema.reward.metrics, schema.reward.clamp):
        OmegaConf.set_struct(node, False)  # its keys are metrics, which anybody may add
    return schema


ConfigStore.instance().store(name="schema", node=_schema())


def load(overrides: Sequence[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, refuse what cannot run.

    Raises ConfigError for an unknown option, a value of the wrong type, or a combination that cannot work.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            node = compose("config", overrides=[_CALL.sub(r'\1"\2"', override) for override in overrides])
        OmegaConf.resolve(node)
        missing = sorted(OmegaConf.missing_keys(node))
        config = None if missing else OmegaConf.to_object(node)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{reason} (all options: python -m megatron_collab.train --help)") from error
    if missing:
        raise ConfigError(f"{missing[0]}: not set; give {missing[0]}=VALUE or an experiment=NAME that sets it")
    assert isinstance(config, Config)
    check(config)
    return config


def future_range(futures: int | str) -> tuple[int, int]:
    """The fewest and the most futures of a trained turn; ValueError for what is neither a number nor adaptive(…)."""
    adaptive = re.fullmatch(r"adaptive\((\d+), *(\d+)\)", str(futures))
    if adaptive:
        low, high = int(adaptive[1]), int(adaptive[2])
        if not 2 <= low < high:
            raise ValueError("adaptive(min,max) needs 2 <= min < max: one future says nothing about its spread")
        return low, high
    if not re.fullmatch(r"\d+", str(futures)):
        raise ValueError("give a number, or adaptive(min,max) as in adaptive(2,6)")
    return int(futures), int(futures)


def reward_to_go_gamma(turn_credit: str) -> float | None:
    """The discount of reward_to_go(gamma), None for the other credits; ValueError for what is none of them."""
    if turn_credit in ("last", "equal"):
        return None
    found = re.fullmatch(r"reward_to_go\((\d*\.?\d+)\)", turn_credit)
    if not found or not 0 <= float(found[1]) <= 1:
        raise ValueError("choose last, equal or reward_to_go(gamma) with gamma from 0 to 1, as in reward_to_go(0.9)")
    return float(found[1])


def describe(config: Any = Config, prefix: str = "") -> list[str]:
    """One line an option: name, default, help."""
    lines: list[str] = []
    for spec in fields(config):
        default = spec.default_factory() if callable(spec.default_factory) else spec.default
        if is_dataclass(default):
            lines += describe(type(default), f"{prefix}{spec.name}.")
        else:
            shown = "required" if default == MISSING else default
            lines.append(f"  {prefix + spec.name:34} {spec.metadata['help']} [{shown}]")
    return lines


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _one_of(setting: str, value: Any, choices: Sequence[Any]) -> None:
    allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)
    _require(value in choices, f"{setting}={value}: choose one of {allowed}")


def check(config: Config) -> None:
    """Cross-checks that need no process and no model in memory."""
    _one_of("train.stage", config.train.stage, ["rl", "sft"])
    _one_of("launch.device", config.launch.device, device.SETTINGS)
    _one_of("model.dtype", config.model.dtype, ["bfloat16", "float32"])
    _one_of("model.fp8", config.model.fp8, [None, "hybrid", "e4m3"])
    _one_of("optim.schedule", config.optim.schedule, ["constant", "linear"])
    _one_of("reward.mode", config.reward.mode, MODES)
    _one_of("rollout.train_turns", config.rollout.train_turns, ["first", "all"])
    _one_of("data.world", config.data.world, [None, *WORLDS])
    for setting, value in _positive(config):
        _require(value > 0, f"{setting}={value}: must be greater than 0")
    _check_device(config)
    _check_layout(config)
    _check_files(config)
    if config.train.stage == "rl":
        _check_reward(config.reward)
        _check_rollout(config)
        _check_budget(config)
    _require(
        not uses_wandb(config.run) or find_spec("wandb") is not None,
        f"run.wandb_project={config.run.wandb_project}: WANDB_API_KEY is set, but wandb is not installed; "
        f"pip install wandb, or set run.wandb_project=null",
    )


def uses_wandb(run: RunConfig) -> bool:
    """Whether the run reports to Weights & Biases."""
    return run.wandb_project is not None and bool(os.environ.get("WANDB_API_KEY"))


def _check_reward(reward: RewardConfig) -> None:
    weights = reward.weights
    _require(any(weights.values()), "reward.weights: no metric has a weight; give one, as in reward.weights.accuracy=1")
    for setting, names in (("reward.metrics", reward.metrics), ("reward.clamp", reward.clamp)):
        for name in names:
            _require(name in weights, f"{setting}.{name}: not in reward.weights; add reward.weights.{name}=WEIGHT")
    for name in weights:
        try:
            metric, settings = metrics.split(name, reward.metrics.get(name, {}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        reason = metric.unavailable(settings)
        _require(reason is None, f"reward.weights.{name}: {reason}")
        needs_judge = metric.judged(settings) and not (reward.judge.model or getattr(settings, "model", None))
        _require(
            not needs_judge, f"reward.weights.{name}: needs a judge; set reward.judge.model to a model of LiteLLM's"
        )
    _require(
        not reward.clamp or reward.mode in ("mr", "single_turn"),
        f"reward.clamp: reward.mode={reward.mode} is a published formula; remove one of them",
    )


def _check_budget(config: Config) -> None:
    """A budget holds only where the prices are known; the run's own model and scripted users cost nothing."""
    if config.llm.budget_usd is None:
        return
    from megatron_collab.llm.client import priced

    for setting, model in (("user.model", config.user.model), ("reward.judge.model", config.reward.judge.model)):
        _require(
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
        _require(futures > 1, "rollout.train_turns=all: compares sibling futures; set rollout.futures to 2 or more")
        _require(
            rollout.turn.temperature == rollout.future.temperature,
            f"rollout.future.temperature={rollout.future.temperature}: rollout.train_turns=all trains these turns too; "
            f"set it to rollout.turn.temperature={rollout.turn.temperature}",
        )
    if futures == 0:
        _require(
            not reward.weights.get("turn_rewards"),
            "reward.weights.turn_rewards: with rollout.futures=0 these rewards are credited to their turns already; "
            "set it to 0",
        )
    for name in rollout.tools:
        _require(name in tools.known(), f"rollout.tools={name}: no such tool; known are {', '.join(tools.known())}")
    if config.user.personas is not None:
        _require(Path(config.user.personas).is_file(), f"user.personas={config.user.personas}: no such file")


def _positive(config: Config) -> list[tuple[str, float]]:
    names = {
        "launch": ["nproc_per_node", "timeout"],
        "parallel": ["tp", "pp"],
        "optim": ["lr", "clip_grad"],
        "algo": ["mini_batches"],
        "train": ["steps", "prompts_per_step", "rollouts_per_prompt", "tokens_per_micro_batch", "checkpoint_every"],
        "rollout": ["max_user_turns", "max_assistant_turns", "deadline", "workers", "context_length"],
        "rollout.turn": ["max_new_tokens", "temperature", "top_p"],
        "rollout.future": ["max_new_tokens", "temperature", "top_p"],
        "rollout.server": ["tp", "replicas"],
        "user": ["attempts", "max_tokens", "timeout", "deadline"],
        "reward": ["workers", "concurrency", "timeout"],
        "reward.judge": ["attempts", "max_tokens", "timeout", "deadline"],
        "llm": ["max_concurrent"],
    }
    return [(f"{group}.{name}", attrgetter(f"{group}.{name}")(config)) for group in names for name in names[group]]


def _check_device(config: Config) -> None:
    try:
        device.check(config.launch.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.model.fp8:
        found, detail = device.probe("transformer_engine").found, device.probe("transformer_engine").detail
        _require(found, f"model.fp8={config.model.fp8}: needs TransformerEngine ({detail}); set model.fp8=null")


def _check_layout(config: Config) -> None:
    tp, pp, ranks = config.parallel.tp, config.parallel.pp, config.launch.nproc_per_node
    _require(
        ranks % (tp * pp) == 0,
        f"parallel.tp={tp} x parallel.pp={pp} does not divide launch.nproc_per_node={ranks}; "
        f"set launch.nproc_per_node to a multiple of {tp * pp}",
    )
    _require(
        not config.parallel.sequence_parallel or tp > 1,
        "parallel.sequence_parallel=true: needs parallel.tp > 1; set parallel.sequence_parallel=false",
    )
    if config.data.world is None or Path(config.model.path).exists():
        check_model(config)


def check_model(config: Config) -> None:
    """The model folder against the layout; reads config.json only."""
    from megatron_collab.publish import hf_map

    folder, tp, pp = Path(config.model.path), config.parallel.tp, config.parallel.pp
    file = folder / "config.json"
    hint = "; experiment=booking_sft makes the one that booking starts from" if config.data.world == "booking" else ""
    _require(
        file.is_file(), f"model.path={folder}: no config.json there; give the folder of a Hugging Face model{hint}"
    )
    hf = json.loads(file.read_text())
    family = hf.get("model_type")
    _require(
        family in hf_map.FAMILIES,
        f"model.path={folder}: unknown model family {family!r}; known are {', '.join(sorted(hf_map.FAMILIES))}",
    )
    try:
        shape = hf_map.ModelShape.from_hf(hf)
    except ValueError as error:
        raise ConfigError(f"model.path={folder}: {error}; give another model") from error
    heads, layers = shape.heads, shape.layers
    sizes = {"attention heads": heads, "key/value heads": shape.kv_heads, "feed-forward width": shape.ffn}
    for what, count in sizes.items():
        _require(count % tp == 0, f"parallel.tp={tp}: does not divide the model's {count} {what}; choose a divisor")
    _require(pp <= layers, f"parallel.pp={pp}: the model has only {layers} layers; choose at most {layers}")
    server = config.rollout.server.tp
    _require(heads % server == 0, f"rollout.server.tp={server}: does not divide the model's {heads} attention heads")


def _check_files(config: Config) -> None:
    if config.data.world is not None:
        return
    for setting, value in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        _require(value is None or Path(value).is_file(), f"{setting}={value}: no such file")
