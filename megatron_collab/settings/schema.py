"""Every option of the programs: one owner, one default, one line of help, and its allowed values.

The dataclasses are the groups; programs.py says which of them a program has. `Training…` extends a group by what only
training reads; the other groups without options of their own are what users-from-logs reads. `conf/` contains only
values that differ from the defaults. Options that are `mutable` extend a run or do not affect its results, so a resumed
run may change them (config/history.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from megatron_collab.settings.kind import ADDRESS, HEADERS, WANDB_PROJECT, WANDB_TAG, WRITTEN_FOLDER
from megatron_collab.settings.option import MANY, mutable, option, seconds

# fmt: off
TOOL_PARSERS = (  # as SGLang calls them
    "apertus2509", "beam", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "deepseekv41",
    "dots", "gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47", "gpt-oss", "hermes", "hunyuan", "inkling",
    "interns1", "iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3", "mimo", "minicpm5",
    "minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige", "poolside_v1", "pythonic", "qwen", "qwen25",
    "qwen3_coder", "response_template", "spark25", "step3", "step3p5", "trinity",
)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMATS = (  # of rows, as data/formats.py reads them
    "auto", "task", "preference", "messages", "collabllm", "recipe", "humaneval", "bigcodebench", "sharegpt",
    "question_answer", "question_reference", "problem_solution", "problem_answer", "query_response", "alpaca",
    "recipe_sft", "prompt_completion", "prompt", "text",
)
# fmt: on
TRANSPORTS = {  # of weights to the servers; their interface is in weight_sync/transports/base.py
    "memory": "megatron_collab.weight_sync.transports.shared_memory:SharedMemoryTransport",
    "network": "megatron_collab.weight_sync.transports.p2p:NetworkTransport",
    "disk": "megatron_collab.weight_sync.transports.disk:DiskTransport",
}
JSON, CHAT, USER_MODEL = "json", "chat", "user_model"  # forms of the language models that play users
PLAYERS = {  # of groups; their interface is in rollout/player.py
    "futures": "megatron_collab.rollout.conversation:FuturesPlayer",
}
ADVANTAGES = {  # estimators; their interface is in algo/advantages.py
    "grpo": "megatron_collab.algo.advantages:Grpo",
    "dr_grpo": "megatron_collab.algo.advantages:DrGrpo",
    "gdpo": "megatron_collab.algo.advantages:Gdpo",
    "rloo": "megatron_collab.algo.advantages:Rloo",
    "reinforce++": "megatron_collab.algo.advantages:ReinforcePlusPlus",
    "gae": "megatron_collab.algo.advantages:Gae",
    "turn_gae": "megatron_collab.algo.turn_gae:TurnGae",
}
TURN_CREDITS = {  # of whole conversations; their interface is in algo/turn_credit/
    "last": "megatron_collab.algo.turn_credit:Last",
    "equal": "megatron_collab.algo.turn_credit:Equal",
    "immediate": "megatron_collab.algo.turn_credit:Immediate",
    "reward_to_go": "megatron_collab.algo.turn_credit:RewardToGo",
    "userrl": "megatron_collab.algo.turn_credit.userrl:UserRl",
    "gigpo": "megatron_collab.algo.turn_credit.gigpo:GiGpo",
    "igpo": "megatron_collab.algo.turn_credit.igpo:Igpo",
    "next_user_turn": "megatron_collab.algo.turn_credit.next_user_turn:NextUserTurn",
}


@dataclass
class SeedConfig:
    seed: int = option(0, "seed of data order, sampling and initialization", ge=0, lt=2**32)


@dataclass
class RunConfig(SeedConfig):
    dir: str = mutable(MISSING, "folder of the run: metrics, transcripts, checkpoints, report", kind=WRITTEN_FOLDER)
    writers: list[str] = mutable(
        ["tensorboard", "wandb"],
        "where metrics go, too: mlflow, swanlab, tensorboard, trackio, wandb or package.module:Class",
    )
    writer_options: dict[str, dict[str, Any]] = mutable(
        {},
        "settings of each writer by its name in run.writers, e.g. {mlflow: {experiment: e}}",
        entries_may_change=True,
    )
    wandb_project: str | None = mutable(
        "megatron-collab", "Weights & Biases project, used if WANDB_API_KEY is set", kind=WANDB_PROJECT
    )
    wandb_name: str | None = mutable(None, "name of the run in Weights & Biases; null: a generated one")
    wandb_group: str | None = mutable(None, "group of the run in Weights & Biases")
    wandb_tags: list[str] = mutable([], "tags of the run in Weights & Biases", kind=WANDB_TAG)


@dataclass
class TrainingRunConfig(RunConfig):
    fork: str | None = option(None, "run to continue with other settings: RUN, RUN@STEP or RUN@best (also run.from)")


@dataclass
class MachineConfig:
    interface: str | None = mutable(None, "network interface between nodes, e.g. ib0; required for more than one node")
    device: str = mutable("auto", "device of the trainer and the servers", choices=("auto", "cpu", "cuda"))
    timeout: float = seconds(600.0, "seconds without progress on any rank before the run aborts with all stacks", ge=1)


@dataclass
class LaunchConfig(MachineConfig):
    nodes: int = mutable(1, "nodes of the run; if more than one, start torchrun on each", ge=1, le=10_000)
    grace: float = seconds(25.0, "seconds from SIGTERM until the run exits, saved or not")


@dataclass
class TrainingLaunchConfig(LaunchConfig):
    nproc_per_node: int = mutable(1, "trainer ranks per node, started under torchrun", ge=1, le=1024)
    numa_binding: bool = mutable(True, "bind each rank to the NUMA domain of its GPU, if the node has several")

    @property
    def ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.nodes * self.nproc_per_node


@dataclass
class LoraConfig:
    """Low-rank adapters, trained in place of the model's weights."""

    rank: int | None = option(None, "rank of LoRA adapters, the only trained weights; null: train all", ge=1, le=4096)
    alpha: float = option(16.0, "the output of adapters is scaled by alpha / rank", gt=0, le=100_000)
    targets: list[str] = option(
        [*LORA_TARGETS], "linear layers that get adapters; experts get none", choices=LORA_TARGETS
    )
    dropout: float = option(0.0, "dropout probability of an adapter's inputs in training", ge=0, lt=1)
    serve: str = mutable(
        "merged",
        "servers load weights with adapters merged in, or base weights plus adapters",
        choices=("merged", "adapters"),
    )

    @property
    def served(self) -> bool:
        """Whether the servers of the policy hold adapters."""
        return self.rank is not None and self.serve == "adapters"


