"""Score the futures of a run under several rewards at once, side by side.

    megatron-collab score RUN --reward paper --reward verl --reward run [--step N | --evaluation NAME] [OPTION=VALUE …]

A reward is one of conf/reward, or `run` for the run's own. The conversations are those of the transcripts: of a step of
training (the last one) or of an evaluation. They are not played again, so what a preset says of users, prompts and
futures has no effect. Tasks, judge and limits are the run's, unless options such as reward.judge.model=… are given;
answers of the judge that the run has cached cost nothing. Counts of the policy's token ids are those that the run has
recorded. Exit code 3 where llm.budget_usd is spent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.commands import ArgumentParser
from megatron_collab.config import (
    Config,
    ConfigError,
    RewardConfig,
    compose,
    groups,
    nearest,
    recorded_values,
    require,
)
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped

if TYPE_CHECKING:
    from megatron_collab.reward.workers import Scores
    from megatron_collab.types import Group, Reward

OWN = "run"  # the run's own reward
_OF_REWARD = ("mode", "mode_options", "weights", "metrics", "clamp", "malformed", "malformed_worst")


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("score", __doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--reward", action="append", required=True, metavar="NAME", help=f"of conf/reward, or {OWN}")
    parser.add_argument("--step", type=int, help="step of training [the last one]")
    parser.add_argument("--evaluation", metavar="NAME", help="in place of a step: before, after, SET/step_20, …")
    parser.add_argument("--out", type=Path, help="JSONL to write, with the rewards of every trained turn")
    parser.add_argument("option", nargs="*", help="an option of the run, with another value")
    given = parser.parse_intermixed_args(arguments)
    require(given.step is None or given.evaluation is None, "--step and --evaluation: give one of them")
    config, rewards = _settings(given)

    # Ray and the libraries of data take seconds to import, which wrong arguments need not wait for.
    from megatron_collab.reward.comparison import rewarded, together
    from megatron_collab.rollout import recorded  # with the libraries of data, which take seconds

    title, played = recorded.played(config, given.run, given.step, given.evaluation)
    shared = together(rewards)
    try:
        scores = _scores(replace(config, reward=shared.reward), played, config.reward)
    except RunStopped as stopped:
        print(f"megatron-collab: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    whole = given.evaluation is None and config.rollout.futures == 0 and config.reward.mode != "single_turn"
    found = {}
    for name, reward in rewards.items():
        own = {future: shared.of(name, each) for future, each in scores.items()}
        found[name] = [rewarded(group, own, reward, whole=whole) for group in played]
    turns = sum(len(group.rollouts) for group in played)
    print(f"{given.run}: {title}, {len(played)} tasks, {turns} trained turns, {len(scores)} futures\n")
    _print(found)
    if given.out:
        _write(given.out, played, found)
    return 0


def _settings(given: argparse.Namespace) -> tuple[Config, dict[str, RewardConfig]]:
    """The run's settings with the options that are given, and the rewards by name. Raises ConfigError."""
    values = recorded_values(given.run)
    config = compose(given.option, values)
    require(config.train.stage == "rl", f"{given.run}: its train.stage is {config.train.stage}, which plays no futures")
    others = {name: value for name, value in values.items() if name.removeprefix("reward.") not in _OF_REWARD}
    there, rewards = [OWN, *groups()["reward"]], {}
    for name in given.reward:
        require(name in there, f"--reward={name}: no such reward{nearest(name, there)}; there are {', '.join(there)}")
        own = config if name == OWN else compose([f"reward={name}", *given.option], others)
        rewards[name] = own.reward
        try:
            _check(replace(config, reward=own.reward))
        except ConfigError as error:
            raise ConfigError(f"--reward={name}: {error}") from error
    return config, rewards


def _check(config: Config) -> None:
    """ConfigError for a reward that cannot be had, or only of models that the run serves."""
    from megatron_collab.launch import endpoints, validate
    from megatron_collab.llm.endpoint import of_run
    from megatron_collab.reward import metrics
    from megatron_collab.rollout import asked_models

    validate.check_reward(config)
    asked = asked_models.of_judges(config)
    endpoints.check_prices(config, asked)
    for each in asked:
        message = f"{each.setting}={each.endpoint.model}: only the run serves it; give a model of LiteLLM's"
        require(not of_run(each.endpoint.model), message)
    for name in metrics.scorers(config.reward):
        require(False, f"reward.metrics.{name}.model: only the run serves it; give the address of a server as url")


def _scores(config: Config, played: Sequence[Group], own: RewardConfig) -> dict[int, Scores]:
    """By the id() of a future the scores by config.reward; `own` is the reward that the run has recorded."""
    from megatron_collab.llm import limiter
    from megatron_collab.observability.run import progress
    from megatron_collab.reward.comparison import scored_again
    from megatron_collab.reward.workers import RewardWorker
    from megatron_collab.runtime.ray_cluster import ray_session

    with ExitStack() as stack:
        asked = _judged(config.reward)
        if asked:  # whose calls the limiter admits
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(ray_session(config))
            bound = limiter.start_limiter(config.llm, folder / "spend.json")
            stack.callback(lambda: bound)  # which ends with its handle
        worker = RewardWorker(config)
        bar = progress("scoring", sum(len(rollout.futures) for group in played for rollout in group.rollouts), "future")
        stack.callback(bar.close)
        return asyncio.run(scored_again(worker, played, own, bar.update))


def _judged(reward: RewardConfig) -> bool:
    from megatron_collab.reward import metrics

    kinds = (metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights)
    return any(kind.judged(options) for kind, options in kinds)


def _print(found: Mapping[str, Sequence[Sequence[Reward]]]) -> None:
    """A column for each reward: its mean and that of its parts, and how often it ranks turns as the first one does."""
    from megatron_collab.reward.comparison import agreement
    from megatron_collab.rollout.summary import mean, standard_error
    from megatron_collab.types import Missing

    first = next(iter(found))
    columns: dict[str, dict[str, float]] = {}
    for name, by_task in found.items():
        rewards = [reward for rewards in by_task for reward in rewards]
        given = [(float(one.value), one.parts) for one in rewards if not isinstance(one.value, Missing)]
        values, metrics = [value for value, _ in given], sorted({metric for _, parts in given for metric in parts})
        columns[name] = {
            "reward": mean(values),
            "  standard error": standard_error(values),
            **{f"  of {metric}": mean([parts.get(metric, 0.0) for _, parts in given]) for metric in metrics},
            "  of malformed turns": mean([0.0 if parts else value for value, parts in given]),  # which have no parts
            "turns without a reward": len(rewards) - len(given),
            f"ranked as by {first}": agreement(found[first], by_task),
        }
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    labels.sort(key=lambda label: label[:1] != " " and label != "reward")  # the parts of all, then what follows them
    width = max(map(len, labels))
    print(" " * width, *(f"{name:>10}" for name in columns))
    for label in labels:
        print(f"{label:{width}}", *(f"{_shown(column.get(label)):>10}" for column in columns.values()))


def _shown(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


def _write(file: Path, played: Sequence[Group], found: Mapping[str, Sequence[Sequence[Reward]]]) -> None:
    from megatron_collab.types import Missing

    with file.open("w") as out:
        for at, group in enumerate(played):
            for number in range(len(group.rollouts)):
                row: dict[str, Any] = {"task": group.task.id, "rollout": number}
                for name, rewards in found.items():
                    value, parts = rewards[at][number].value, rewards[at][number].parts
                    row[name] = {"missing": value.why} if isinstance(value, Missing) else {"reward": value, **parts}
                out.write(json.dumps(row) + "\n")
