"""Checks of the language models that a run calls, before it starts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_collab import patches
from megatron_collab.config import CallConfig
from megatron_collab.inference.served import gives_text
from megatron_collab.launch import server_specs
from megatron_collab.llm import endpoint as endpoints
from megatron_collab.llm.price import Prices
from megatron_collab.llm.recording import SUFFIX, Recording
from megatron_collab.llm.tape import run_name
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.runtime.process import global_rank
from megatron_collab.settings import ConfigError, LlmConfig, UserConfig, nearest, require

logger = logging.getLogger(__name__)


def check_settings(config: CallConfig, users: Mapping[str, UserConfig] = {}) -> None:
    """Raises ConfigError for invalid headers, extra arguments, prices and recordings."""
    llm = config.llm
    for name in ("replay_missing", "replay_latency"):
        message = f"llm.{name}={getattr(llm, name)}: nothing is replayed; set llm.replay, or remove it"
        require(bool(llm.replay) or getattr(llm, name) == getattr(LlmConfig, name), message)
    message = f"llm.record={llm.record}: is also llm.replay; choose another folder"
    same = llm.record and llm.replay and Path(llm.record).resolve() == Path(llm.replay).resolve()
    require(not same, message)
    for group, user in users.items():
        endpoints.check_settings(user, group, in_use=not llm.offline)
    endpoints.check_settings(config.reward.judge, "reward.judge", in_use=not llm.offline)
    for model, prices in llm.prices.items():
        message = f"llm.prices.{model}={prices}: give USD per million tokens of prompts and of answers, e.g. [2.5, 10]"
        numbers = [usd for usd in prices if isinstance(usd, int | float) and 0 <= usd < math.inf]
        require(len(prices) == len(numbers) == 2, message)


def check_assistants(llm: LlmConfig, assistants: Sequence[NamedEndpoint]) -> None:
    """Raises ConfigError for invalid headers and extra arguments of the models that replace the policy."""
    for assistant in assistants:
        endpoints.check_settings(assistant.endpoint, assistant.group, in_use=not llm.offline)


def check_recordings(llm: LlmConfig, run_dir: Path) -> None:
    """Raises ConfigError if llm.replay contains no recorded calls, or llm.record contains calls of another run."""
    other_runs = set[str]()
    setting = f"llm.replay={llm.replay}"
    try:
        for torn in Recording(Path(llm.replay)).torn if llm.replay else ():
            logger.warning(f"llm.replay: {torn}")
        setting = f"llm.record={llm.record}"
        if llm.record and any(Path(llm.record).glob(f"*{SUFFIX}")):
            other_runs = Recording(Path(llm.record)).runs - {run_name(run_dir)}
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting}: {error}; give another folder") from error
    require(not other_runs, f"{setting}: holds calls of {', '.join(sorted(other_runs))}; choose another folder")


def check_served(config: CallConfig, language_models: Sequence[NamedEndpoint]) -> None:
    """Raises ConfigError for served/NAME if `servers` has no model NAME, or that model does not generate text."""
    for language_model in language_models:
        model = str(language_model.endpoint.model)
        if not model.startswith(endpoints.SERVED):
            continue
        name, label = model.removeprefix(endpoints.SERVED), f"{language_model.setting}={model}"
        available = f"there are {', '.join(config.servers)}{nearest(name, config.servers)}"
        out = available if config.servers else f"set servers.{name}.model to the model that the run is to serve"
        require(name in config.servers, f"{label}: servers has no {name}; {out}")
        path = server_specs.server_entries(config)[name].model
        served = f"servers.{name}.model"
        require(gives_text(path, served), f"{label}: {served}={path} outputs scores, not text; choose another")


def check_prices(config: CallConfig, language_models: Sequence[NamedEndpoint]) -> list[str]:
    """Raises ConfigError if a budget is set and a price is unknown; without a budget, returns warnings instead.

    The run's own models and recorded answers are free.
    """
    lines: list[str] = []
    prices, llm = Prices(config.llm.prices), config.llm
    if llm.offline:
        return lines
    if language_models:
        patches.apply("litellm")
    for language_model in language_models:
        model = str(language_model.endpoint.model)
        if endpoints.served_by_run(model) or prices.known(model):
            continue
        message = f"the price of {language_model.setting}={model} is unknown"
        out = f"set llm.prices='{{{model}: [INPUT, OUTPUT]}}' to its USD per million tokens (0 if it is free)"
        if llm.budget_usd is not None:
            raise ConfigError(f"llm.budget_usd={llm.budget_usd:g}: {message}; {out}, or llm.budget_usd=null")
        lines.append(f"{message}, and so is the cost of its calls; {out}")
    return lines


def check_support(config: CallConfig, language_models: Sequence[NamedEndpoint]) -> None:
    """Raises ConfigError if every call would fail: LiteLLM rejects a setting of a model, or address or key is missing.

    Only rank 0 checks for keys: other nodes need them only if their workers make calls. With llm.replay and no live
    calls, none are needed.
    """
    if config.llm.offline:
        return
    if language_models:
        patches.apply("litellm")
    for language_model in language_models:
        endpoints.check_support(language_model.endpoint, language_model.setting, language_model.group)
        if global_rank() == 0:
            endpoints.check_access(language_model.endpoint, language_model.setting, language_model.group)
