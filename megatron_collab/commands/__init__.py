"""The commands of the program `megatron-collab`, one per module, whose `main(arguments)` returns the exit code.

Commands of satellites are in their packages. This module has what all share. It imports nothing heavy, so that --help
and --version answer at once.
"""

from __future__ import annotations

import argparse
import math
from typing import NoReturn

from megatron_collab.runtime.text import printable

EXIT_BAD_INPUT = 2  # the same as in runtime/process.py, which takes longer to import
SAMPLE_TOKENS = 512  # of a sample, for plans of a step's time


class ArgumentParser(argparse.ArgumentParser):
    """Prints an error in one line and exits with code 2; argparse would also print the usage."""

    def __init__(self, command: str, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"megatron-collab {command}", description=description, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"megatron-collab: {printable(message)} (all options: --help)\n")


def positive(text: str) -> float:
    """The type of an argument that is a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number
