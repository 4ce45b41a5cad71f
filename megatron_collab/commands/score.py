"""Score the futures of a run under several rewards at once, side by side.

    megatron-collab score RUN --reward paper --reward verl --reward run [--step N | --evaluation NAME] [OPTION=VALUE …]

A reward is one of conf/reward, or `run` for the run's own. The conversations are those of the transcripts: of a step of
training (the last one) or of an evaluation. They are not played again, so a preset's settings of users, prompts and
futures have no effect. Tasks, judge and limits are the run's, unless options such as reward.judge.model=… are given;
answers of the judge that the run has cached cost nothing. Counts of the policy's token ids are those that the run has
recorded. Exit code 3 if llm.budget_usd is spent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab import statistics
from megatron_collab.commands import ArgumentParser
from megatron_collab.config import PlayConfig, compose_program, groups, recorded_values
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped
from megatron_collab.settings import WRITTEN_FILE, ConfigError, check_path, check_written, nearest, require

if TYPE_CHECKING:
    from megatron_collab.reward.metrics import ScoredMetric
    from megatron_collab.reward.spec import RewardSpec
    from megatron_collab.reward.workers import Scores
    from megatron_collab.types import Group, Reward

RUN_REWARD = "run"  # the run's own reward
_OF_REWARD = ("mode", "mode_options", "weights", "metrics", "clamp", "malformed", "malformed_worst")


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("score", __doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument(
        "--reward", action="append", required=True, metavar="NAME", help=f"name in conf/reward, or {RUN_REWARD}"
    )
    parser.add_argument("--step", type=int, help="step of training [the last one]")
    parser.add_argument("--evaluation", metavar="NAME", help="instead of a step: before, after, SET/step_20, …")
    parser.add_argument("--out", type=Path, help="JSONL to write, with the rewards of every trained turn")
    parser.add_argument("option", nargs="*", help="option of the run to override")
    options = parser.parse_intermixed_args(arguments)
    require(options.step is None or options.evaluation is None, "--step and --evaluation: give one of them")
    if options.out:
        check_path("--out", options.out, WRITTEN_FILE)
    config, rewards = _settings(options)
    check_written(config.llm, "llm.")

    # Ray and the libraries of data take seconds to import, so arguments are checked first.
    from megatron_collab.launch.data_specs import recorded_data
    from megatron_collab.launch.extensions import check_extensions
    from megatron_collab.reward.comparison import group_rewards, merge_metrics
    from megatron_collab.rollout import recorded  # with the libraries of data, which take seconds

    shared = merge_metrics(rewards)
    settings = {name: dict(metric.settings) for name, metric in shared.metrics.items()}
    merged = replace(config.reward, weights=dict.fromkeys(settings, 1.0), metrics=settings)
    check_extensions(PlayConfig(reward=merged), constructs=True)
    data = recorded_data(options.run, options.option, options.evaluation)
    title, played = recorded.played_groups(options.run, data, options.step, options.evaluation)
    try:
        scores = _scores(config, shared.metrics, played)
    except RunStopped as stopped:
        print(f"megatron-collab: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    all_turns = options.evaluation is None and config.rollout.futures == 0 and config.reward.mode != "single_turn"
    rewards_by_name = {}
    for name, reward in rewards.items():
        future_scores = {future: shared.scores_of(name, score) for future, score in scores.items()}
        rewards_by_name[name] = [group_rewards(group, future_scores, reward, all_turns=all_turns) for group in played]
    turns = sum(len(group.rollouts) for group in played)
    print(f"{options.run}: {title}, {len(played)} tasks, {turns} trained turns, {len(scores)} futures\n")
    _print(rewards_by_name)
    if options.out:
        _write(options.out, played, rewards_by_name)
    return 0


def _settings(options: argparse.Namespace) -> tuple[PlayConfig, dict[str, RewardSpec]]:
    """The run's settings changed by the given options, and the rewards by name. Raises ConfigError."""
    stage, values = recorded_values(options.run)["train.stage"], recorded_values(options.run, PlayConfig)
    require(stage == "rl", f"{options.run}: its train.stage is {stage}, which plays no futures")
    config = compose_program(PlayConfig, options.option, values)
    base_values = {name: value for name, value in values.items() if name.removeprefix("reward.") not in _OF_REWARD}
    reward_names, rewards = [RUN_REWARD, *groups()["reward"]], {}
    for name in options.reward:
        require(
            name in reward_names,
            f"--reward={name}: no such reward{nearest(name, reward_names)}; there are {', '.join(reward_names)}",
        )
        variant = (
            config
            if name == RUN_REWARD
            else compose_program(PlayConfig, [f"reward={name}", *options.option], base_values)
        )
        try:
            rewards[name] = _checked(replace(config, reward=variant.reward), values.get("reward.weights", ()))
        except ConfigError as error:
            raise ConfigError(f"--reward={name}: {error}") from error
    return config, rewards


