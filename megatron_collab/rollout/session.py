"""What samples: on rank 0 the SGLang servers and the Ray workers that talk to them, and when they may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_collab.config import Config
from megatron_collab.inference.pool import Fleet
from megatron_collab.inference.remote import Machines, RemoteProcess
from megatron_collab.inference.sglang import SGLangServer
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.models.parallel_layout import servers_per_node
from megatron_collab.observability.run import Run
from megatron_collab.reward.workers import ray_session
from megatron_collab.rollout.manager import Collector
from megatron_collab.rollout.scheduler import answers
from megatron_collab.rollout.workers import Crew, start_crew
from megatron_collab.runtime import heartbeat, network
from megatron_collab.runtime.process import global_rank
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.trainer.megatron.parallel import run_store
from megatron_collab.weight_sync.sync import Publisher, PublishError

PUBLISHES = 3  # tries to publish a version before the run ends: all servers may fail at once


class Engine:
    """Context manager; on ranks other than 0 it holds nothing.

    The first node's servers are children of rank 0, those of other nodes are held by Ray actors there. They are started
    first and awaited last: they load while Ray and its workers come up. Colocated ones have given their memory back
    when it is entered, so that the trainer can take it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fleet: Fleet | None = None
        self.crew: Crew | None = None
        self._look = config.launch.timeout / 4  # seconds: the other ranks wait in a collective meanwhile
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        """RunStopped where servers, Ray nodes or the ranks of other nodes do not come in time."""
        if global_rank() == 0:
            heartbeat.at("the start of SGLang and Ray")
            with self._stack:
                options, began = self.config.rollout.server, time.monotonic()
                logs = [Path(self.config.run.dir) / f"sglang-{index}.log" for index in range(options.replicas)]
                print(f"engine: starting SGLang (log: {', '.join(map(str, logs))}) and the Ray workers", flush=True)
                here = servers_per_node(self.config)
                started = (SGLangServer(self.config, log, index) for index, log in enumerate(logs[:here]))
                servers = [self._stack.enter_context(server) for server in started]
                self._stack.enter_context(ray_session(self.config))
                servers += [self._stack.enter_context(server) for server in self._elsewhere(logs)]
                self.crew = start_crew(self.config, [(server.url, server.api_key) for server in servers])
                self.fleet = Fleet(servers, options, partial(_tell, self.crew, self.config.launch.timeout / 2))
                self.fleet.begin()
                urls = ", ".join(server.url for server in servers)
                print(f"engine: ready after {time.monotonic() - began:.0f} s ({urls})", flush=True)
                self._stack = self._stack.pop_all()
        elif self.config.launch.nodes > 1:
            network.meet(self.config, run_store()[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _elsewhere(self, logs: Sequence[Path]) -> Iterator[SGLangServer]:
        """Start the servers of the other nodes."""
        if self.config.launch.nodes == 1:
            return
        addresses, machines = network.meet(self.config, run_store()[0]), Machines(self.config)
        here = servers_per_node(self.config)
        for index, log in list(enumerate(logs))[here:]:
            there = partial(RemoteProcess, machines, addresses[index // here])
            yield SGLangServer(self.config, log, index, there)

    def publisher(self, policy: list[torch.nn.Module], shape: ModelShape) -> Publisher:
        """What carries the weights of `policy` to every server; on every rank."""
        return Publisher(self.config, policy, shape, self.fleet)

    def collector(self, run: Run, publisher: Publisher, state: Mapping[str, Any]) -> Collector:
        """What asks the workers for batches; on every rank. `state` is what a checkpoint kept of it."""
        return Collector(self.config, self.crew, run, self.lacking, partial(self.revive, publisher), state)

    @contextmanager
    def sampling(self, publisher: Publisher, version: int) -> Iterator[None]:
        """Within it the servers sample from the policy's present weights, which are `version`; collective.

        Colocated servers have their memory within it only. With rollout.max_staleness they go on sampling after it.
        """
        try:
            self._publish(publisher, version)
            if self.fleet and not self.config.rollout.max_staleness:
                self.fleet.recover()  # nothing was in flight by then
            yield
            heartbeat.at("the end of sampling")
            from_leader(lambda: self._led().rest())
            self._wait(lambda: self._led().rested(self._look))
        except Exception:
            if self.fleet:
                self.fleet.give_up()
            raise

    def lacking(self) -> bool:
        """On rank 0: whether there was a time, since the last `revive`, when no server was left that could sample.

        Without staleness that is since `sampling` was entered.
        """
        assert self.fleet is not None
        self.fleet.watch()
        return self.fleet.lacked

    def revive(self, publisher: Publisher) -> None:
        """While sampling: wait for a server that was started again and give it the present version; collective."""
        assert publisher.version is not None
        self._publish(publisher, publisher.version)
        if self.fleet:
            self.fleet.recover()

    def take_counters(self) -> dict[str, float]:
        """What happened to servers since the last call, as metrics of a step; on rank 0."""
        return self.fleet.take_counters() if self.fleet else {}

    def _publish(self, publisher: Publisher, version: int) -> None:
        """Publish, again where all servers were lost on the way, and have the workers ask who has the weights."""
        heartbeat.at(f"the publish of version {version}")
        for tried in range(1, PUBLISHES + 1):
            self._wait(lambda: self._led().ready(self._look))
            try:
                publisher.publish(version)
                break
            except PublishError:
                if tried == PUBLISHES:
                    raise
        from_leader(lambda: self._led().serve())

    def _wait(self, look: Callable[[], bool]) -> None:
        """Return once rank 0 sees what it looks for; collective, a look at a time, since none may take too long."""
        while not from_leader(look):
            pass

    def _led(self) -> Fleet:
        assert self.fleet is not None
        return self.fleet


def _tell(crew: Crew, seconds: float, servers: Sequence[int]) -> None:
    players = enumerate(crew.conversations)
    answers({f"conversation-{n} to hear of its servers": p.use_servers.remote(servers) for n, p in players}, seconds)
