"""Every option: one owner, one default, one line of help. Hydra composes, launch/validate.py refuses what cannot run.

The dataclasses are the schema; `conf/` holds only what differs from them. `load` raises `ConfigError` with
one line that names the setting and the way out, before any process is started.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

WORLDS = ("booking", "gsm8k")  # modules of data/worlds
MODES = ("mr", "single_turn", "paper", "collabllm", "verl")
_PACKAGE = Path(__file__).resolve().parents[1]
# In an installed package, or at the top of a checkout.
CONF = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())


# A value as adaptive(2,6), which Hydra would take for a function of its own unless it is quoted.
_CALL = re.compile(r"^([\w.]+=)(\w+\([\d., ]*\))$")

# What Hydra recommends and is refused here: to add an option with a +, to sweep over values.
_REFUSED = re.compile(r" (To append to your \w+|3\. To sweep) .*")


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
    nodes: int = option(1, "nodes of the run; on more than one, torchrun is started on each of them")
    interface: str | None = option(
        None, "network interface that the nodes talk over, as ib0; needed on more than one node, else loopback"
    )
    device: str = option("auto", "auto, cpu or cuda")
    timeout: float = option(600.0, "seconds in which something must move on some rank, or the run ends with all stacks")


@dataclass
class ModelConfig:
    path: str = option(MISSING, "Hugging Face folder of the policy: config, tokenizer, safetensors")
    dtype: str = option("bfloat16", "bfloat16 or float32: parameters of trainer and server")
    fp8: str | None = option(None, "TransformerEngine FP8 format: hybrid or e4m3")
    fp8_recipe: str = option("delayed", "how FP8 is scaled: delayed, tensorwise, blockwise or mxfp8")
    fp8_params: bool = option(False, "keep the trained parameters in FP8 between steps, with float32 masters")
    fp8_skip_first: int = option(0, "first layers that stay in bfloat16")
    fp8_skip_last: int = option(0, "last layers that stay in bfloat16")


@dataclass
class ParallelConfig:
    tp: int = option(1, "tensor parallel size of the trainer")
    pp: int = option(1, "pipeline parallel size of the trainer; data parallel is what remains of the ranks")
    vpp: int = option(1, "virtual pipeline stages of a rank (interleaved schedule); needs pp > 1")
    cp: int = option(1, "context parallel size: a sequence is cut over that many ranks; needs TransformerEngine")
    ep: int = option(1, "expert parallel size: ranks that the experts of a layer are spread over")
    sequence_parallel: bool = option(False, "split norms and dropout over the tensor parallel ranks; needs tp > 1")
    recompute: str = option(
        "none", "activations made anew in the backward pass: none, selective (attention) or full (layers)"
    )
    offload: bool = option(
        False, "optimizer and gradients leave the device while rollouts are sampled, which makes room for SGLang"
    )


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
    advantage: str = option(
        "grpo",
        "grpo, dr_grpo, rloo (compared within a group), reinforce++ (within the batch) or gae (a critic's values)",
    )
    loss: str = option("ppo", "ppo (token ratios, clipped), gspo (sequence ratios) or cispo (clipped weights)")
    average: str = option("token", "mean of the loss over all trained tokens, or over sequences: token or sequence")
    clip_low: float = option(0.2, "clip of the importance ratio below 1")
    clip_high: float = option(0.2, "clip of the importance ratio above 1; wider than clip_low is DAPO's clip-higher")
    kl_coef: float = option(1e-3, "weight of the KL to the frozen first policy; 0: no reference model is kept")
    kl: str = option("k3", "estimate of that KL: k1, k2 or k3, which is also called low_var_kl")
    kl_in: str = option("loss", "where the KL enters: loss or reward")
    entropy_coef: float = option(0.0, "weight of the entropy, which is raised")
    correction: str = option(
        "none", "importance correction from the engine's to the trainer's log-probs: none, truncated or masked"
    )
    correction_low: float = option(0.5, "masked: tokens with a smaller weight are left out")
    correction_high: float = option(2.0, "truncated: largest weight; masked: tokens with a larger one are left out")
    mini_batches: int = option(1, "optimizer steps per batch of rollouts")
    dynamic_sampling: int = option(
        0, "times a step samples new tasks for those whose rewards were all equal (DAPO); 0: they stay"
    )
    gamma: float = option(1.0, "gae: discount by trained token")
    gae_lambda: float = option(0.95, "gae: lambda")
    critic_lr: float = option(1e-5, "gae: peak learning rate of the critic, with the warm-up and schedule of optim")
    critic_clip: float = option(0.2, "gae: how far a value may move from the old one before its loss is clipped")


@dataclass
class TrainConfig:
    stage: str = option("rl", "rl (multiturn-aware reward) or sft (supervised)")
    steps: int = option(100, "steps of the run")
    prompts_per_step: int = option(16, "tasks a step (rl) or conversations a step (sft)")
    rollouts_per_prompt: int = option(8, "trained turns sampled for each task: the group of GRPO")
    tokens_per_micro_batch: int = option(
        8192, "tokens a rank takes through the model at once, sequences packed; a longer sequence goes alone"
    )
    checkpoint_every: int = option(50, "steps between checkpoints; the last step always saves one")
    keep_checkpoints: int = option(2, "how many checkpoints stay on disk")
    eval_tasks: int = option(256, "tasks played before and after training; 0: none")


@dataclass
class ServerConfig:
    tp: int = option(1, "tensor parallel size of an SGLang server")
    ep: int = option(1, "expert parallel size of an SGLang server: a divisor of its tp, over which experts are spread")
    fp8: bool = option(False, "servers hold the linear layers in FP8 (blocks of 128 x 128), quantised by the trainer")
    colocated: bool = option(
        True,
        "servers share the trainer's devices and give their memory back while it trains; false: devices of their own",
    )
    replicas: int = option(1, "SGLang servers; the conversations of a prompt stay on one of them")
    port: int = option(0, "port of the first SGLang server, the others follow; 0: free ones")
    max_running_requests: int = option(256, "requests a server decodes at once")
    max_total_tokens: int | None = option(
        None, "tokens in a server's KV cache; none: SGLang decides; needed by colocated servers on GPUs"
    )
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
    context_length: int = option(8192, "longest token stream of a conversation, reply included")
    deadline: float = option(900.0, "seconds one future may take; then it ends without a score")
    tools: list[str] = option([], "tools of the policy: modules of rollout/tools")
    tool_parser: str = option("qwen25", "SGLang's parser of the policy's tool calls: qwen25, llama3, mistral, …")
    max_tool_calls: int = option(
        8, "rounds of tool calls within one turn of the policy; what it says then is its reply"
    )
    workers: int = option(1, "Ray ConversationWorkers")
    max_staleness: int = option(
        0,
        "versions that the weights of a sample may lag behind those it trains; 0: sampling and training take turns, "
        "k: sampling runs up to k steps ahead",
    )
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
class PublishConfig:
    transport: str = option(
        "auto",
        "how weights reach the servers: memory (shared with the trainer's ranks of their node), network (point to "
        "point), disk, or auto: memory on one node and for colocated servers, else network",
    )
    verify: int = option(0, "every that many publishes, servers prove by checksums what they hold; 0: never")


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
    publish: PublishConfig = field(default_factory=PublishConfig)
    data: DataConfig = field(default_factory=DataConfig)


def _schema() -> DictConfig:
    schema = OmegaConf.structured(Config)
    for node in (schema.reward.weights, schema.reward.metrics, schema.reward.clamp):
        OmegaConf.set_struct(node, False)  # its keys are metrics, which anybody may add
    return schema


ConfigStore.instance().store(name="schema", node=_schema())


def load(overrides: Sequence[str]) -> Config:
    """The settings of a run on this machine: as `parse`; ConfigError also for what cannot run here."""
    from megatron_collab.launch import validate  # which imports this module

    config = parse(overrides)
    validate.check(config)
    return config


def parse(overrides: Sequence[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, unchecked.

    Raises ConfigError for an unknown option, a value of the wrong type, or a required one that is not set.
    """
    # Hydra's + and ++ add what the schema does not know, and nothing would read it. What may be added needs neither.
    overrides = [override.lstrip("+") for override in overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            node = compose("config", overrides=[_CALL.sub(r'\1"\2"', override) for override in overrides])
        OmegaConf.resolve(node)
        missing = sorted(OmegaConf.missing_keys(node))
        config = None if missing else OmegaConf.to_object(node)
    except (HydraException, OmegaConfBaseException) as error:
        reason = _unknown(error, overrides)
        if reason is None:
            cause = f": {str(error.__cause__).splitlines()[0]}" if error.__cause__ else ""
            reason = _REFUSED.sub("", " ".join(f"{error}{cause}".split()))
        raise ConfigError(f"{reason} (all options: python -m megatron_collab.train --help)") from error
    if missing:
        raise ConfigError(f"{missing[0]}: not set; give {missing[0]}=VALUE or an experiment=NAME that sets it")
    assert isinstance(config, Config)
    return config


def _unknown(error: Exception, overrides: Sequence[str]) -> str | None:
    """What to say where one of `overrides` sets an option that is not there, and None for any other error.

    Hydra would recommend to add it with a +.
    """
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        missing = str(cause.full_key)  # the first part of a name that is not there, or a key of a value in braces
        for override in overrides:
            name = override.partition("=")[0]
            if f"{name}.".startswith(f"{missing}.") or missing.startswith(f"{name}."):
                name = max(name, missing, key=len)
                options = [line.split()[0] for line in describe()] + ["experiment", "reward"]
                nearest = difflib.get_close_matches(name, options, n=1, cutoff=0)[0]
                return f"{name}: no such option; the nearest is {nearest}"
    return None


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


def uses_wandb(run: RunConfig) -> bool:
    """Whether the run reports to Weights & Biases."""
    return run.wandb_project is not None and bool(os.environ.get("WANDB_API_KEY"))
