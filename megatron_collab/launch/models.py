"""Checks of a run's models before any process starts: headers of the weights, tokenizer, chat template."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from megatron_collab.algo.teacher_prompts import check_rendered
from megatron_collab.config import Config, PlayConfig
from megatron_collab.data import chat_template
from megatron_collab.inference.served import architecture, gives_text
from megatron_collab.launch import teacher
from megatron_collab.launch.spec import RunSpec
from megatron_collab.models import hf_config, hf_weights
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import hub
from megatron_collab.runtime.process import LAUNCHER, first_on_node
from megatron_collab.runtime.trial import TrialError, run_trial
from megatron_collab.settings import ConfigError, require

logger = logging.getLogger(__name__)

_SECONDS = 10.0  # an ordinary template takes a hundredth of this, with its tokenizer a tenth


def check_models(config: PlayConfig, spec: RunSpec, shape: ModelShape, weights: bool = True) -> None:
    """Checks model.path: `weights` of a model of `shape`, and a prompt; then the served models. Raises ConfigError.

    Runs once per node: in its first rank, or for all ranks in the process
    that becomes their torchrun.
    """
    if not _is_checking_process():
        return
    path = config.model.path
    try:
        if weights:
            hf_weights.model_tensors(hub.folder(path), shape)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    architecture(path, "model.path")  # refuses files that SGLang could not read
    _check_ids(path, "model.path", shape.vocab)
    check_rendering(spec, ())
    if mark := spec.data.prompt.renderer(()).plain_mark:
        text = "text of users, tools and tasks that contains it can imitate a turn (docs/security.md)"
        logger.warning(f"model.path={path}: its chat template marks turns by plain text such as {mark!r}: {text}")
    if isinstance(config, Config) and config.algo.teacher.place == "model":
        _try(partial(teacher.check_files, config), f"{teacher.SETTING}={config.algo.teacher.model}", "its tokenizer")
    if isinstance(config, Config) and config.algo.teacher.place == "server":
        teacher.check_server(config)
    if isinstance(config, Config) and config.algo.teacher.context:
        check_rendered(config.algo.teacher, spec.data.prompt.renderer(()))
    if spec.serving:
        check_served((model.setting, model.model) for model in spec.serving.by_name.values())


def check_rendering(spec: RunSpec, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError unless model.path's tokenizer and chat template render a prompt with these tools in time."""
    if _is_checking_process():
        path = spec.data.prompt.model
        chat_template.load_tokenizer(path, "model.path")  # loads it in this process, for the data readers
        _try(partial(_render, spec, tools), f"model.path={path}", "its chat template")


def _render(spec: RunSpec, tools: Sequence[Mapping[str, Any]]) -> None:
    renderer = spec.data.prompt.renderer(tools)
    if spec.play:  # the template must know the thoughts that rollout sets
        rollout = spec.play.rollout
        renderer.check_thinking(rollout.turn, rollout.future, rollout.strip_thoughts)


def check_served(models: Iterable[tuple[str, str]]) -> None:
    """As `check_models`, for models beside the policy: (group of its settings, model); only what SGLang requires."""
    for group, model in models if _is_checking_process() else ():
        setting, folder = f"{group}.model", hub.folder(model)
        text = gives_text(model, setting)
        try:
            shape = hf_config.read(folder / "config.json") if text else None
        except ValueError:  # a family or quantization that SGLang serves but the trainer does not support
            shape = None
        try:
            tensors = hf_weights.model_tensors(folder, shape) if shape else hf_weights.read(folder)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{setting}={model}: {error}") from error
        if (folder / "tokenizer.json").is_file():
            work = partial(_check_served, model, setting, hf_weights.embedding_rows(tensors))
            _try(work, f"{setting}={model}", "its tokenizer or chat template")


def _check_served(path: str, setting: str, rows: int | None) -> None:
    """Raises ValueError naming `setting` if a served model cannot render, or has tokens beyond its `rows` if known."""
    chat_template.render_once(path, setting)
    if rows is not None:
        _check_ids(path, setting, rows)


def _check_ids(path: str, setting: str, rows: int) -> None:
    """Raises ConfigError naming `setting` if a tokenizer has ids that the model's embedding of `rows` rows lacks."""
    vocabulary = chat_template.load_tokenizer(path, setting).get_vocab()
    token, last = max(vocabulary.items(), key=itemgetter(1), default=("", -1))
    message = f"its tokenizer gives {token!r} the id {last}, but its embedding has {rows} rows"
    out = "give the tokenizer of this model, or resize the embedding with transformers (resize_token_embeddings)"
    require(last < rows, f"{setting}={path}: {message}; {out}")


def _is_checking_process() -> bool:
    return first_on_node() and LAUNCHER not in os.environ


def _try(work: Callable[[], object], setting: str, part: str) -> None:
    try:
        run_trial(work, _SECONDS)
    except TrialError as error:
        raise ConfigError(f"{setting}: {part} {error}; give another model, or fix its files") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
