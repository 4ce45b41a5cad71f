"""The settings of each program: which groups it has (programs.py), composition, changes on resume."""

from megatron_collab.config.history import (
    changes,
    read_settings,
    recorded,
    recorded_value,
    recorded_values,
    run_record,
)
from megatron_collab.config.load import COMMAND_LINE, CONF, compose, compose_program, groups, layers, settings
from megatron_collab.config.programs import (
    AllOptions,
    BuildDatasetConfig,
    CallConfig,
    Config,
    EvaluateConfig,
    PlayConfig,
    UsersFromLogsConfig,
)