@dataclass
class DtypeConfig:
    dtype: str = option("bfloat16", "dtype of the parameters of trainer and server", choices=("bfloat16", "float32"))


@dataclass
class ModelConfig(DtypeConfig):
    path: str = option("", "policy: Hugging Face folder, name of the Hub, or checkpoint as RUN, RUN@STEP or RUN@best")
    chat_template_args: dict[str, Any] = option({}, "arguments of the chat template, e.g. {enable_thinking: false}")


@dataclass
class TrainingModelConfig(ModelConfig):
    path: str = option(MISSING, "policy: Hugging Face folder, or OWNER/NAME[@REVISION] of the Hub")
    fp8: str | None = option(None, "TransformerEngine FP8 format", choices=("hybrid", "e4m3"))
    fp8_recipe: str = option("delayed", "how FP8 is scaled", choices=("delayed", "tensorwise", "blockwise", "mxfp8"))
    fp8_params: bool = option(False, "keep the trained parameters in FP8 between steps, with float32 masters")
    fp8_skip_first: int = option(0, "first layers that stay in bfloat16", ge=0)
    fp8_skip_last: int = option(0, "last layers that stay in bfloat16", ge=0)
    lora: LoraConfig = field(default_factory=LoraConfig)


# Mutable sizes are those over which a test reshards a checkpoint.
@dataclass
class ParallelConfig:
    tp: int = mutable(1, "tensor parallel size of the trainer", ge=1, le=1024)
    pp: int = mutable(1, "pipeline parallel size of the trainer; the remaining ranks are data parallel", ge=1, le=1024)
    vpp: int = mutable(1, "virtual pipeline stages of a rank (interleaved schedule); needs pp > 1", ge=1, le=1024)
    cp: int = option(1, "context parallel size: ranks that share a sequence; needs TransformerEngine", ge=1, le=1024)
    ep: int = option(1, "expert parallel size: ranks that share the experts of a layer", ge=1, le=1024)
    sequence_parallel: bool = mutable(False, "split norms and dropout over the tensor parallel ranks; needs tp > 1")
    recompute: str = mutable(
        "none", "activation recomputation; selective: feed-forward layers only", choices=("none", "selective", "full")
    )
    offload: bool = mutable(False, "offload optimizer and gradients to host memory while rollouts are sampled")


