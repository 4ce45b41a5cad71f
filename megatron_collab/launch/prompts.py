"""Tries the templates that settings name in a child process, before anything else reads them.

A template may take hours or gigabytes, already when it is compiled. Its values are not known yet, so texts stand in for
them, which are long enough that output above the limit grows faster than the values do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron_collab.config import PlayConfig
from megatron_collab.runtime import files
from megatron_collab.runtime.process import LAUNCHER, first_on_node
from megatron_collab.runtime.trial import TrialError, run_trial
from megatron_collab.settings import SUFFIX, ConfigError, Prompt, PromptError
from megatron_collab.settings.bounded_jinja import LONGEST, SECONDS
from megatron_collab.settings.prompt import PromptLimit, prompt_file
from megatron_collab.settings.values import leaves

_ROOM = 1 << 29  # bytes
_TEXT = "x" * 2000
_NAMES = (
    *("goal", "answer", "question", "task_desc", "persona", "stop", "attempt", "reply", "conversation", "metadata"),
    "next_message",
)


class _Metadata(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return _TEXT


def check_prompts(config: PlayConfig) -> None:
    """Raises ConfigError, naming the setting, if a template takes too long or gives too much.

    Invalid templates are left to those who read them, who know their variables.
    """
    if LAUNCHER in os.environ or not first_on_node():
        return
    for setting, value in leaves(asdict(config)):
        if isinstance(value, str) and value.endswith(SUFFIX):
            try_prompt(setting, value)


def try_prompt(setting: str, value: str) -> None:
    """As `check_prompts`, for the file that `setting` names, if it exists."""
    if (file := prompt_file(value)).is_file():
        _try(f"{setting}={value}", file, file.stat().st_mtime_ns)


@cache
def _try(setting: str, file: Path, version: int) -> None:
    """Once per `version` of the file, in ns."""
    try:
        run_trial(partial(_render, file), SECONDS, _ROOM)
    except (TrialError, ValueError) as error:
        raise ConfigError(f"{setting}: the template {error}; shorten its loops and repetitions") from error


def _render(file: Path) -> None:
    values: Mapping[str, Any] = {**dict.fromkeys(_NAMES, _TEXT), "attempt": 1, "metadata": _Metadata()}
    try:
        files.read_text(file, LONGEST)
        Prompt(file, _NAMES, "").render(**values)
    except PromptLimit as error:
        raise ValueError(str(error).strip(" :")) from error
    except (ConfigError, PromptError):
        return
