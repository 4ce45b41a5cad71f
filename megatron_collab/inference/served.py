"""Models besides the policy that the run serves: users, judges, and reward models, which return scores, not text."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from megatron_collab.config import ConfigError, require
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.llm.served import ServedModel
from megatron_collab.runtime import files, hub

_SCORES = ("ForRewardModel", "ForSequenceClassification")  # suffixes of architectures that return no text


def architecture(path: str) -> str | None:
    """The model's architecture; None if its folder has no config.json, as before a download. Raises ConfigError."""
    settings = _model_settings(path)
    return None if settings is None else str(next(iter(settings.get("architectures") or ["none"])))


def _model_settings(path: str) -> dict[str, Any] | None:
    for name in ("generation_config.json", "config.json"):  # SGLang reads both
        file = hub.folder(path) / name
        try:
            settings = json.loads(files.read_text(file)) if file.is_file() else None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: {name} cannot be read as JSON ({error}); give another model") from error
        message = f"{path}: {name} does not describe a model; give another model"
        require(settings is None or isinstance(settings, dict), message)
    return settings


def gives_text(path: str) -> bool:
    """Whether the model returns text; True if it is not downloaded yet."""
    return not (architecture(path) or "").endswith(_SCORES)


def score_fault(path: str) -> str | None:
    """Why the model does not return one score, and how to fix it; None if it does, or is not downloaded yet."""
    kind = architecture(path)
    if kind is None:
        out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
        return None if hub.parse(path) else f"{path}: no config.json there; {out}"
    if not kind.endswith(_SCORES):
        return f"{path}: architecture {kind} has no score; give a ForSequenceClassification or ForRewardModel"
    if kind.endswith("ForRewardModel"):
        return None
    settings = _model_settings(path) or {}
    outputs = len(settings.get("id2label") or range(settings.get("num_labels", 2)))  # transformers' default
    message = f"{path}: the model has {outputs} outputs; a reward model has one (num_labels in config.json)"
    return None if outputs == 1 else message


class ModelServers(ExitStack):
    """The servers of one of these models. They start and end with the context; `pool` keeps them alive."""

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.servers: list[SGLangServer] = []
        # Their addresses never change, so nothing is announced: if one is down, its clients try another.
        self.pool = ServerPool(self.servers, spec, lambda servers: None)

    def __enter__(self) -> ModelServers:
        with ExitStack() as stack:  # if one fails to start, ends those that have started
            for index in range(self.spec.placement.replicas):
                server = SGLangServer(self.spec, self.spec.log(index), index)
                self.servers.append(stack.enter_context(server))
            self.callback(stack.pop_all().close)
        return self

    @property
    def model(self) -> ServedModel:
        """The model's path and its servers, for clients."""
        return ServedModel(self.spec.model, tuple((server.url, server.api_key) for server in self.servers))

    def ready(self, seconds: float) -> bool:
        """Whether a server answers; colocated servers get their memory back. Waits for about `seconds`.

        Raises ServerError if a server cannot be kept alive.
        """
        if not self.pool.ready(seconds):
            return False
        self.pool.wake()
        self.pool.recover()
        return not self.pool.lost_all()
