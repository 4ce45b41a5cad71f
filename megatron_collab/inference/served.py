"""Models besides the policy that the run serves: users, judges, and reward models, which return scores, not text."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.llm.served import ServedModel
from megatron_collab.runtime import files, hub
from megatron_collab.settings import ConfigError
from megatron_collab.settings.documents import parse_json

_SCORES = ("ForRewardModel", "ForSequenceClassification")  # suffixes of architectures that return no text


def architecture(path: str, setting: str) -> str | None:
    """The model's architecture; None if its folder has no config.json, as before a download.

    Raises ConfigError naming `setting` if its files describe no model.
    """
    try:
        return _architecture(path)
    except ValueError as error:
        raise ConfigError(f"{setting}={path}: {error}; give another model") from error


def gives_text(path: str, setting: str) -> bool:
    """Whether the model returns text; True if it is not downloaded yet. Raises ConfigError as `architecture`."""
    return not (architecture(path, setting) or "").endswith(_SCORES)


def score_fault(path: str) -> str | None:
    """Why the model does not return one score, and how to fix it; None if it does, or is not downloaded yet."""
    try:
        kind, settings = _architecture(path), _model_settings(path) or {}
    except ValueError as error:
        return f"{path}: {error}; give another model"
    if kind is None:
        out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
        return None if hub.parse(path) else f"{path}: no config.json there; {out}"
    if not kind.endswith(_SCORES):
        return f"{path}: architecture {kind} has no score; give a ForSequenceClassification or ForRewardModel"
    if kind.endswith("ForRewardModel"):
        return None
    outputs = len(settings.get("id2label") or range(settings.get("num_labels", 2)))  # transformers' default
    message = f"{path}: the model has {outputs} outputs; a reward model has one (num_labels in config.json)"
    return None if outputs == 1 else message


def _architecture(path: str) -> str | None:
    settings = _model_settings(path)
    return None if settings is None else str(next(iter(settings.get("architectures") or ["none"])))


def _model_settings(path: str) -> dict[str, Any] | None:
    """The content of config.json, if it is there. Raises ValueError."""
    for name in ("generation_config.json", "config.json"):  # SGLang reads both
        file = hub.folder(path) / name
        try:
            settings = parse_json(files.read_text(file)) if file.is_file() else None
        except ValueError as error:
            raise ValueError(f"{name} cannot be read as JSON ({error})") from error
        if not isinstance(settings, dict | None):
            raise ValueError(f"{name} does not describe a model")
    return settings


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
