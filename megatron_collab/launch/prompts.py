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

from megatron_collab.config import SUFFIX, ConfigError, PlayConfig, Prompt, PromptError
from megatron_collab.config.load import leaves
from megatron_collab.config.prompt import prompt_file
from megatron_collab.runtime import files
from megatron_collab.runtime.process import LAUNCHER, first_on_node
from megatron_collab.runtime.trial import TrialError, run_trial

LONGEST = 1 << 20  # characters of a rendered prompt, and bytes of a template
_SECONDS, _ROOM = 5.0, 1 << 29  # bytes
_TEXT = "x" * 2000
_NAMES = ("goal", "answer", "question", "task_desc", "persona", "stop", "attempt", "reply", "conversation", "metadata")


class _Metadata(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return _TEXT


def check_prompts(config: PlayConfig) -> None:
    """Raises ConfigError, naming the setting, if a template has no end, or gives more than LONGEST characters.

    Invalid templates are left to those who read them, who know their variables.
    """
    if LAUNCHER in os.environ or not first_on_node():
        return
    for setting, value in leaves(asdict(config)):
        if isinstance(value, str):
            check_prompt(setting, value)


def check_prompt(setting: str, value: str) -> None:
    """As `check_prompts`, for one setting, if its value names a template."""
    file = prompt_file(value)
    if value.endswith(SUFFIX) and file.is_file():
        _check(f"{setting}={value}", file, file.stat().st_mtime_ns)


@cache
def _check(setting: str, file: Path, version: int) -> None:
    """Once per `version` of the file, in ns."""
    try:
        run_trial(partial(_render, file), _SECONDS, _ROOM)
    except (TrialError, ValueError) as error:
        raise ConfigError(f"{setting}: the template {error}; shorten its loops and repetitions") from error


def _render(file: Path) -> None:
    values: Mapping[str, Any] = {**dict.fromkeys(_NAMES, _TEXT), "attempt": 1, "metadata": _Metadata()}
    try:
        files.read_text(file, LONGEST)
        text = Prompt(file, _NAMES, str(file)).render(**values)
    except (ConfigError, PromptError):
        return
    if len(text) > LONGEST:
        raise ValueError(f"gives more than {LONGEST} characters for texts of {len(_TEXT)}")
