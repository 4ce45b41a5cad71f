"""What rank 0 holds while sampling: the SGLang servers and the Ray workers that talk to them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from megatron_collab import launch
from megatron_collab.config import Config
from megatron_collab.observe.run import Run
from megatron_collab.publish.hf_map import ModelShape
from megatron_collab.publish.publisher import Publisher
from megatron_collab.reward.loop import ray_session
from megatron_collab.rollout.collector import Collector
from megatron_collab.rollout.sglang import SGLangServer
from megatron_collab.rollout.worker import Crew, start_crew


class Engine:
    """Context manager; on ranks other than 0 it holds nothing.

    The servers are started first and awaited last: they load while Ray and its workers come up.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.servers: list[SGLangServer] = []
        self.crew: Crew | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Engine:
        if launch.global_rank() == 0:
            with self._stack:
                options, began = self.config.rollout.server, time.monotonic()
                logs = [Path(self.config.run.dir) / f"sglang-{index}.log" for index in range(options.replicas)]
                print(f"engine: starting SGLang (log: {', '.join(map(str, logs))}) and the Ray workers", flush=True)
                for index, log in enumerate(logs):
                    self.servers.append(self._stack.enter_context(SGLangServer(self.config, log, index)))
                self._stack.enter_context(ray_session(self.config))
                endpoints = [(server.url, server.api_key) for server in self.servers]
                self.crew = start_crew(self.config, endpoints)
                for server in self.servers:
                    server.wait_healthy(options.start_timeout)
                print(f"engine: ready after {time.monotonic() - began:.0f} s", flush=True)
                self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def publisher(self, policy: list[torch.nn.Module], shape: ModelShape) -> Publisher:
        """What carries the weights of `policy` to every server; on every rank."""
        return Publisher(self.config, policy, shape, self.servers)

    def collector(self, run: Run) -> Collector:
        """What asks the workers for batches; on every rank."""
        return Collector(self.config, self.crew, run)
