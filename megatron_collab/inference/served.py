"""Models besides the policy that the run serves: users, judges, and reward models, which return scores, not text."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_collab.config import Config, ConfigError, LoraConfig, ServedConfig, build, require
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.server import ServerProcess, Serves, SGLangServer
from megatron_collab.llm.served import ServedModel
from megatron_collab.models.parallel_layout import server_ranks_per_node, servers_per_node
from megatron_collab.runtime import hub

_SCORES = ("ForRewardModel", "ForSequenceClassification")  # suffixes of architectures that return no text


def server_entries(config: Config) -> dict[str, ServedConfig]:
    """The entries of `servers`. Raises ConfigError naming the setting that is refused."""
    models = {}
    for name, settings in config.servers.items():
        group = f"servers.{name}"
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{group}: name it with letters, digits, - and _")
        require(isinstance(settings, dict), f"{group}={settings}: give settings such as {{model: PATH}}")
        models[name] = build(ServedConfig, settings, f"{group}.")
        message = f"{group}.model: not set; give a Hugging Face folder, or OWNER/NAME[@REVISION] of the Hub"
        require(bool(models[name].model), message)
    return models


def config_of(config: Config, model: ServedConfig, first_device: int) -> Config:
    """The settings of the servers of `model`, as if it were the policy; all of them are on the first node.

    On GPUs, colocated servers share the devices of the node's ranks with the trainer, in turn; others use the devices
    from `first_device` on.
    """
    options = replace(
        config.rollout.server, tp=model.tp, ep=model.ep, replicas=model.replicas, colocated=model.colocated, fp8=False
    )
    options.max_running_requests, options.max_total_tokens = model.max_running_requests, model.max_total_tokens
    options.args, options.port, options.nnodes = model.args, 0, 1
    ranks = config.launch.nproc_per_node if model.colocated else first_device
    launch = replace(config.launch, nodes=1, nproc_per_node=ranks)
    with_server = replace(config, launch=launch, rollout=replace(config.rollout, server=options))
    return replace(with_server, model=replace(config.model, path=model.model, lora=LoraConfig()))


def devices(model: ServedConfig) -> int:
    """Number of devices that only its servers use."""
    return 0 if model.colocated else model.replicas * model.tp


def architecture(path: str) -> str | None:
    """The model's architecture; None if its folder has no config.json, as before a download. Raises ConfigError."""
    settings = _model_settings(path)
    return None if settings is None else str(next(iter(settings.get("architectures") or ["none"])))


def _model_settings(path: str) -> dict[str, Any] | None:
    file = hub.folder(path) / "config.json"
    try:
        settings = json.loads(file.read_text()) if file.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: config.json cannot be read as JSON ({error}); give another model") from error
    message = f"{path}: config.json does not describe a model; give another model"
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

    def __init__(self, config: Config, name: str, model: ServedConfig, first_device: int) -> None:
        super().__init__()
        self.config, self.name = config_of(config, model, first_device), name
        self.servers: list[SGLangServer] = []
        # Their addresses never change, so nothing is announced: if one is down, its clients try another.
        self.pool = ServerPool(self.servers, self.config.rollout.server, lambda servers: None, name)

    def __enter__(self) -> ModelServers:
        serves = Serves.TEXT if gives_text(self.config.model.path) else Serves.SCORES
        start, folder = partial(ServerProcess, serves=serves), Path(self.config.run.dir)
        with ExitStack() as stack:  # if one fails to start, ends those that have started
            for index in range(self.config.rollout.server.replicas):
                server = SGLangServer(self.config, folder / f"sglang-{self.name}-{index}.log", index, start)
                self.servers.append(stack.enter_context(server))
            self.callback(stack.pop_all().close)
        return self

    @property
    def model(self) -> ServedModel:
        """The model's path and its servers, for clients."""
        return ServedModel(self.config.model.path, tuple((server.url, server.api_key) for server in self.servers))

    def ready(self, seconds: float) -> bool:
        """Whether a server answers; colocated servers get their memory back. Waits for about `seconds`.

        Raises ServerError if a server cannot be kept alive.
        """
        if not self.pool.ready(seconds):
            return False
        self.pool.wake()
        self.pool.recover()
        return not self.pool.lost_all()


def first_device(config: Config) -> int:
    """The first device of a node that neither the trainer nor the policy's servers use."""
    server = 0 if config.rollout.server.colocated else servers_per_node(config) * server_ranks_per_node(config)
    return config.launch.nproc_per_node + server
