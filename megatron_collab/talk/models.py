"""The models that a run's folder holds: the one that it began with, its checkpoints, and the one that it exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEFORE, AFTER = "before", "after"  # names for the model that the run began with, and for its newest one


@dataclass(frozen=True)
class RunModel:
    """A model of a run: `step` finished steps, 0 for the one that it began with.

    `folder`: a Hugging Face folder, or if `converted` is False the folder of a checkpoint, from which one is made.
    """

    name: str
    step: int
    folder: Path
    converted: bool = True


def models_of(run: Path) -> list[RunModel]:
    """The models of the run in folder `run`, by step: before, step_20, step_40, …; the last one is the newest.

    Raises ConfigError if the folder holds no training run, or its files cannot be read.
    """
    raise NotImplementedError


def find_model(run: Path, name: str) -> RunModel:
    """The model of a run that `name` means: before, after (the newest), best, N or step_N. Raises ConfigError."""
    raise NotImplementedError