@dataclass
class OptimConfig:
    lr: float = mutable(1e-6, "peak learning rate of AdamW", gt=0, le=1)
    schedule: str = mutable("constant", "learning rate after warm-up; linear: to 0", choices=("constant", "linear"))
    warmup_steps: int = mutable(0, "steps of linear warm-up", ge=0)
    beta1: float = option(0.9, "AdamW beta1", ge=0, lt=1)
    beta2: float = option(0.95, "AdamW beta2", ge=0, lt=1)
    weight_decay: float = option(0.0, "AdamW weight decay", ge=0, le=1)
    clip_grad: float = option(1.0, "largest global gradient norm", gt=0)


@dataclass
class DpoConfig:
    """Learning from pairs: train.stage=dpo, or algo.objective=dpo in rl."""

    loss: str = option(
        "sigmoid",
        "loss of a pair: DPO, DPO on per-token means (sigmoid_norm), IPO, or in rl REFUEL's regression of rewards",
        choices=("sigmoid", "sigmoid_norm", "ipo", "refuel"),
    )
    beta: float = option(
        0.1, "how strongly the reference holds the policy; tau of IPO, 1 / eta of REFUEL", gt=0, le=1000
    )
    label_smoothing: float = option(0.0, "sigmoid: assumed share of pairs with swapped labels", ge=0, lt=0.5)
    precompute: bool = option(
        True, "stage dpo: compute the reference's log-probs once and keep them in run.dir; false: at every step"
    )
    refresh: int = option(
        0, "rl: steps after which the policy becomes the new reference; 0: keep the first policy", ge=0
    )
    gap: float = option(0.0, "rl: smallest reward gap between best and worst rollout that makes a pair", ge=0, le=MANY)


@dataclass
class TeacherConfig:
    """On-policy distillation: the reverse KL to a teacher's distribution, on the policy's own samples."""

    weight: float = option(
        0.0, "weight of the teacher in the policy loss; the reward has 1 less it; 0: no teacher", ge=0, le=1
    )
    model: str = option(
        "reference",
        "the first policy (reference), the current one (policy), or a folder or Hub name with the same tokenizer",
    )
    server: str | None = mutable(None, "SGLang server of the teacher, instead of algo.teacher.model", kind=ADDRESS)
    kl: str = option(
        "full", "KL over the whole vocabulary, or at the sampled tokens; a server: sampled", choices=("full", "sampled")
    )
    context: str | None = option(
        None,
        "what only the teacher reads: the task's goal, its answer, or the user's next message",
        choices=("goal", "answer", "next_message"),
    )
    prompt: str | None = option(None, "FILE.j2: the teacher's system message with the context; null: the built-in one")

    @property
    def place(self) -> str | None:
        """The network that teaches: reference, policy, model (a further one) or server; None: there is no teacher."""
        if not self.weight:
            return None
        return "server" if self.server else self.model if self.model in ("reference", "policy") else "model"

    @property
    def full(self) -> bool:
        """Whether the KL is over the whole vocabulary."""
        return self.place not in (None, "server") and self.kl == "full"


