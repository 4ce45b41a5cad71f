"""How a setting is refused: ConfigError with one line, for the options of a tool that line itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_collab.config.schema import ConfigError


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def one_of(setting: str, value: Any, choices: Sequence[Any]) -> None:
    allowed = ", ".join("null" if choice is None else str(choice) for choice in choices)
    require(value in choices, f"{setting}={value}: choose one of {allowed}")


class ArgumentParser(argparse.ArgumentParser):
    """Refuses in one line, with exit code 2, where argparse would also print the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"megatron-collab: {message} (all options: --help)\n")
