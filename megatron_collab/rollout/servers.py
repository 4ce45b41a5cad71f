"""The SGLang servers of a run and the Ray workers that talk to them: their start and end, and when they may sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.remote import Machines, RemoteProcess
from megatron_collab.inference.server import SGLangServer
from megatron_collab.models.parallel_layout import servers_per_node
from megatron_collab.rollout.scheduler import answers
from megatron_collab.rollout.workers import Workers, start_workers
from megatron_collab.runtime import heartbeat, network
from megatron_collab.runtime.process import global_rank
from megatron_collab.runtime.rank0 import from_leader, wait_until
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.trainer.megatron.parallel import run_store


class Servers:
    """Context manager: the `pool` of servers and the `workers`, both on rank 0 only.

    The first node's servers are children of rank 0, those of other nodes are held by Ray actors there. They are started
    first and awaited last, so that they load while Ray and its workers start. Once it is entered, colocated servers
    have released their memory, so that the trainer can take it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool: ServerPool | None = None
        self.workers: Workers | None = None
        self._look = config.launch.timeout / 4  # seconds: the other ranks wait in a collective meanwhile
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
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
                self.workers = start_workers(self.config, [(server.url, server.api_key) for server in servers])
                self.pool = ServerPool(servers, options, partial(_tell, self.workers, self.config.launch.timeout / 2))
                self.pool.begin()
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

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the servers may take memory and sample; collective.

        On exit colocated servers have released their memory. With rollout.max_staleness > 0 servers go on sampling.
        """
        try:
            yield
            heartbeat.at("the end of sampling")
            from_leader(lambda: self._of_rank_0.rest())
            wait_until(lambda: self._of_rank_0.rested(self._look))
        except Exception:
            if self.pool:
                self.pool.give_up()
            raise

    def take_counters(self) -> dict[str, float]:
        """What happened to servers since the last call, as metrics of a step; on rank 0."""
        return self.pool.take_counters() if self.pool else {}

    @property
    def _of_rank_0(self) -> ServerPool:
        assert self.pool is not None
        return self.pool

    def _elsewhere(self, logs: Sequence[Path]) -> Iterator[SGLangServer]:
        """Start the servers of the other nodes."""
        if self.config.launch.nodes == 1:
            return
        addresses, machines = network.meet(self.config, run_store()[0]), Machines(self.config)
        here = servers_per_node(self.config)
        for index, log in list(enumerate(logs))[here:]:
            there = partial(RemoteProcess, machines, addresses[index // here])
            yield SGLangServer(self.config, log, index, there)


def _tell(workers: Workers, seconds: float, servers: Sequence[int]) -> None:
    players = enumerate(workers.conversations)
    answers({f"conversation-{n} to hear of its servers": p.use_servers.remote(servers) for n, p in players}, seconds)