@dataclass
class AlgoConfig:
    objective: str = option(
        "policy",
        "rl: learn from all rollouts of a group by advantage (policy), best against worst (dpo), the best (sft)",
        choices=("policy", "dpo", "sft"),
    )
    advantage: str = option(
        "grpo",
        "baseline: group, batch, or critic (gae, turn_gae)",
        choices=(*ADVANTAGES,),
        extensible=True,
    )
    advantage_options: dict[str, Any] = option({}, "settings of an advantage given as package.module:Class")
    loss: str = option(
        "ppo",
        "policy loss with token ratios, sequence ratios or clipped weights",
        choices=("ppo", "gspo", "cispo"),
        extensible=True,
    )
    loss_options: dict[str, Any] = option({}, "settings of a loss given as package.module:Class")
    average: str = option(
        "token",
        "mean of the loss over tokens or sequences; constant: sum / (sequences x max_new_tokens)",
        choices=("token", "sequence", "constant"),
    )
    clip_low: float = option(0.2, "clip of the importance ratio below 1", ge=0, le=1)
    clip_high: float = option(
        0.2, "clip of the ratio above 1; wider than clip_low is DAPO's clip-higher", ge=0, le=1000
    )
    clip_dual: float = option(
        3.0, "ppo: upper bound of the ratio for negative advantages (dual clip); 0: no bound", ge=0, le=1000
    )
    kl_coef: float = option(1e-3, "weight of the KL to the first policy; 0: no reference model is kept", ge=0, le=100)
    kl: str = option("k3", "KL estimator; low_var_kl is k3", choices=("k1", "k2", "k3", "low_var_kl"))
    kl_in: str = option("loss", "add the KL to the loss, or subtract it from the reward", choices=("loss", "reward"))
    entropy_coef: float = option(0.0, "weight of the entropy bonus", ge=0, le=100)
    correction: str = option(
        "none", "importance weights between engine and trainer", choices=("none", "truncated", "masked")
    )
    correction_level: str = option(
        "token",
        "one weight per token, or per sequence: the product or geometric mean of its tokens' weights",
        choices=("token", "sequence", "geometric"),
    )
    correction_low: float = option(0.5, "masked: smaller weights are masked out", ge=0, le=1)
    correction_high: float = option(
        2.0, "truncated: largest weight; masked: larger weights are masked out", gt=0, le=1000
    )
    mini_batches: int = option(1, "optimizer steps per pass over a batch of rollouts", ge=1)
    epochs: int = option(1, "passes over a batch of rollouts", ge=1, le=100)
    later_weight: float = option(
        1.0, "train_turns=all: weight of later turns in the loss; trained turns have 1", gt=0, le=1000
    )
    overlong: float = option(
        0.0, "last share of max_new_tokens, over which a reply's reward falls by up to 1 (DAPO)", ge=0, le=1
    )
    dynamic_sampling: int = option(0, "times a step replaces tasks whose rewards were all equal (DAPO)", ge=0, le=1000)
    gamma: float = option(1.0, "gae: discount per trained token; turn_gae: per turn", ge=0, le=1)
    gae_lambda: float = option(1.0, "gae, turn_gae: lambda", ge=0, le=1)
    critic_warmup: int = option(0, "gae, turn_gae: first steps, which train only the critic", ge=0)
    critic_lr: float = mutable(
        1e-5, "gae, turn_gae: peak learning rate of the critic; warm-up and schedule as in optim", gt=0, le=1
    )
    critic_clip: float = option(0.2, "gae, turn_gae: change of a value above which its loss is clipped", gt=0)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)


@dataclass
class EvalTasksConfig:
    eval_tasks: int = mutable(256, "evaluated tasks per set of data.eval; 0: none", ge=0)


@dataclass
class TrainConfig(EvalTasksConfig):
    stage: str = option(
        "rl", "rl (multiturn-aware reward), sft (supervised) or dpo (pairs)", choices=("rl", "sft", "dpo")
    )
    steps: int = mutable(100, "steps of the run", ge=1)
    epochs: float | None = mutable(
        None, "passes over data.train, instead of train.steps", gt=0, le=100_000, instead_of="train.steps"
    )
    prompts_per_step: int = option(16, "tasks (rl), conversations (sft) or pairs (dpo) per step", ge=1)
    rollouts_per_prompt: int = option(8, "trained turns sampled for each task: the group of GRPO", ge=1)
    tokens_per_micro_batch: int = mutable(
        8192, "tokens packed into a micro-batch; a longer sequence gets its own", ge=1
    )
    checkpoint_every: int = mutable(
        50, "steps between checkpoints, and the last step saves one; 0: only the last", ge=0
    )
    keep_checkpoints: int = mutable(2, "checkpoints that stay on disk", ge=1)
    keep_best: str | None = mutable(
        None, "also keep the checkpoint with the highest eval/[SET/]METRIC; with a leading -: the lowest"
    )
    eval_every: int = mutable(0, "steps between evaluations; 0: only before the first step and after the last", ge=0)
    record_tokens: bool = mutable(
        False,
        "rl: record the tokens of trained turns with probability, ratio and advantage: "
        "a forward pass, 3 KB and 3 to 5 bytes a token each step",
    )
    stop_on_alarm: bool = mutable(False, "rl: stop the run, saved, when a sentinel of reward hacking raises an alarm")

    def checkpoint_due(self, step: int) -> bool:
        """Whether checkpoint_every asks for a checkpoint after `step` finished steps."""
        return self.checkpoint_every > 0 and step % self.checkpoint_every == 0


