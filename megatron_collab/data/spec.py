"""The data of a run, settled before it starts (launch/data_specs.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_collab.data.chat_template import PromptSpec
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.examples import RowFormat
from megatron_collab.data.sources import TrainingSource


@dataclass(frozen=True)
class DataSpec:
    """The sources of data.train, all sets of data.eval (also those of which no task is evaluated), how they are read.

    `format`: of the rows; `context_length`: tokens of the longest conversation; `users`: names of the option `users`,
    None if user.name replaces the users of all tasks. `max_prompt_tokens`: longest prompt of a task, None: as long as
    fits. `stage`, `prefixes`: as train.stage and data.prefixes. Training takes `steps` steps of `per_step` examples, in
    an order drawn from `seed`; with `epochs`, as many steps as these passes over `train` need.
    """

    all_sets: tuple[EvaluationSet, ...]
    run_dir: Path
    format: RowFormat
    prompt: PromptSpec
    context_length: int
    users: tuple[str, ...] | None
    seed: int
    train: tuple[TrainingSource, ...] = ()
    stage: str = "rl"
    prefixes: bool = False
    max_prompt_tokens: int | None = None
    steps: int = 0
    epochs: float | None = None
    per_step: int = 0

    @property
    def eval_sets(self) -> tuple[EvaluationSet, ...]:
        """The sets that are evaluated."""
        return tuple(eval_set for eval_set in self.all_sets if eval_set.tasks)
