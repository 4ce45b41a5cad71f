"""Options: declaration, groups (schema.py), and the extensions, prompts and documents that they name.

A group is a dataclass, so an instance is a value that every room may take. The programs that the groups make up, and
the command lines and files that give them, are in config/.
"""

from megatron_collab.settings.extension import (
    Extension,
    Resolved,
    lookup,
    make,
    make_absolute,
    named_files,
    resolve,
)
from megatron_collab.settings.hint import nearest
from megatron_collab.settings.kind import ADDRESS, WRITTEN_FILE, WRITTEN_FOLDER, address_fault, header_fault
from megatron_collab.settings.option import (
    ConfigError,
    Shown,
    check_declared,
    check_path,
    check_written,
    declared,
    option,
    require,
)
from megatron_collab.settings.prompt import SUFFIX, Prompt, PromptError, read_prompt
from megatron_collab.settings.schema import (
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
    RunConfig,
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
from megatron_collab.settings.values import build, replaced

# The interface for extensions; the other names are for the package itself.
__all__ = ["ConfigError", "Extension", "RunConfig", "option"]