@dataclass
class ServerStartConfig:
    start_timeout: float = seconds(
        600.0, "seconds until the servers must be healthy; on GPUs the first start compiles kernels", ge=1
    )


@dataclass
class ServerConfig(ServerStartConfig):
    tp: int = mutable(1, "tensor parallel size of an SGLang server", ge=1, le=1024)
    ep: int = mutable(1, "expert parallel size of an SGLang server; must divide tp", ge=1, le=1024)
    nnodes: int = mutable(1, "nodes that an SGLang server spans", ge=1, le=1024)
    replicas: int = mutable(1, "SGLang servers; the conversations of a prompt stay on one of them", ge=1, le=10_000)
    port: int = mutable(0, "port of the first SGLang server, the others follow; 0: free ports", ge=0, le=65535)
    max_running_requests: int = mutable(256, "requests a server decodes at once", ge=1)
    max_total_tokens: int | None = mutable(
        None, "tokens in a KV cache; colocated servers on GPUs need it, or memory_share", ge=1, le=10**10
    )
    memory_share: float | None = mutable(
        None,
        "share of the GPU memory that is free when a server starts, for its weights and KV cache, instead of "
        "max_total_tokens",
        gt=0,
        lt=1,
        instead_of="rollout.server.max_total_tokens",
    )
    args: dict[str, Any] = mutable(
        {}, "other SGLang arguments, e.g. {schedule-policy: lpm}; true: a flag without value", entries_may_change=True
    )


@dataclass
class TrainingServerConfig(ServerConfig):
    fp8: bool = option(False, "servers hold the linear layers in FP8 (blocks of 128 x 128), quantized by the trainer")
    colocated: bool = mutable(True, "servers and trainer take turns on the same devices; false: servers have their own")


@dataclass
class ServedConfig:
    """One of `servers`: a model beside the policy."""

    model: str = option("", "model: Hugging Face folder, or OWNER/NAME[@REVISION] of the Hub")
    replicas: int = mutable(1, "SGLang servers of this model, all on the first node", ge=1, le=10_000)
    tp: int = mutable(1, "tensor parallel size of a server", ge=1, le=1024)
    ep: int = mutable(1, "expert parallel size of a server; must divide tp", ge=1, le=1024)
    colocated: bool = mutable(False, "take turns with the trainer on its devices; false: devices of their own")
    max_running_requests: int = mutable(256, "requests a server decodes at once", ge=1)
    max_total_tokens: int | None = mutable(
        None, "tokens in a KV cache; a colocated server on GPUs needs it, or memory_share", ge=1, le=10**10
    )
    memory_share: float | None = mutable(
        None,
        "share of the GPU memory that is free when it starts, for weights and KV cache, instead of max_total_tokens",
        gt=0,
        lt=1,
    )
    args: dict[str, Any] = mutable({}, "other SGLang arguments, as in rollout.server.args", entries_may_change=True)


@dataclass
class SamplingConfig:
    max_new_tokens: int = option(
        2048, "token budget of a turn; with thinking_budget: of the reply after the thought", ge=1
    )
    thinking_budget: int | None = option(
        None, "token budget of a thought, closed when spent; null: max_new_tokens includes the thought", ge=1
    )
    enable_thinking: bool | None = option(
        None, "enable_thinking of the chat template in these turns; null: as in model.chat_template_args"
    )
    temperature: float = option(1.0, "sampling temperature, in training and evaluation", gt=0, le=10)
    top_p: float = option(1.0, "probability mass that is sampled from; below 1 samples are off-policy", gt=0, le=1)
    top_k: int = option(-1, "most likely tokens to sample from; -1: all", ge=-1)

    @property
    def longest(self) -> int:
        """Tokens of the longest turn that may be sampled, thought and reply together."""
        return (self.thinking_budget or 0) + self.max_new_tokens


