"""Checks that the settings of several metrics share."""

from __future__ import annotations

from collections.abc import Sequence


def one_of(setting: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError, naming the setting, for a value that is none of `choices`."""
    if value not in choices:
        raise ValueError(f"{setting}={value}: choose one of {', '.join(choices)}")
