"""Settles the data of a run, before it starts: the sources of data.train, the sets of data.eval, how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_collab.config import Config, PlayConfig, compose, compose_program, recorded_values
from megatron_collab.data.chat_template import PromptSpec
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.data.examples import RowFormat
from megatron_collab.data.sources import TrainingSource, sources
from megatron_collab.data.spec import DataSpec
from megatron_collab.settings import require


def data_spec(config: Config) -> DataSpec:
    """The data of a training. Raises ConfigError naming the entry that is refused."""
    run, training = config.train, sources(config.data.train, "data.train", TrainingSource)
    if run.epochs is not None and len(training) > 1:
        training = _counted_in_passes(training, run.epochs)
    data = replace(evaluation_data(config), train=tuple(training), stage=run.stage, prefixes=config.data.prefixes)
    for eval_set in data.all_sets:
        message = f"{eval_set.setting}.against={eval_set.against}: train.stage={run.stage} plays no conversations"
        require(run.stage == "rl" or eval_set.against is None, f"{message}; remove it")
    return replace(data, steps=run.steps, epochs=run.epochs, per_step=run.prompts_per_step)


def _counted_in_passes(training: list[TrainingSource], epochs: float) -> list[TrainingSource]:
    """The sources of a run of train.epochs: without `epochs` of their own, a pass takes every row of each one once.

    Raises ConfigError if weights or steps bound their rows, since a pass over them is then undefined.
    """
    message = f"data.train: with train.epochs={epochs:g} no source of several"
    bounded = any(source.from_step or source.until_step is not None for source in training)
    require(not bounded, f"{message} can have from_step or until_step; remove them, or set train.steps instead")
    if any(source.epochs is not None for source in training):
        return training
    weighted = any(source.weight != 1.0 for source in training)
    require(not weighted, f"{message} can have a weight; set epochs in each source, or train.steps instead")
    return [replace(source, epochs=1.0) for source in training]


def evaluation_data(config: PlayConfig) -> DataSpec:
    """As `data_spec`, without data.train."""
    return DataSpec(
        all_sets=evaluation_sets(config.data.eval, config.train.eval_tasks),
        run_dir=Path(config.run.dir),
        format=RowFormat(config.data.format, config.data.format_options),
        prompt=prompt_spec(config),
        context_length=config.rollout.context_length,
        users=None if config.user.name else tuple(config.users),
        seed=config.run.seed,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )


def recorded_data(run: Path, overrides: Sequence[str], evaluation: str | None) -> DataSpec:
    """The data of a run from its folder: what it trained on, or the sets of data.eval for an `evaluation`.

    `overrides`: of its settings. Raises ConfigError.
    """
    if evaluation:
        return evaluation_data(compose_program(PlayConfig, overrides, recorded_values(run, PlayConfig)))
    return data_spec(compose(overrides, recorded_values(run)))


def prompt_spec(config: PlayConfig) -> PromptSpec:
    """How prompts of the policy are rendered."""
    return PromptSpec(config.model.path, config.model.chat_template_args, config.rollout.system_prompt)
