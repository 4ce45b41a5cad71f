"""What is refused, before a run starts, of the language models that it asks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_collab import patches
from megatron_collab.config import Config, ConfigError, LlmConfig, nearest, require
from megatron_collab.inference import served
from megatron_collab.llm import endpoint as endpoints
from megatron_collab.llm.price import Prices
from megatron_collab.llm.recording import SUFFIX, Recording
from megatron_collab.llm.tape import run_name
from megatron_collab.rollout import asked_models
from megatron_collab.rollout.asked_models import AskedModel
from megatron_collab.rollout.users.named import user_settings
from megatron_collab.runtime.process import global_rank


def check_settings(config: Config) -> None:
    """ConfigError for headers, extra arguments, prices and recordings that cannot be."""
    llm = config.llm
    for name in ("replay_missing", "replay_latency"):
        message = f"<llm.{name}>: nothing is replayed; set llm.replay, or remove it"
        require(bool(llm.replay) or getattr(llm, name) == getattr(LlmConfig, name), message, config)
    message = f"llm.record={llm.record}: is the recording that llm.replay answers from; choose another folder"
    same = llm.record and llm.replay and Path(llm.record).resolve() == Path(llm.replay).resolve()
    require(not same, message)
    for group, endpoint in {
        **user_settings(config),
        "reward.judge": config.reward.judge,
        **{each.group: each.endpoint for each in asked_models.of_assistant(config)},
        "assistant": config.assistant,
    }.items():
        endpoints.check_settings(endpoint, group, asked=not llm.offline)
    for model, prices in llm.prices.items():
        message = f"llm.prices.{model}={prices}: give USD per million tokens of prompts and of answers, as [2.5, 10]"
        numbers = [usd for usd in prices if isinstance(usd, int | float) and 0 <= usd < math.inf]
        require(len(prices) == len(numbers) == 2, message)


def check_recordings(config: Config) -> None:
    """ConfigError where llm.replay holds no recorded calls, or llm.record those of another run."""
    llm, others = config.llm, set[str]()
    setting = f"llm.replay={llm.replay}"
    try:
        for torn in Recording(Path(llm.replay)).torn if llm.replay else ():
            print(f"megatron-collab: llm.replay: {torn}", file=sys.stderr)
        setting = f"llm.record={llm.record}"
        if llm.record and any(Path(llm.record).glob(f"*{SUFFIX}")):
            others = Recording(Path(llm.record)).runs - {run_name(config)}
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting}: {error}; give another folder") from error
    require(not others, f"{setting}: holds calls of {', '.join(sorted(others))}; choose another folder")


def check_served(config: Config, asked: Sequence[AskedModel]) -> None:
    """ConfigError for served/NAME where no model of `servers` has the name, or it is one that gives no text."""
    for each in asked:
        model = str(each.endpoint.model)
        if not model.startswith(endpoints.SERVED):
            continue
        name, said = model.removeprefix(endpoints.SERVED), f"{each.setting}={model}"
        there = f"there are {', '.join(config.servers)}{nearest(name, config.servers)}"
        out = there if config.servers else f"set servers.{name}.model to the model that the run is to serve"
        require(name in config.servers, f"{said}: servers has no {name}; {out}")
        path = served.named(config)[name].model
        require(
            served.gives_text(path), f"{said}: servers.{name}.model={path} gives scores and no text; choose another"
        )


def check_prices(config: Config, asked: Sequence[AskedModel]) -> list[str]:
    """ConfigError where a budget would not hold, since a price is not known; without one, what is to be said of that.

    The run's own models and recorded answers cost nothing.
    """
    said: list[str] = []
    prices, llm = Prices(config.llm.prices), config.llm
    if llm.offline:
        return said
    if asked:
        patches.apply("litellm")
    for each in asked:
        model = str(each.endpoint.model)
        if endpoints.of_run(model) or prices.known(model):
            continue
        message = f"no price of {each.setting}={model} is known"
        out = f"set llm.prices='{{{model}: [INPUT, OUTPUT]}}' to its USD per million tokens (0 if it is free)"
        if llm.budget_usd is not None:
            raise ConfigError(f"llm.budget_usd={llm.budget_usd:g}: {message}; {out}, or llm.budget_usd=null")
        said.append(f"{message}, so what its calls cost is not; {out}")
    return said


def check_support(config: Config, asked: Sequence[AskedModel]) -> None:
    """ConfigError where every call would fail: LiteLLM refuses a setting of a model, or there is no way to reach it.

    Keys are looked for where a run starts: other nodes need them only as far as their workers make calls. None is
    needed where recorded calls alone answer.
    """
    if config.llm.offline:
        return
    if asked:
        patches.apply("litellm")
    for each in asked:
        endpoints.check_support(each.endpoint, each.setting, each.group)
        if global_rank() == 0:
            endpoints.check_access(each.endpoint, each.setting, each.group)
