"""The SGLang servers and Ray workers of a run: starting and stopping them, and when servers may sample."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.remote import Machines, RemoteProcess, SpreadProcess
from megatron_collab.inference.served import ModelServers
from megatron_collab.inference.server import Process, ServerProcess, SGLangServer
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.llm.busy import idle_share
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.workers import Workers, start_workers
from megatron_collab.runtime import network
from megatron_collab.runtime.process import beat, global_rank
from megatron_collab.runtime.rank0 import from_leader, wait_until
from megatron_collab.runtime.ray_cluster import raise_if_lost, ray_session
from megatron_collab.trainer.megatron.parallel import run_store

logger = logging.getLogger(__name__)

_SPANS_SECONDS = 2.0  # for workers to say when servers were busy; without one, the step has no such metric


class Servers(ExitStack):
    """Context manager with the `pool` of servers and the `workers`, both on rank 0 only.

    Servers on the first node are child processes of rank 0; servers on other nodes are started by Ray actors there.
    Servers are started first and awaited last, so that they load while Ray and its workers start. When `__enter__`
    returns, colocated servers have released their memory to the trainer.
    """

    def __init__(self, play: PlaySpec, serving: ServingSpec) -> None:
        super().__init__()
        self.play, self.serving = play, serving
        self.timeout = serving.policy.host.request_timeout  # seconds, a quarter of launch.timeout
        self.pool: ServerPool | None = None
        self.workers: Workers | None = None
        self.served: list[ModelServers] = []

    def __enter__(self) -> Servers:
        """Raises RunStopped if servers, Ray nodes or the ranks of other nodes do not start in time."""
        if global_rank() == 0:
            beat("the start of SGLang and Ray")
            with ExitStack() as stack:
                self._start(stack)
                self.callback(stack.pop_all().close)
        elif self.serving.policy.placement.nodes > 1:
            self._meet()
        return self

    def _start(self, stack: ExitStack) -> None:
        play, policy, placement = self.play, self.serving.policy, self.serving.policy.placement
        began = time.monotonic()
        logs = [policy.log(index) for index in range(placement.replicas)]
        sglang = f"SGLang (log: {', '.join(map(str, logs))}) and " if logs else ""  # no logs: assistant.model is used
        logger.info(f"engine: starting {sglang}the Ray workers")
        local_count = placement.per_node if placement.nnodes == 1 else 0  # the others are started through Ray
        servers = [stack.enter_context(SGLangServer(policy, logs[index], index)) for index in range(local_count)]
        self.served += [stack.enter_context(ModelServers(spec)) for spec in self.serving.by_name.values()]
        processes = play.rollout.workers + play.reward.workers
        stack.enter_context(ray_session(processes, placement.nodes, policy.host.start_timeout))
        if placement.nodes > 1:
            addresses, machines = self._meet(), Machines(policy.host.interface)
            store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            for index in range(local_count, placement.replicas):
                places: list[Callable[..., ServerProcess | RemoteProcess]] = [
                    partial(RemoteProcess, machines, addresses[node]) if node else ServerProcess
                    for node in placement.nodes_of(index)
                ]
                start: Callable[..., Process] = places[0] if len(places) == 1 else partial(SpreadProcess, places, store)
                servers.append(stack.enter_context(SGLangServer(policy, logs[index], index, start)))
        keys = [(server.url, server.api_key) for server in servers]
        models = {other.spec.name: other.model for other in self.served}
        self.workers = start_workers(play, self.serving.client, keys, models)
        self.pool = ServerPool(servers, policy, self._use)
        for pool in self._pools():
            pool.begin()
        urls = f" ({', '.join(server.url for server in servers)})" if servers else ""
        logger.info(f"engine: ready after {time.monotonic() - began:.0f} s{urls}")

    def _meet(self) -> list[str]:
        """The addresses of all nodes, on rank 0; called by all ranks."""
        policy = self.serving.policy
        return network.meet(policy.placement.nodes, policy.host.interface, policy.host.start_timeout, run_store()[0])

    def _use(self, servers: Sequence[int]) -> None:
        """Make the workers use these servers."""
        assert self.workers
        self.workers.use_servers(servers, 2 * self.timeout)

    def lost_all(self) -> bool:
        """Whether the policy (since `recover`) or another model has had no server; on rank 0.

        Restarts servers that have ended. Cheap. Raises RunStopped if Ray's own processes have ended.
        """
        raise_if_lost()
        return any([pool.lost_all() for pool in self._pools()])  # a list, so that every pool is checked

    def wait_for_served(self) -> None:
        """Return when every model other than the policy has a server that answers and has its memory; collective."""
        wait_until(lambda: all(model.ready(self.timeout) for model in self.served))

    def serve_loaded(self, version: int) -> None:
        """Sample from the weights that servers loaded from model.path, as `version`, once one is ready; collective."""
        self.wait_for_served()
        if self.serving.policy.placement.replicas:
            wait_until(lambda: self.pool is None or self.pool.ready(self.timeout))
            from_leader(lambda: self.pool.serve_loaded(version) if self.pool else None)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Context manager in which the servers may use memory and sample; collective.

        Entering waits for a server of each model other than the policy. On exit, colocated servers have released their
        memory; others keep sampling if rollout.max_staleness > 0.
        """
        try:
            self.wait_for_served()
            yield
            beat("the end of sampling")
            from_leader(self._release_memory)
            # The other ranks wait in a collective meanwhile.
            wait_until(lambda: all(pool.asleep(self.timeout) for pool in self._pools()))
        except Exception:
            for pool in self._pools():
                pool.give_up()
            raise

    def take_counters(self) -> dict[str, float]:
        """Numbers of lost and restarted servers since the last call, as metrics of a step; on rank 0."""
        return {name: count for pool in self._pools() for name, count in pool.take_counters().items()}

    def idle_shares(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Shares of a step, from 0 to 1, in which the policy's servers and the trainer have nothing to do, as metrics.

        `seconds`: of the step's stages, which end now, see Stopwatch.read. `idle/trainer`: the stages rollout and
        evaluation, in which the ranks wait for conversations. `idle/servers`: see llm/busy.py; a server that is being
        restarted is idle. It is absent on ranks other than 0, without servers, and if a worker does not answer. It
        lacks the calls of a worker before Ray restarted it.
        """
        step = sum(seconds.values())
        if not step:
            return {}
        waited = sum(seconds.get(f"seconds/{stage}", 0.0) for stage in ("rollout", "evaluation"))
        shares = {"idle/trainer": waited / step}
        now = time.time()
        spans = self.workers.busy_since(now - step, _SPANS_SECONDS) if self.workers else None
        if spans is not None and self.pool and (urls := [server.url for server in self.pool.servers]):
            shares["idle/servers"] = idle_share(spans, urls, now - step, now)
        return shares

    def _release_memory(self) -> None:
        for pool in self._pools():
            pool.sleep()

    def _pools(self) -> list[ServerPool]:
        """The pool of the policy, then the pools of other models; empty on ranks other than 0."""
        return [*([self.pool] if self.pool else []), *(model.pool for model in self.served)]
