"""Settles the data of a run, before it starts: the sources of data.train, the sets of data.eval, how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_collab.config import Config, PlayConfig, compose, compose_program, recorded_values, require
from megatron_collab.data.chat_template import PromptSpec
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.data.examples import RowFormat
from megatron_collab.data.sources import TrainingSource, sources
from megatron_collab.data.spec import DataSpec


def data_spec(config: Config) -> DataSpec:
    """The data of a training. Raises ConfigError naming the entry that is refused."""
    run, training = config.train, tuple(sources(config.data.train, "data.train", TrainingSource))
    data = replace(evaluation_data(config), train=training, stage=run.stage, prefixes=config.data.prefixes)
    for eval_set in data.all_sets:
        message = f"{eval_set.setting}.against={eval_set.against}: train.stage={run.stage} plays no conversations"
        require(run.stage == "rl" or eval_set.against is None, f"{message}; remove it")
    return replace(data, steps=run.steps, epochs=run.epochs, per_step=run.prompts_per_step)


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
