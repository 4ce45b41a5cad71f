"""The SGLang servers of a run and the Ray workers that talk to them: their start and end, and when they may sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.remote import Machines, RemoteProcess
from megatron_collab.inference.scoring import ScoringServers, first_device
from megatron_collab.inference.server import SGLangServer
from megatron_collab.models.parallel_layout import servers_per_node
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
        self.scoring: list[ScoringServers] = []

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
        here = servers_per_node(config)
        servers = [stack.enter_context(SGLangServer(config, logs[index], index)) for index in range(here)]
        device = first_device(config)
        for name, model in metrics.served_models(config.reward).items():
            self.scoring.append(stack.enter_context(ScoringServers(config, name, model, device)))
            device += model.replicas * model.tp
        stack.enter_context(ray_session(config))
        if config.launch.nodes > 1:
            addresses, machines = network.meet(config, run_store()[0]), Machines(config)
            for index in range(here, options.replicas):
                remote = partial(RemoteProcess, machines, addresses[index // here])
                servers.append(stack.enter_context(SGLangServer(config, logs[index], index, remote)))
        keys = [(server.url, server.api_key) for server in servers]
        self.workers = start_workers(config, keys, {each.name: each.addresses for each in self.scoring})
        self.pool = ServerPool(servers, options, self._use)
        self.pool.begin()
        for scoring in self.scoring:
            scoring.wait_healthy()
        urls = f" ({', '.join(server.url for server in servers)})" if servers else ""
        print(f"engine: ready after {time.monotonic() - began:.0f} s{urls}", flush=True)

    def _use(self, servers: Sequence[int]) -> None:
        """Have the workers ask these of the servers."""
        assert self.workers
        players = enumerate(self.workers.conversations)
        asked = {f"conversation-{n} to switch servers": p.use_servers.remote(servers) for n, p in players}
        answers(asked, self.config.launch.timeout / 2)

    def lost_all(self) -> bool:
        """Whether there was a time when the policy, since `recover`, or a reward model had no server left; on rank 0.

        Servers that have ended are started again. Cheap.
        """
        assert self.pool
        for scoring in self.scoring:
            scoring.watch()
        return self.pool.lost_all() or any(scoring.lost_all for scoring in self.scoring)

    def wait_for_scores(self) -> None:
        """Return once a server of every reward model scores, those started again that have ended; collective."""
        for scoring in self.scoring:
            scoring.watch()
        wait_until(lambda: all(scoring.ready(self.config.launch.timeout / 4) for scoring in self.scoring))

    def serve_loaded(self, version: int) -> None:
        """Sample from the weights that the servers loaded from model.path, as `version`, once one is up; collective."""
        self.wait_for_scores()
        if self.config.rollout.server.replicas:
            wait_until(lambda: self.pool is None or self.pool.ready(self.config.launch.timeout / 4))
            from_leader(lambda: self.pool.serve_loaded(version) if self.pool else None)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the servers may take memory and sample; collective.

        On exit colocated servers have released their memory. With rollout.max_staleness > 0 servers go on sampling.
        One server of each reward model is waited for.
        """
        self.wait_for_scores()
        try:
            yield
            beat("the end of sampling")
            from_leader(lambda: self.pool.rest() if self.pool else None)
            # The other ranks wait in a collective meanwhile.
            wait_until(lambda: self.pool is None or self.pool.rested(self.config.launch.timeout / 4))
        except Exception:
            if self.pool:
                self.pool.give_up()
            raise

    def take_counters(self) -> dict[str, float]:
        """Counts of lost and restarted servers since the last call, as metrics of a step; on rank 0."""
        counted = self.pool.take_counters() if self.pool else {}
        return counted | {name: n for scoring in self.scoring for name, n in scoring.take_counters().items()}
