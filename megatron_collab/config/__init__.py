"""Settings: groups of options (schema.py), those of each program (programs.py), composition, changes on resume."""

from megatron_collab.config.extension import (
    Extension,
    Resolved,
    lookup,
    make,
    make_absolute,
    named_files,
    resolve,
)
from megatron_collab.config.hint import nearest
from megatron_collab.config.history import (
    SETTINGS,
    Change,
    changes,
    read_settings,
    recorded,
    recorded_value,
    recorded_values,
)
from megatron_collab.config.kind import ADDRESS, WRITTEN_FILE, WRITTEN_FOLDER, address_fault, header_fault
from megatron_collab.config.load import COMMAND_LINE, CONF, build, compose, compose_program, groups, layers, settings
from megatron_collab.config.option import (
    ConfigError,
    Shown,
    check_declared,
    check_path,
    check_written,
    declared,
    option,
    require,
)
from megatron_collab.config.programs import (
    AllOptions,
    BuildDatasetConfig,
    CallConfig,
    Config,
    EvaluateConfig,
    PlayConfig,
    UsersFromLogsConfig,
)
from megatron_collab.config.prompt import SUFFIX, Prompt, PromptError, read_prompt
from megatron_collab.config.schema import (
    AlgoConfig,
    DpoConfig,
    EndpointConfig,
    LaunchConfig,
    LlmConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PublishConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ServedConfig,
    TrainConfig,
    TrainingLaunchConfig,
    TrainingModelConfig,
    TrainingRewardConfig,
    TrainingRolloutConfig,
    UserConfig,
    uses_wandb,
)

# The interface for extensions; the other names are for the package itself.
__all__ = ["Config", "ConfigError", "Extension", "PlayConfig", "option"]