@dataclass
class ContextConfig:
    context_length: int = option(
        8192, "longest token stream of a conversation, reply included; longer data is left out", ge=2
    )
    server: ServerStartConfig = field(default_factory=ServerStartConfig)


@dataclass
class RolloutConfig(ContextConfig):
    player: str = option(
        "futures",
        "how a group is played; futures: a trained turn, its futures, their scores",
        choices=(*PLAYERS,),
        extensible=True,
    )
    player_options: dict[str, Any] = option({}, "settings of a player given as package.module:Class")
    futures: int = option(
        3, "conversations continued from a trained turn; 0: train all turns of one conversation", ge=0, le=1000
    )
    max_user_turns: int = option(
        2, "user turns after the trained turn; those already in the task do not count", ge=1, le=1000
    )
    max_assistant_turns: int = option(
        3, "policy turns including the trained one; tool calls do not count", ge=1, le=1000
    )
    max_messages: int | None = option(
        None, "user and policy messages in a conversation, including the task's; null: no limit", ge=2, le=10_000
    )
    turn: SamplingConfig = field(default_factory=SamplingConfig)
    future: SamplingConfig = field(default_factory=SamplingConfig)
    strip_thoughts: bool = option(False, "later turns see earlier replies without their thoughts")
    deadline: float = seconds(900.0, "seconds one future may take; then it ends without a score")
    system_prompt: str | None = option(None, "FILE.j2: system prompt of tasks and SFT conversations without one")
    tools: list[str] = option(
        [],
        "tools of the policy: calculator, package.module:Class or function, or FILE.yaml of verl's tools",
    )
    tool_options: dict[str, dict[str, Any]] = option({}, "settings of each tool, by the name that the policy calls")
    mcp_servers: dict[str, dict[str, Any]] = option(
        {}, "MCP servers by a name of your choice, with command and args, or url"
    )
    tool_timeout: float = seconds(60.0, "seconds one tool call may take; then the policy reads of the timeout")
    tool_parser: str = option("qwen25", "SGLang's parser of the policy's tool calls", choices=TOOL_PARSERS)
    max_tool_calls: int = option(
        8, "rounds of tool calls in one turn; the policy's next message is its reply", ge=0, le=1000
    )
    workers: int = mutable(1, "Ray ConversationWorkers", ge=1, le=10_000)
    turn_timeout: float = seconds(300.0, "seconds one request to the server may take")
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class TrainingRolloutConfig(RolloutConfig):
    train_turns: str = option(
        "first", "train the trained turn only, or its futures' turns too", choices=("first", "all")
    )
    routing_replay: bool = option(False, "train tokens through the experts that the server chose (MoE; R3)")
    max_staleness: int = mutable(
        0,
        "steps that sampling may run ahead of training; colocated servers pause it meanwhile; 0: they take turns",
        ge=0,
        le=1000,
    )
    server: TrainingServerConfig = field(default_factory=TrainingServerConfig)


@dataclass
class EndpointConfig:
    """A language model behind LiteLLM. `group`: where it is set, for messages."""

    group: ClassVar[str] = "reward.judge"

    model: str | None = option(None, "LiteLLM model")
    api_base: str | None = mutable(None, "endpoint of the model; its key comes from the environment", kind=ADDRESS)
    temperature: float | None = option(
        0.0, "sampling temperature; null: not sent, for models with a fixed one", ge=0, le=10
    )
    top_p: float | None = option(None, "probability mass that is sampled from; null: not sent", gt=0, le=1)
    reasoning_effort: str | None = option(None, "how much the model thinks, e.g. low or high; null: not sent")
    max_tokens: int | None = option(
        2048, "token budget of an answer; null: send extra.max_completion_tokens instead", ge=1
    )
    headers: dict[str, str] = option(
        {}, "HTTP headers; os.environ/NAME: the environment variable NAME, for keys", kind=HEADERS
    )
    extra: dict[str, Any] = option({}, "other arguments of LiteLLM's completion, e.g. {seed: 1}")
    attempts: int = mutable(6, "tries until an answer is recorded as missing", ge=1, le=1000)
    timeout: float = seconds(60.0, "seconds one try may take")
    deadline: float = seconds(300.0, "seconds all tries together may take")


