"""A trainer and a colocated server take turns with the memory of one device, in two processes, without SGLang.

As in a run: the server releases its weights and its KV cache, the trainer allocates what it trains with and frees it,
the server gets its weights' memory back and receives new ones, then its cache's, and samples by its CUDA graph.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.runtime import device
from megatron_collab.weight_sync import in_place
from megatron_collab.weight_sync.plan import BUCKET_BYTES
from megatron_collab.weight_sync.sync import WeightSync
from tests.fork_server import REPOSITORY
from tests.helpers import policy_servers
from tests.weight_sync.colocated import WEIGHTS
from tests.weight_sync.test_families import free
from tests.weight_sync.test_receiver import (  # noqa: F401  # one_rank: a fixture
    LLAMA,
    Fleet,
    configure,
    one_rank,
)

ROUNDS = 5
# Of the device's memory: the server's weights and cache, and all that the trainer holds while it trains. Together they
# are more than there is. An H100 has 16, 32 and 60 GiB of them.
WEIGHTS_SHARE, CACHE_SHARE, TRAINING_SHARE = 0.2, 0.4, 0.75
CPU_BYTES = 64 << 20
WIDTHS = {
    "cpu": replace(LLAMA, hidden=256, ffn=768, heads=2),
    "cuda": replace(LLAMA, hidden=4096, ffn=12_288, heads=32, kv_heads=8, vocab=32_768),
}
BUCKETS = {"cpu": 1 << 20, "cuda": BUCKET_BYTES}


class Server:
    """The process of tests.weight_sync.colocated, as a ThreadCall and the pool know a server."""

    url, api_key, tp, index, generation = "http://server0", "key", 1, 0, 0

    def __init__(self, device_type: str) -> None:
        self.calls: list[str] = []
        command = [sys.executable, "-m", "tests.weight_sync.colocated", device_type]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with preloaded(device_type):
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=dict(os.environ), text=True, **pipes)

    def ask(self, method: str, *arguments: Any) -> Any:
        print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def follow(self, rank: int, order: str) -> None:
        self.ask("take", order)

    def resume(self, tag: str) -> None:
        self.ask("resume", tag)

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(60) == 0


def preloaded(device_type: str) -> Any:
    """In the block, processes are started with the hook of torch-memory-saver, as SGLang starts its schedulers."""
    if device_type == "cpu":
        return nullcontext()
    if not (saver := device.probe("memory_saver")).available:
        pytest.skip(f"needs torch-memory-saver: {saver.detail}")
    import torch_memory_saver

    return torch_memory_saver.configure_subprocess()


def nbytes(shape: ModelShape) -> int:
    """In bfloat16."""
    return 2 * sum(map(prod, hf_to_megatron.hf_shapes(shape).values()))


def as_large_as(size: int, width: ModelShape) -> ModelShape:
    """As many layers of this width as fit into `size` bytes."""
    alone, layer = nbytes(replace(width, layers=1)), nbytes(replace(width, layers=2)) - nbytes(replace(width, layers=1))
    return replace(width, layers=1 + (size - alone) // layer)


@pytest.mark.processes
def test_memory_goes_to_the_trainer_and_back(
    device_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Five times: all of it is free in between, and the server's CUDA graph reads new weights where the old were."""
    device.free_cache()  # of earlier tests
    total = torch.cuda.mem_get_info()[1] if device_type == "cuda" else CPU_BYTES
    shape = as_large_as(int(total * WEIGHTS_SHARE), WIDTHS[device_type])
    config = configure("memory", servers=1)
    config.launch.device, config.launch.nproc_per_node = device_type, 1
    config.rollout.server.tp = config.rollout.server.ep = 1
    shards = {
        entry.megatron: torch.nn.Parameter(
            torch.randn(hf_to_megatron.shard_shape(entry, 1), dtype=torch.bfloat16, device=device_type)
        )
        for entry in hf_to_megatron.table(shape)
    }
    monkeypatch.setattr(in_place, "named_shards", lambda chunks: shards.items())
    servers, cache, training = policy_servers(config), int(total * CACHE_SHARE), int(total * TRAINING_SHARE)
    parameters, _ = in_place.parameters_of(shape, servers.layout, 0, servers.dtype)
    seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds[phase] += time.monotonic() - began

    server = Server(device_type)
    fleet: Any = Fleet([server])  # type: ignore[list-item]
    with WeightSync(sync_spec(config), servers, [], shape, fleet, BUCKETS[device_type]) as sync, torch.no_grad():
        server.ask("allocate", parameters, cache)
        sync.publish(0)
        sums, _ = server.ask("replay", 0)
        for number in range(1, ROUNDS + 1):
            before = free(device_type)
            with timed("release"):
                server.ask("pause")
            released = free(device_type) - before
            assert device_type == "cpu" or released >= 0.99 * (nbytes(shape) + cache)
            with timed("allocate"):
                activations = torch.empty(training - nbytes(shape), dtype=torch.uint8, device=device_type)
                device.synchronize(activations)
            activations.fill_(number)
            for shard in shards.values():
                shard.mul_(-1.5)
            with timed("free"):
                del activations
                device.free_cache()
            with timed("resume"):
                server.resume(WEIGHTS)
            with timed("publish"):
                sync.publish(number)  # compares checksums, and gives the cache's memory back
            assert not fleet.reasons and server.calls[-1] == "/continue_generation"
            with timed("replay"):
                by_graph, eager = server.ask("replay", number)
            assert by_graph == eager and all(map(float.__ne__, by_graph, sums))
            sums = by_graph
    server.close()
    for phase, whole in seconds.items():
        record_property(f"{phase} s", f"{whole / ROUNDS:.3f}")
    record_property("GiB of weights", f"{nbytes(shape) / 2**30:.1f}")
    record_property("GiB of cache", f"{cache / 2**30:.1f}")
    record_property("GiB of training", f"{training / 2**30:.1f}")
    record_property("publish GB/s", f"{ROUNDS * nbytes(shape) / seconds['publish'] / 1e9:.1f}")