def _checked(config: PlayConfig, recorded: Collection[str]) -> RewardSpec:
    """The reward. Raises ConfigError if it cannot be computed, or needs a model that only the run serves.

    `recorded`: the metrics that the run scored.
    """
    from megatron_collab.launch import endpoints, validate
    from megatron_collab.launch.extensions import check_extensions
    from megatron_collab.launch.play_specs import reward_spec
    from megatron_collab.llm.endpoint import served_by_run
    from megatron_collab.rollout import llm_endpoints

    check_extensions(PlayConfig(reward=config.reward), constructs=False)  # the rest is only recorded
    reward = reward_spec(config.reward)
    validate.check_reward(config, reward)
    judges = llm_endpoints.judge_endpoints(reward)
    endpoints.check_prices(config, judges)
    for judge in judges:
        message = f"{judge.setting}={judge.endpoint.model}: only the run serves it; give another LiteLLM model"
        require(not served_by_run(judge.endpoint.model), message)
    for name, metric in reward.metrics.items():
        message = f"reward.metrics.{name}.model: only the run serves it; give the address of a server as url"
        require(metric.scorer is None, message)
        message = f"reward.weights.{name}: reads log-probs of the policy's servers, and the run did not score it"
        require(metric.answer_lead is None or name in recorded, f"{message}; leave it out")
    return reward


def _scores(config: PlayConfig, metrics: Mapping[str, ScoredMetric], played: Sequence[Group]) -> dict[int, Scores]:
    """Scores with `metrics` by the id() of the future. The run has recorded scores of config.reward."""
    from megatron_collab.launch.play_specs import reward_spec
    from megatron_collab.llm import limiter
    from megatron_collab.reward.comparison import rescore
    from megatron_collab.reward.workers import RewardWorker
    from megatron_collab.runtime.ray_cluster import ray_session
    from megatron_collab.runtime.screen import progress

    with ExitStack() as stack:
        if any(metric.judged for metric in metrics.values()):  # the limiter admits the judge's calls
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(ray_session(config.rollout.workers + config.reward.workers))
            bound = limiter.start_limiter(config.llm, folder / "spend.json")
            stack.callback(lambda: bound)  # the limiter ends with its handle
        reward = reward_spec(config.reward)
        bar = progress("scoring", sum(len(rollout.futures) for group in played for rollout in group.rollouts), "future")
        stack.callback(bar.close)

        async def score_all() -> dict[int, Scores]:
            # In an event loop, as in a run: a metric's constructor may need one.
            worker = RewardWorker(replace(reward, metrics=metrics), config.llm, Path(config.run.dir))
            return await rescore(worker, played, reward.metrics, bar.update)

        return asyncio.run(score_all())


def _print(rewards_by_name: Mapping[str, Sequence[Sequence[Reward]]]) -> None:
    """Print a column per reward: its mean over tasks, with its interval, those of its parts, and its agreement.

    The agreement is how often it ranks turns as the first one does.
    """
    from megatron_collab.reward.comparison import agreement
    from megatron_collab.types import Missing

    first = next(iter(rewards_by_name))
    columns: dict[str, dict[str, float]] = {}
    for name, by_task in rewards_by_name.items():
        scored = [
            [(float(reward.value), reward.parts) for reward in rewards if not isinstance(reward.value, Missing)]
            for rewards in by_task
        ]
        metrics = sorted({metric for rewards in scored for _, parts in rewards for metric in parts})
        values_by_label = {
            "reward": [[value for value, _ in rewards] for rewards in scored],
            **{
                f"  of {metric}": [[parts.get(metric, 0.0) for _, parts in task] for task in scored]
                for metric in metrics
            },
            # Malformed turns have no parts.
            "  of malformed turns": [[0.0 if parts else value for value, parts in rewards] for rewards in scored],
        }
        estimates = {label: statistics.mean(values) for label, values in values_by_label.items()}
        columns[name] = {
            "reward": estimates["reward"].value,
            "  95 % from": estimates["reward"].low,
            "  95 % to": estimates["reward"].high,
            **{label: estimate.value for label, estimate in estimates.items() if label != "reward"},
            "turns without a reward": sum(map(len, by_task)) - sum(map(len, scored)),
            f"ranked as by {first}": agreement(rewards_by_name[first], by_task),
        }
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    labels.sort(key=lambda label: label[:1] != " " and label != "reward")  # the parts of all, then what follows them
    width = max(map(len, labels))
    print(" " * width, *(f"{name:>10}" for name in columns))
    for label in labels:
        print(f"{label:{width}}", *(f"{_number(column.get(label)):>10}" for column in columns.values()))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _write(file: Path, played: Sequence[Group], rewards_by_name: Mapping[str, Sequence[Sequence[Reward]]]) -> None:
    from megatron_collab.types import Missing

    with file.open("w") as out:
        for at, group in enumerate(played):
            for number in range(len(group.rollouts)):
                row: dict[str, Any] = {"task": group.task.id, "rollout": number}
                for name, rewards in rewards_by_name.items():
                    value, parts = rewards[at][number].value, rewards[at][number].parts
                    row[name] = {"missing": value.why} if isinstance(value, Missing) else {"reward": value, **parts}
                out.write(json.dumps(row) + "\n")