@dataclass
class UserConfig(EndpointConfig):
    group = "user (or users.NAME)"

    name: str | None = option(None, "user of every task, instead of the task's own: KIND or package.module:Class")
    model: str | None = option(None, "LiteLLM model of the users named llm; policy: the model that is trained")
    temperature: float | None = option(1.0, "sampling temperature of the user; null: not sent", ge=0, le=10)
    form: str = option(
        JSON,
        "how llm users are called; json: they answer with an object; chat: a chat model, with the roles exchanged; "
        "user_model: a model that was trained to write the user's turns",
        choices=(JSON, CHAT, USER_MODEL),
    )
    tools: list[str] = option([], "functions for users, of classes in rollout.tools, that the user may call")
    max_tokens: int | None = option(512, "token budget of a user message; null: as reward.judge.max_tokens", ge=1)
    attempts: int = mutable(3, "tries before the future ends with an error", ge=1, le=1000)
    stop: str = option("[[TERMINATE CHAT]]", "text in the user's message that ends the conversation")
    prompt: str | None = option(None, "FILE.j2: prompt of the llm users; null: the built-in one")
    personas: str | None = option(
        None,
        "text file, one persona per line, drawn per task for llm users; null: metadata.persona of the task",
    )
    options: dict[str, Any] = option({}, "settings of the users given as package.module:Class")


@dataclass
class AssistantConfig(EndpointConfig):
    """A model in place of the policy, only for `megatron-collab evaluate`."""

    group = "assistant"

    model: str | None = option(None, "LiteLLM model that `megatron-collab evaluate` evaluates instead of model.path")
    temperature: float | None = option(
        1.0, "sampling temperature, unless a set of data.eval has its own; null: not sent", ge=0, le=10
    )
    max_tokens: int | None = option(
        2048, "token budget of a turn, unless a set of data.eval has its own; null: as reward.judge.max_tokens", ge=1
    )


@dataclass
class BuildConfig:
    """Conversations that `megatron-collab build-dataset` builds from the tasks of data.eval."""

    candidates: int = option(4, "replies that are compared at every turn", ge=1, le=1000)
    assistants: dict[str, Any] = option(
        {},
        "models that write candidates, in turn, by names of your choice: policy (model.path), a model, or assistant "
        "settings; empty: model.path or assistant.model",
    )
    proactive: float = option(0.0, "share of the candidates, and of their futures, that get build.prompt", ge=0, le=1)
    prompt: str | None = option(None, "FILE.j2: system message of that share, not in the rows; null: collaborator.j2")
    parquet: bool = mutable(False, "write the rows as Parquet instead of JSONL")
    push_to_hub: str | None = mutable(None, "OWNER/NAME on the Hub to upload the finished data set to")
    public: bool = mutable(False, "create the uploaded data set as public; false: private")


@dataclass
class JudgeConfig:
    judge: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class RewardConfig(JudgeConfig):
    mode: str = option(
        "mr",
        "mean over the scored futures (mr), the trained turn alone (single_turn), or a published formula",
        choices=("mr", "single_turn", "paper", "collabllm", "verl"),
        extensible=True,
    )
    mode_options: dict[str, Any] = option({}, "settings of a reward function given as package.module:Class")
    weights: dict[str, float] = mutable({}, "weight of each metric in the reward; 0: scored and shown only", ge=-MANY)
    metrics: dict[str, dict[str, Any]] = option(
        {}, "settings of a metric by its name, e.g. metrics.accuracy.judge=true"
    )
    clamp: dict[str, float] = option({}, "bound on the absolute weighted part of a metric, in mr and single_turn", gt=0)
    malformed: float | None = option(
        -1.0, "reward of an empty, broken or cut turn, without futures; null: play futures", ge=-MANY
    )
    malformed_worst: bool = option(False, "a malformed turn gets at most the worst reward of its group")
    workers: int = mutable(1, "Ray RewardWorkers", ge=1, le=10_000)
    concurrency: int = mutable(256, "scores of one metric that a RewardWorker computes at once", ge=1)
    timeout: float = seconds(120.0, "seconds one score may take; with a judge, reward.judge.deadline applies")
    max_missing: float = mutable(
        0.2,
        "share of a step's rollouts that may have no reward, and of an evaluation's that may lack a score, before the "
        "run stops",
        ge=0,
        le=1,
    )


