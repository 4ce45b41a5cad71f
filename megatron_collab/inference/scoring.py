"""The SGLang servers of models that score conversations: reward models, served by the run beside its policy."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.inference.server import ServerError, ServerProcess, SGLangServer
from megatron_collab.models.parallel_layout import servers_per_node
from megatron_collab.runtime import hub
from megatron_collab.runtime.process import wait_for


@dataclass(frozen=True)
class ScoringModel:
    """A model that scores, how many servers it has, and over how many devices each is spread."""

    path: str  # a Hugging Face folder, or a name of the Hub
    replicas: int = 1
    tp: int = 1

    def fault(self) -> str | None:
        """Why the model gives no single score, with the way out; None also for a name that is not downloaded yet."""
        file = hub.folder(self.path) / "config.json"
        if not file.is_file():
            out = "give the folder of a Hugging Face model, or OWNER/NAME of the Hub"
            return None if hub.named(self.path) else f"{self.path}: no config.json there; {out}"
        described = json.loads(file.read_text())
        kind = next(iter(described.get("architectures") or ["none"]))
        if kind.endswith("ForRewardModel"):
            return None
        if not kind.endswith("ForSequenceClassification"):
            return (
                f"{self.path}: architecture {kind} gives no score; give a ForSequenceClassification or ForRewardModel"
            )
        outputs = len(described.get("id2label") or range(described.get("num_labels", 2)))  # transformers' default
        many = f"{self.path}: the model has {outputs} outputs; a reward model has one (num_labels in config.json)"
        return None if outputs == 1 else many


class ScoringServers(ExitStack):
    """The servers of a model, which start and end with the context; on the first node.

    On GPUs they have devices of their own, from number `first_device` on.
    """

    def __init__(self, config: Config, name: str, model: ScoringModel, first_device: int) -> None:
        super().__init__()
        # The settings of a server of its own: apart from the devices of the policy's, and of any port.
        options = replace(config.rollout.server, tp=model.tp, ep=1, fp8=False, colocated=False, port=0)
        options.replicas, options.max_total_tokens = model.replicas, None
        launch = replace(config.launch, nodes=1, nproc_per_node=first_device)
        self.config = replace(config, launch=launch, rollout=replace(config.rollout, server=options))
        self.config.model = replace(config.model, path=model.path)
        self.name, self._lost = name, 0
        self.servers: list[SGLangServer] = []
        self._restarted: dict[int, float] = {}  # by number, when those were that have ended since `ready` found one

    def __enter__(self) -> ScoringServers:
        start, folder = partial(ServerProcess, scores=True), Path(self.config.run.dir)
        with ExitStack() as stack:  # which ends those that are started where another one does not start
            for index in range(self.config.rollout.server.replicas):
                server = SGLangServer(self.config, folder / f"sglang-{self.name}-{index}.log", index, start)
                self.servers.append(stack.enter_context(server))
            self.callback(stack.pop_all().close)
        return self

    @property
    def addresses(self) -> list[tuple[str, str]]:
        """Address and key of each server."""
        return [(server.url, server.api_key) for server in self.servers]

    def wait_healthy(self) -> None:
        """Return once all score; ServerError where one ends first, or is not ready in time."""
        began, timeout = time.monotonic(), self.config.rollout.server.start_timeout
        for server in self.servers:
            server.wait_healthy(max(1.0, timeout - (time.monotonic() - began)))

    def watch(self) -> None:
        """Start those again that have ended, at their addresses; the others, where there are some, score meanwhile.

        Cheap.
        """
        for server in self.servers:
            if why := server.process.ended():
                print(f"engine: the server {server.index} of {self.name} is started again: {why}", flush=True)
                self._lost += 1
                server.restart()
                self._restarted[server.index] = time.monotonic()

    @property
    def lost_all(self) -> bool:
        """Whether every one has ended, by what `watch` found, since `ready` last found one that scores."""
        return len(self._restarted) == len(self.servers)

    def ready(self, seconds: float) -> bool:
        """Whether one scores, after `watch`; looks for about `seconds`. ServerError where none does in time."""
        if not self._restarted or wait_for(lambda: any(server.healthy() for server in self.servers), seconds):
            self._restarted.clear()
            return True
        timeout = self.config.rollout.server.start_timeout
        if time.monotonic() - max(self._restarted.values()) > timeout or not any(
            server.alive() for server in self.servers
        ):
            why = f"none was healthy again within rollout.server.start_timeout={timeout:g} s"
            raise ServerError(f"the servers of {self.name}: {why}; {self.servers[0].log_end()}")
        return False

    def take_counters(self) -> dict[str, float]:
        """How many were lost since the last call, as a metric of a step."""
        lost, self._lost = self._lost, 0
        return {f"servers/{self.name}_lost": float(lost)}


def first_device(config: Config) -> int:
    """The first device of a node that neither the trainer nor the policy's servers use."""
    server = config.rollout.server
    return config.launch.nproc_per_node + (0 if server.colocated else servers_per_node(config) * server.tp)
