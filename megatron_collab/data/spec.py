"""The data of a run, settled before it starts: the sources of data.train and the sets of data.eval."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_collab.config import Config, PlayConfig
from megatron_collab.data.evaluation import EvaluationSet, evaluation_sets
from megatron_collab.data.sources import TrainingSource, sources


@dataclass(frozen=True)
class DataSpec:
    """The sources of data.train, and all sets of data.eval, also those of which no task is evaluated."""

    train: tuple[TrainingSource, ...]
    all_sets: tuple[EvaluationSet, ...]

    @property
    def eval_sets(self) -> tuple[EvaluationSet, ...]:
        """The sets that are evaluated."""
        return tuple(eval_set for eval_set in self.all_sets if eval_set.tasks)


def data_spec(config: Config) -> DataSpec:
    """The data of a training. Raises ConfigError naming the entry that is refused."""
    return DataSpec(tuple(sources(config.data.train, "data.train", TrainingSource)), evaluation_sets(config))


def evaluation_data(config: PlayConfig) -> DataSpec:
    """As `data_spec`, without data.train."""
    return DataSpec((), evaluation_sets(config))
