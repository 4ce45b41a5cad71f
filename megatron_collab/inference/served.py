"""Models beside the policy that the run serves: users, judges, and reward models, which give scores and no text."""

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

_SCORES = ("ForRewardModel", "ForSequenceClassification")  # how architectures end that give no text


def named(config: Config) -> dict[str, ServedConfig]:
    """The entries of `servers`. Raises ConfigError naming the setting that is refused."""
    found = {}
    for name, given in config.servers.items():
        group = f"servers.{name}"
        require(re.fullmatch(r"[\w-]+", name) is not None, f"{group}: name it with letters, digits, - and _")
        require(isinstance(given, dict), f"{group}={given}: give settings, as {{model: PATH}}")
        found[name] = build(ServedConfig, given, f"{group}.")
        message = f"{group}.model: not set; give a Hugging Face folder, or OWNER/NAME[@REVISION] of the Hub"
        require(bool(found[name].model), message)
    return found


def config_of(config: Config, model: ServedConfig, first_device: int) -> Config:
    """The settings of the servers of `model`, as if it were the policy; they are all on the first node.

    On GPUs they share the devices of its ranks in turn with the trainer (colocated), or have those from number
    `first_device` on.
    """
    options = replace(
        config.rollout.server, tp=model.tp, ep=model.ep, replicas=model.replicas, colocated=model.colocated, fp8=False
    )
    options.max_running_requests, options.max_total_tokens = model.max_running_requests, model.max_total_tokens
    options.args, options.port, options.nnodes = model.args, 0, 1
    ranks = config.launch.nproc_per_node if model.colocated else first_device
    launch = replace(config.launch, nodes=1, nproc_per_node=ranks)
    found = replace(config, launch=launch, rollout=replace(config.rollout, server=options))
    return replace(found, model=replace(config.model, path=model.model, lora=LoraConfig()))


def devices(model: ServedConfig) -> int:
    """How many devices its servers have to themselves."""
    return 0 if model.colocated else model.replicas * model.tp


def architecture(path: str) -> str | None:
    """The model's architecture; None where its folder has no config.json, as before a download. Raises ConfigError."""
    described = _described(path)
    return None if described is None else str(next(iter(described.get("architectures") or ["none"])))


def _described(path: str) -> dict[str, Any] | None:
    file = hub.folder(path) / "config.json"
    try:
        found = json.loads(file.read_text()) if file.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: config.json cannot be read as JSON ({error}); give another model") from error
    message = f"{path}: config.json holds no settings of a model; give another model"
    require(found is None or isinstance(found, dict), message)
    return found


def gives_text(path: str) -> bool:
    """Whether the model gives text; where it is not there yet, as far as one knows."""
    return not (architecture(path) or "").endswith(_SCORES)


def score_fault(path: str) -> str | None:
    """Why a model gives no single score, with the way out; None also for a name that is not downloaded yet."""
    kind = architecture(path)
    if kind is None:
        out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
        return None if hub.named(path) else f"{path}: no config.json there; {out}"
    if not kind.endswith(_SCORES):
        return f"{path}: architecture {kind} gives no score; give a ForSequenceClassification or ForRewardModel"
    if kind.endswith("ForRewardModel"):
        return None
    described = _described(path) or {}
    outputs = len(described.get("id2label") or range(described.get("num_labels", 2)))  # transformers' default
    many = f"{path}: the model has {outputs} outputs; a reward model has one (num_labels in config.json)"
    return None if outputs == 1 else many


class ModelServers(ExitStack):
    """The servers of one of these models, which start and end with the context; `pool` keeps them alive."""

    def __init__(self, config: Config, name: str, model: ServedConfig, first_device: int) -> None:
        super().__init__()
        self.config, self.name = config_of(config, model, first_device), name
        self.servers: list[SGLangServer] = []
        # They are at the same addresses for the whole run: who asks one that is away asks another one.
        self.pool = ServerPool(self.servers, self.config.rollout.server, lambda servers: None, name)

    def __enter__(self) -> ModelServers:
        serves = Serves.TEXT if gives_text(self.config.model.path) else Serves.SCORES
        start, folder = partial(ServerProcess, serves=serves), Path(self.config.run.dir)
        with ExitStack() as stack:  # which ends those that are started where another one does not start
            for index in range(self.config.rollout.server.replicas):
                server = SGLangServer(self.config, folder / f"sglang-{self.name}-{index}.log", index, start)
                self.servers.append(stack.enter_context(server))
            self.callback(stack.pop_all().close)
        return self

    @property
    def model(self) -> ServedModel:
        """For those that ask it."""
        return ServedModel(self.config.model.path, tuple((server.url, server.api_key) for server in self.servers))

    def ready(self, seconds: float) -> bool:
        """Whether a server answers, colocated ones with their memory; looks for about `seconds`.

        ServerError where one cannot be kept alive.
        """
        if not self.pool.ready(seconds):
            return False
        self.pool.wake()
        self.pool.recover()
        return not self.pool.lost_all()


def first_device(config: Config) -> int:
    """The first device of a node that neither the trainer nor the policy's servers use."""
    own = 0 if config.rollout.server.colocated else servers_per_node(config) * server_ranks_per_node(config)
    return config.launch.nproc_per_node + own
