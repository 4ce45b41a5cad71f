"""The models of a run, read before any process starts: what their weights' headers say, tokenizer, chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_collab.config import Config, ConfigError
from megatron_collab.data import chat_template
from megatron_collab.inference.served import gives_text
from megatron_collab.models import hf_config, hf_weights
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.reward import metrics
from megatron_collab.runtime import hub
from megatron_collab.runtime.process import LAUNCHER, first_on_node
from megatron_collab.runtime.trial import TrialError, tried

_SECONDS = 10.0  # of which an ordinary template takes a hundredth, with its tokenizer a tenth


def check_models(config: Config, shape: ModelShape, weights: bool = True) -> None:
    """ConfigError unless model.path holds the `weights` of a model of `shape`, and gives a prompt; and what is served.

    Once a node: its first rank does it, and the process that becomes its torchrun has done it for all ranks.
    """
    if not _asked():
        return
    path = config.model.path
    try:
        if weights:
            hf_weights.of_model(hub.folder(path), shape)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    check_rendering(config, ())
    check_served(config)


def check_rendering(config: Config, tools: Sequence[Mapping[str, Any]]) -> None:
    """ConfigError unless tokenizer and chat template of model.path give a prompt, with these tools, in a short time."""
    if _asked():
        path = config.model.path
        chat_template.load_tokenizer(path, "model.path")  # here, for the readers of the data
        _try(partial(chat_template.policys, config, tools), f"model.path={path}", "its chat template")


def check_served(config: Config) -> None:
    """As `check_models`, for the models beside the policy that are served, as far as SGLang needs the same of them."""
    for group, model in metrics.served_models(config).values() if _asked() else ():
        setting, folder = f"{group}.model", hub.folder(model.model)
        try:
            shape = hf_config.read(folder / "config.json") if gives_text(model.model) else None
        except ValueError:  # of a family, or quantised in a way, that SGLang serves and that is not trained here
            shape = None
        try:
            hf_weights.of_model(folder, shape) if shape else hf_weights.read(folder)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{setting}={model.model}: {error}") from error
        if (folder / "tokenizer.json").is_file():
            work = partial(chat_template.render_once, model.model, setting)
            _try(work, f"{setting}={model.model}", "its tokenizer or chat template")


def _asked() -> bool:
    return first_on_node() and LAUNCHER not in os.environ


def _try(work: Callable[[], object], setting: str, what: str) -> None:
    try:
        tried(work, _SECONDS)
    except TrialError as error:
        raise ConfigError(f"{setting}: {what} {error}; give another model, or mend its files") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
