"""The SGLang servers of a run and the Ray workers that talk to them: their start and end, and when they may sample."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.remote import Machines, RemoteProcess, SpreadProcess
from megatron_collab.inference.served import ModelServers, devices, first_device
from megatron_collab.inference.server import Process, ServerProcess, SGLangServer
from megatron_collab.models.parallel_layout import server_nodes, servers_per_node
from megatron_collab.reward import metrics
from megatron_collab.rollout.scheduler import answers
from megatron_collab.rollout.workers import Workers, start_workers
from megatron_collab.runtime import network
from megatron_collab.runtime.process import beat, global_rank
from megatron_collab.runtime.rank0 import from_leader, wait_until
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.trainer.megatron.parallel import run_store


class Servers(ExitStack):
    """Context manager: the `pool` of servers and the `workers`, both on rank 0 only.

    The first node's servers are children of rank 0, those of other nodes are held by Ray actors there. They are started
    first and awaited last, so that they load while Ray and its workers start. Once it is entered, colocated servers
    have released their memory to the trainer.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.pool: ServerPool | None = None
        self.workers: Workers | None = None
        self.served: list[ModelServers] = []

    def __enter__(self) -> Servers:
        """RunStopped where servers, Ray nodes or the ranks of other nodes do not start in time."""
        if global_rank() == 0:
            beat("the start of SGLang and Ray")
            with ExitStack() as stack:
                self._start(stack)
                self.callback(stack.pop_all().close)
        elif self.config.launch.nodes > 1:
            network.meet(self.config, run_store()[0])
        return self

    def _start(self, stack: ExitStack) -> None:
        config, options, began = self.config, self.config.rollout.server, time.monotonic()
        logs = [Path(config.run.dir) / f"sglang-{index}.log" for index in range(options.replicas)]
        sglang = f"SGLang (log: {', '.join(map(str, logs))}) and " if logs else ""  # none where another model is asked
        print(f"engine: starting {sglang}the Ray workers", flush=True)
        alone = servers_per_node(config) if options.nnodes == 1 else 0  # others need Ray to start
        servers = [stack.enter_context(SGLangServer(config, logs[index], index)) for index in range(alone)]
        device = first_device(config)
        for name, (_, model) in metrics.served_models(config).items():
            self.served.append(stack.enter_context(ModelServers(config, name, model, device)))
            device += devices(model)
        stack.enter_context(ray_session(config))
        if config.launch.nodes > 1:
            addresses, machines = network.meet(config, run_store()[0]), Machines(config)
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            for index in range(alone, options.replicas):
                places: list[Callable[..., ServerProcess | RemoteProcess]] = [
                    partial(RemoteProcess, machines, addresses[node]) if node else ServerProcess
                    for node in server_nodes(config, index)
                ]
                start: Callable[..., Process] = places[0] if len(places) == 1 else partial(SpreadProcess, places, store)
                servers.append(stack.enter_context(SGLangServer(config, logs[index], index, start)))
        keys = [(server.url, server.api_key) for server in servers]
        self.workers = start_workers(config, keys, {each.name: each.model for each in self.served})
        self.pool = ServerPool(servers, options, self._use)
        for pool in self._pools():
            pool.begin()
        urls = f" ({', '.join(server.url for server in servers)})" if servers else ""
        print(f"engine: ready after {time.monotonic() - began:.0f} s{urls}", flush=True)

    def _use(self, servers: Sequence[int]) -> None:
        """Have the workers ask these of the servers."""
        assert self.workers
        players = enumerate(self.workers.conversations)
        asked = {f"conversation-{n} to switch servers": p.use_servers.remote(servers) for n, p in players}
        answers(asked, self.config.launch.timeout / 2)

    def lost_all(self) -> bool:
        """Whether there was a time when the policy, since `recover`, or another model had no server left; on rank 0.

        Servers that have ended are started again. Cheap.
        """
        return any([pool.lost_all() for pool in self._pools()])  # all of them are looked at

    def wait_for_served(self) -> None:
        """Return once a server of every model beside the policy answers, with its memory; collective."""
        wait_until(lambda: all(model.ready(self.config.launch.timeout / 4) for model in self.served))

    def serve_loaded(self, version: int) -> None:
        """Sample from the weights that the servers loaded from model.path, as `version`, once one is up; collective."""
        self.wait_for_served()
        if self.config.rollout.server.replicas:
            wait_until(lambda: self.pool is None or self.pool.ready(self.config.launch.timeout / 4))
            from_leader(lambda: self.pool.serve_loaded(version) if self.pool else None)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the servers may take memory and sample; collective.

        On exit colocated servers have released their memory. With rollout.max_staleness > 0 servers go on sampling.
        One server of each model beside the policy is waited for.
        """
        try:
            self.wait_for_served()
            yield
            beat("the end of sampling")
            from_leader(self._rest)
            # The other ranks wait in a collective meanwhile.
            wait_until(lambda: all(pool.rested(self.config.launch.timeout / 4) for pool in self._pools()))
        except Exception:
            for pool in self._pools():
                pool.give_up()
            raise

    def take_counters(self) -> dict[str, float]:
        """Counts of lost and restarted servers since the last call, as metrics of a step; on rank 0."""
        return {name: count for pool in self._pools() for name, count in pool.take_counters().items()}

    def _rest(self) -> None:
        for pool in self._pools():
            pool.rest()

    def _pools(self) -> list[ServerPool]:
        """That of the policy, then those of the other models; none on ranks other than 0."""
        return [*([self.pool] if self.pool else []), *(model.pool for model in self.served)]
