"""Tries the code that settings name in a child process, before anything else calls it.

An import, a constructor, or a method that a class answers before the start, may never end, crash, or take gigabytes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_collab import patches
from megatron_collab.algo.advantages import make_advantage
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.algo.turn_credit import make_turn_credit
from megatron_collab.config import Config, PlayConfig
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.data.examples import TaskReader
from megatron_collab.environments import World
from megatron_collab.launch.play_specs import reward_spec, tool_spec, user_directory
from megatron_collab.observability.writers import writer_kinds
from megatron_collab.reward.metrics import Judge, Metric, ScoredMetric
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.player import Player
from megatron_collab.rollout.tools import Toolset
from megatron_collab.rollout.tools.mcp_server import McpTools
from megatron_collab.rollout.tools.toolbox import check_schema
from megatron_collab.runtime.process import LAUNCHER, first_on_node
from megatron_collab.runtime.side_loop import LateCall
from megatron_collab.runtime.trial import Steps, TrialError, run_trial
from megatron_collab.settings import ConfigError, RolloutConfig, build
from megatron_collab.settings.extension import load_module, make, modules, resolve, texts

SECONDS = 120.0  # of each call; imports of large libraries take half a minute on a slow disk
_FOREIGN = ("verl", ".yaml", ".yml")  # kinds and files that name classes in forms of their own
_metrics = list[Metric]()  # by the child until it ends: a session that is dropped unclosed would complain


def check_extensions(config: PlayConfig, *, constructs: bool) -> None:
    """Raises ConfigError, naming the setting, if an import or a call crashes, or takes too long or too much memory.

    A ConfigError is left to the check that calls the same code later. `constructs`: whether the program makes the
    world, unless its folder exists, a reader of tasks, and metrics, if conversations are played.
    """
    if LAUNCHER in os.environ or not first_on_node():
        return
    settings = asdict(config) | {"reward.weights": [*config.reward.weights]}
    named = list(modules(settings))
    if not named and not any(text.endswith(_FOREIGN) for _, text in texts(settings)):
        return
    steps = Steps()
    try:
        run_trial(partial(_call_all, config, named, steps, constructs), SECONDS, steps=steps)
    except (TrialError, ValueError) as error:
        reason = error if isinstance(error, TrialError) else f"fails (ValueError: {error})"
        raise ConfigError(f"{steps.current[1]} {reason}; mend it, or leave it out") from error


def _call_all(config: PlayConfig, named: Sequence[tuple[str, str]], steps: Steps, constructs: bool) -> None:
    """In the child: import all modules, make what the checks make, and ask classes about their options."""

    def attempt(name: str, function: Callable[..., Any], *args: Any) -> Any:
        steps.enter(0, name)
        try:
            return function(*args)
        except ConfigError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from error
            if isinstance(error.__cause__, LateCall):  # its caller would wait as long again
                raise
            return None

    for label, location in named:
        attempt(f"{label}: importing {location}", load_module, location, label)
    data, plays = config.data, not isinstance(config, Config) or config.train.stage == "rl"
    constructed: list[tuple[str, str | None, type, Mapping[str, Any]]] = [
        ("data.world", _missing_world(config), World, data.world_options),
        ("data.format", data.format, TaskReader, data.format_options),
    ]
    for setting, spec, base, options in constructed if constructs else ():
        if spec and ":" in spec:
            attempt(f"{setting}={spec}: making it", make, spec, setting, base, options, f"{setting}_options.")
    if ":" in config.rollout.player:
        attempt("rollout.player_options: reading them", _check_player, config.rollout)
    tools = attempt("rollout.tools: making them", tool_spec, config.rollout)
    for toolset in tools.toolsets if tools else ():
        name = type(toolset).__name__
        if not isinstance(toolset, McpTools):  # whose servers are asked later
            attempt(f"rollout.tools: schemas of {name}", _check_schemas, toolset)
        if config.rollout.futures:
            attempt(f"rollout.tools: check_copies() of {name}", toolset.check_copies)
    directory = attempt("users: making them", user_directory, config)
    sets = attempt("data.eval: reading its sets", evaluation_sets, config.data.eval, 1) or ()
    names = dict.fromkeys([*config.users, config.user.name, *(eval_set.user for eval_set in sets)])
    for name in filter(None, names) if directory else ():
        users = directory if name in config.users else directory.for_set(name)
        if user := attempt(f"user {name}: making it", users.find, name):
            for method in ("unavailable", "asks"):
                label = f"user {name}: {method}() of {user.kind.__name__}"
                attempt(label, getattr(user.kind, method), user.argument, user.settings)
    reward = attempt("reward.weights: making the metrics", reward_spec, config.reward)
    for name, metric in reward.metrics.items() if reward else ():
        for method in ("answer_lead", "judged", "reads_tokens", "scores_turns", "served", "unavailable"):
            label = f"reward.weights.{name}: {method}() of {metric.kind.__name__}"
            attempt(label, getattr(metric.kind, method), metric.options)
    named_metrics = _named_metrics(reward) if reward and constructs and plays else {}
    judge = attempt("reward.judge: making its client", _judge, reward) if named_metrics else None
    for name, metric in named_metrics.items():
        attempt(f"reward.weights.{name}: making {metric.kind.__name__}", _construct, metric, judge)
    attempt("run.writers: reading their options", writer_kinds, config.run)
    if not isinstance(config, Config) or config.train.stage != "rl":
        return
    algo = config.algo
    attempt(f"algo.advantage={algo.advantage}: making it", make_advantage, algo)
    label = f"reward.turn_credit={config.reward.turn_credit}: making it"
    if credit := attempt(label, make_turn_credit, config.reward):
        attempt(f"reward.turn_credit: turn_metrics of {type(credit).__name__}", getattr, credit, "turn_metrics")
    if ":" in algo.loss:
        settings = algo.loss, "algo.loss", PolicyLoss, algo.loss_options, "algo.loss_options."
        attempt(f"algo.loss={algo.loss}: making it", make, *settings)


def _check_player(rollout: RolloutConfig) -> None:
    player: type[Player] = resolve(rollout.player, "rollout.player", Player)
    build(player.Options, rollout.player_options, "rollout.player_options.")


def _missing_world(config: PlayConfig) -> str | None:
    """The world that is made, since its folder does not exist."""
    return config.data.world if config.data.dir and not Path(config.data.dir).exists() else None


def _named_metrics(reward: RewardSpec) -> dict[str, ScoredMetric]:
    """Those that settings name as package.module:Class."""
    return {name: metric for name, metric in reward.metrics.items() if ":" in str(metric.settings.get("metric", name))}


def _judge(reward: RewardSpec) -> Judge | None:
    """As of a RewardWorker, without limits and cache."""
    if not any(metric.judged for metric in reward.metrics.values()):
        return None
    patches.apply("litellm")
    from megatron_collab.llm.client import LlmClient  # imports LiteLLM, which takes seconds

    return Judge(LlmClient(), reward.judge)


def _construct(metric: ScoredMetric, judge: Judge | None) -> None:
    """As a RewardWorker will, when nothing can be refused any more: in an event loop."""

    async def make_metric() -> Metric:
        return metric.make(judge)

    try:
        _metrics.append(asyncio.run(make_metric()))
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _check_schemas(toolset: Toolset) -> None:
    for schema in toolset.schemas:
        check_schema(schema)
