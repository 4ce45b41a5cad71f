"""How a setting is refused: ConfigError with one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_collab.config import ConfigError


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def one_of(setting: str, value: Any, choices: Sequence[Any]) -> None:
    allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)
    require(value in choices, f"{setting}={value}: choose one of {allowed}")
