"""The options of each program: which groups of options it has.

Hydra composes the options of all programs, since experiments and command lines are shared; a program then takes its own
(config/load.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_collab.config.option import option
from megatron_collab.config.schema import (
    AlgoConfig,
    AssistantConfig,
    BuildConfig,
    ContextConfig,
    DataConfig,
    DtypeConfig,
    EvalTasksConfig,
    JudgeConfig,
    LaunchConfig,
    LlmConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PublishConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SeedConfig,
    TrainConfig,
    TrainingDataConfig,
    TrainingLaunchConfig,
    TrainingModelConfig,
    TrainingRewardConfig,
    TrainingRolloutConfig,
    TrainingRunConfig,
    UserConfig,
)


@dataclass
class CallConfig:
    """Options of every program that calls language models and may serve some itself.

    `program`: its name as a command. `refused`: groups of other programs that the command line must not set, with these
    programs. Other options of another program are ignored, so that the command of a training can be repeated as an
    evaluation.
    """

    program: ClassVar[str]
    refused: ClassVar[Mapping[str, str]] = {}

    run: SeedConfig = field(default_factory=SeedConfig)
    launch: MachineConfig = field(default_factory=MachineConfig)
    model: DtypeConfig = field(default_factory=DtypeConfig)
    rollout: ContextConfig = field(default_factory=ContextConfig)
    servers: dict[str, dict[str, Any]] = option(
        {}, "further models that the run serves, by names of your choice; LiteLLM calls them served/NAME"
    )
    reward: JudgeConfig = field(default_factory=JudgeConfig)
    llm: LlmConfig = field(default_factory=LlmConfig)


@dataclass
class UsersFromLogsConfig(CallConfig):
    """Options of users-from-logs."""

    program = "users-from-logs"


@dataclass
class PlayConfig(CallConfig):
    """Options of every program that plays conversations, in a run folder."""

    run: RunConfig = field(default_factory=RunConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    user: UserConfig = field(default_factory=UserConfig)
    users: dict[str, dict[str, Any]] = option(
        {}, "users by names of your choice: class, weight and user settings; a task names one, or draws one by weight"
    )
    data: DataConfig = field(default_factory=DataConfig)
    train: EvalTasksConfig = field(default_factory=EvalTasksConfig)


@dataclass
class Config(PlayConfig):
    """Options of train."""

    program = "train"
    refused: ClassVar[Mapping[str, str]] = {"assistant": "evaluate", "build": "build-dataset"}

    run: TrainingRunConfig = field(default_factory=TrainingRunConfig)
    launch: TrainingLaunchConfig = field(default_factory=TrainingLaunchConfig)
    model: TrainingModelConfig = field(default_factory=TrainingModelConfig)
    rollout: TrainingRolloutConfig = field(default_factory=TrainingRolloutConfig)
    reward: TrainingRewardConfig = field(default_factory=TrainingRewardConfig)
    data: TrainingDataConfig = field(default_factory=TrainingDataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)

    @property
    def objective(self) -> str:
        """What the policy learns from: policy (advantages), sft (likelihood) or dpo (pairs)."""
        return self.algo.objective if self.train.stage == "rl" else self.train.stage

    @property
    def refers(self) -> bool:
        """Whether the loss needs log-probs of a reference, the first policy."""
        return self.objective == "dpo" or (self.objective == "policy" and self.algo.kl_coef > 0)

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a separate model beside the policy, rather than the policy without its adapters."""
        stored = self.train.stage == "dpo" and self.algo.dpo.precompute
        return self.refers and not stored and self.model.lora.rank is None


@dataclass
class EvaluateConfig(PlayConfig):
    """Options of evaluate."""

    program = "evaluate"
    refused: ClassVar[Mapping[str, str]] = {"build": "build-dataset"}

    assistant: AssistantConfig = field(default_factory=AssistantConfig)


@dataclass
class BuildDatasetConfig(EvaluateConfig):
    """Options of build-dataset."""

    program = "build-dataset"
    refused: ClassVar[Mapping[str, str]] = {}

    build: BuildConfig = field(default_factory=BuildConfig)


@dataclass
class AllOptions(Config, BuildDatasetConfig):
    """The options of all programs."""