@dataclass
class TrainingRewardConfig(RewardConfig):
    turn_credit: str = option(
        "equal", "futures=0: how each turn is rewarded", choices=(*TURN_CREDITS,), extensible=True
    )
    turn_credit_options: dict[str, Any] = option({}, "settings of turn_credit, e.g. {turns: em} of userrl")
    turn_gamma: float = option(1.0, "reward_to_go, userrl, gigpo, igpo: discount per turn", ge=0, le=1)


@dataclass
class LlmConfig:
    """Limits, prices and recordings for all calls of users and judges together, over all nodes."""

    requests_per_minute: int | None = mutable(None, "requests per minute; null: no limit", ge=1)
    tokens_per_minute: int | None = mutable(
        None, "tokens per minute, prompts and answers; null: no limit", ge=1, le=10**12
    )
    max_concurrent: int | None = mutable(
        None, "calls in flight at once; null: as many as the limits per minute and open files allow", ge=1
    )
    budget_usd: float | None = mutable(None, "USD that the run may spend before it stops; null: no limit", gt=0)
    prices: dict[str, list[Any]] = mutable(
        {}, "USD per million prompt and answer tokens, e.g. {openai/m: [2.5, 10]}; other models: LiteLLM's"
    )
    cache: str | None = mutable(
        None, "cache folder of the judges' answers; null: llm_cache in run.dir", kind=WRITTEN_FOLDER
    )
    record: str | None = mutable(
        None, "folder to which all calls of users, judges and served models are recorded", kind=WRITTEN_FOLDER
    )
    replay: str | None = mutable(
        None, "folder of recorded calls to replay instead of calling models: no network, no key, no cost"
    )
    replay_missing: str = mutable(
        "error", "a call missing from the recording ends the run (error), or is made (live)", choices=("error", "live")
    )
    replay_latency: float = mutable(
        0.0, "duration of a replayed call, as a multiple of the recorded one", ge=0, le=1000
    )

    @property
    def offline(self) -> bool:
        """Whether no live call is made: all answers come from a recording."""
        return self.replay is not None and self.replay_missing == "error"


@dataclass
class PublishConfig:
    transport: str = mutable("auto", "how weights reach the servers", choices=("auto", *TRANSPORTS), extensible=True)
    transport_options: dict[str, Any] = mutable(
        {}, "settings of a transport given as package.module:Class", entries_may_change=True
    )
    verify: int = mutable(0, "publishes between checks of the servers' weights by checksum; 0: never", ge=0)


@dataclass
class DataConfig:
    world: str | None = option(None, "world that creates model and data: booking, desk, gsm8k or package.module:Class")
    world_options: dict[str, Any] = option({}, "settings of the world: costs of desk, or those of package.module:Class")
    dir: str | None = option(None, "folder in which the world is created", kind=WRITTEN_FOLDER)
    path: str | None = option(None, "source data of the world, if it needs any (gsm8k: folder with train.jsonl)")
    eval: Any = mutable(None, "evaluation data: a source as in data.train, or a list of sets [{source: …, name: …}]")
    format: str = option("auto", "format of the rows; auto: by their columns", choices=FORMATS, extensible=True)
    format_options: dict[str, Any] = option({}, "settings of a reader given as package.module:Class")
    max_prompt_tokens: int | None = option(
        None, "longest prompt of a task; longer ones are left out, and counted at the start", ge=1
    )


@dataclass
class TrainingDataConfig(DataConfig):
    train: Any = option(MISSING, "tasks, conversations or pairs: file, folder, glob, name on the Hub, or a list")
    prefixes: bool = option(False, "train on every prefix of a task that ends with a user message, each prompt once")


def uses_wandb(run: RunConfig) -> bool:
    """Whether the run reports to Weights & Biases."""
    return "wandb" in run.writers and run.wandb_project is not None and bool(os.environ.get("WANDB_API_KEY"))
