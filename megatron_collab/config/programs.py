"""The options of each program: which groups of options it has.

Hydra composes the options of all programs, since experiments and command lines are shared; a program then takes its own
(config/load.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_collab.settings import schema
from megatron_collab.settings.option import option


@dataclass
class CallConfig:
    """Options of every program that calls language models and may serve some itself.

    `program`: its name as a command. `refused`: groups of other programs that the command line must not set, with these
    programs. Other options of another program are ignored, so that the command of a training can be repeated as an
    evaluation.
    """

    program: ClassVar[str]
    refused: ClassVar[Mapping[str, str]] = {}

    run: schema.SeedConfig = field(default_factory=schema.SeedConfig)
    launch: schema.MachineConfig = field(default_factory=schema.MachineConfig)
    model: schema.DtypeConfig = field(default_factory=schema.DtypeConfig)
    rollout: schema.ContextConfig = field(default_factory=schema.ContextConfig)
    servers: dict[str, dict[str, Any]] = option(
        {}, "further models that the run serves, by names of your choice; LiteLLM calls them served/NAME"
    )
    reward: schema.JudgeConfig = field(default_factory=schema.JudgeConfig)
    llm: schema.LlmConfig = field(default_factory=schema.LlmConfig)


@dataclass
class UsersFromLogsConfig(CallConfig):
    """Options of users-from-logs."""

    program = "users-from-logs"
    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("algo", "data", "optim", "parallel", "train", "user", "users"), "train"),
        **{"assistant": "evaluate", "build": "build-dataset"},
    }


@dataclass
class PlayConfig(CallConfig):
    """Options of every program that plays conversations, in a run folder."""

    run: schema.RunConfig = field(default_factory=schema.RunConfig)
    launch: schema.LaunchConfig = field(default_factory=schema.LaunchConfig)
    model: schema.ModelConfig = field(default_factory=schema.ModelConfig)
    rollout: schema.RolloutConfig = field(default_factory=schema.RolloutConfig)
    reward: schema.RewardConfig = field(default_factory=schema.RewardConfig)
    user: schema.UserConfig = field(default_factory=schema.UserConfig)
    users: dict[str, dict[str, Any]] = option(
        {}, "users by names of your choice: class, weight and user settings; a task names one, or draws one by weight"
    )
    data: schema.DataConfig = field(default_factory=schema.DataConfig)
    train: schema.EvalTasksConfig = field(default_factory=schema.EvalTasksConfig)


@dataclass
class Config(PlayConfig):
    """Options of train."""

    program = "train"
    refused: ClassVar[Mapping[str, str]] = {"assistant": "evaluate", "build": "build-dataset"}

    run: schema.TrainingRunConfig = field(default_factory=schema.TrainingRunConfig)
    launch: schema.TrainingLaunchConfig = field(default_factory=schema.TrainingLaunchConfig)
    model: schema.TrainingModelConfig = field(default_factory=schema.TrainingModelConfig)
    rollout: schema.TrainingRolloutConfig = field(default_factory=schema.TrainingRolloutConfig)
    reward: schema.TrainingRewardConfig = field(default_factory=schema.TrainingRewardConfig)
    data: schema.TrainingDataConfig = field(default_factory=schema.TrainingDataConfig)
    train: schema.TrainConfig = field(default_factory=schema.TrainConfig)
    parallel: schema.ParallelConfig = field(default_factory=schema.ParallelConfig)
    optim: schema.OptimConfig = field(default_factory=schema.OptimConfig)
    algo: schema.AlgoConfig = field(default_factory=schema.AlgoConfig)
    publish: schema.PublishConfig = field(default_factory=schema.PublishConfig)

    @property
    def objective(self) -> str:
        """What the policy learns from: policy (advantages), sft (likelihood) or dpo (pairs)."""
        return self.algo.objective if self.train.stage == "rl" else self.train.stage

    @property
    def reference(self) -> str | None:
        """Which model is the reference, the first policy, for the KL to it or as teacher; None: the loss needs none.

        copy: a separate model; base: the policy without its adapters; stored: either, once, before the first step.
        """
        teaches = self.algo.teacher.place == "reference"
        if self.objective == "sft" or (self.objective == "policy" and self.algo.kl_coef == 0 and not teaches):
            return None
        if self.train.stage == "dpo" and self.algo.dpo.precompute:
            return "stored"
        return "copy" if self.model.lora.rank is None else "base"


@dataclass
class EvaluateConfig(PlayConfig):
    """Options of evaluate."""

    program = "evaluate"
    refused: ClassVar[Mapping[str, str]] = {"build": "build-dataset"}

    assistant: schema.AssistantConfig = field(default_factory=schema.AssistantConfig)


@dataclass
class BuildDatasetConfig(EvaluateConfig):
    """Options of build-dataset."""

    program = "build-dataset"
    refused: ClassVar[Mapping[str, str]] = {}

    build: schema.BuildConfig = field(default_factory=schema.BuildConfig)


@dataclass
class AllOptions(Config, BuildDatasetConfig):
    """The options of all programs."""
