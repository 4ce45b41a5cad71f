"""A colocated server without SGLang: weights, a KV cache and a CUDA graph that reads both, in memory it can release.

`python -m tests.weight_sync.colocated DEVICE` reads one call per line, JSON [method, *arguments], and answers each with
a line. It needs torch-memory-saver's library preloaded, as SGLang's schedulers have it. On a CPU nothing is released:
memory only loses its contents.
"""

from __future__ import annotations

import json
import sys
from ast import literal_eval
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from megatron_collab.weight_sync.receiver import Receiver

WEIGHTS, CACHE = "weights", "kv_cache"  # tags of memory, as SGLang has them
LAYER_BYTES = 1 << 30  # of the cache


class Colocated:
    """The memory of a server on one device."""

    def __init__(self, device: str) -> None:
        self.device, self.saver, self.graph = torch.device(device), None, None
        if device == "cuda":
            from torch_memory_saver import torch_memory_saver

            self.saver, self.graph = torch_memory_saver, torch.cuda.CUDAGraph()
        self.memory: dict[str, dict[str, torch.Tensor]] = {}
        self.receiver: Receiver | None = None

    def allocate(self, parameters: Mapping[str, str], cache: int) -> None:
        """`parameters`: dtype and shape by name, as a Receiver has them; `cache`: bytes."""
        with self._region(WEIGHTS):
            types = ((name, *text.split(" ", 1)) for name, text in parameters.items())
            self.memory[WEIGHTS] = {
                name: torch.zeros(literal_eval(shape), dtype=getattr(torch, dtype), device=self.device)
                for name, dtype, shape in types
            }
        layers = max(1, cache // LAYER_BYTES)
        with self._region(CACHE):
            self.memory[CACHE] = {
                f"layer {number}": torch.zeros(cache // layers // 2, dtype=torch.bfloat16, device=self.device)
                for number in range(layers)
            }
        if self.graph is not None:
            self._sums()  # a first call loads kernels, which a capture forbids
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.captured = self._sums()

    def _region(self, tag: str) -> AbstractContextManager[None]:
        return self.saver.region(tag) if self.saver else nullcontext()

    def _sums(self) -> torch.Tensor:
        """The sum of every tensor, float32."""
        tensors = [tensor for tensors_of_tag in self.memory.values() for tensor in tensors_of_tag.values()]
        return torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])

    def pause(self) -> None:
        if self.saver:
            torch.cuda.synchronize()
            self.saver.pause(WEIGHTS)
            self.saver.pause(CACHE)

    def resume(self, tag: str) -> None:
        if self.saver:
            self.saver.resume(tag)
        for tensor in self.memory[tag].values():  # a stale value would pass for a published one
            tensor.fill_(torch.nan)

    def take(self, order: str) -> None:
        """Receive weights, by an order of the trainer (receiver.receive)."""
        parsed = json.loads(order)
        if "attach" in parsed:
            self.receiver = Receiver(**parsed["attach"])
        assert self.receiver is not None
        weights = self.memory[WEIGHTS]
        model: Any = SimpleNamespace(named_parameters=weights.items, named_modules=lambda: ())
        self.receiver.take(model, **parsed["take"])

    def replay(self, cached: float) -> list[list[float]]:
        """Fill the cache, then sum all memory by the graph and without it."""
        for layer in self.memory[CACHE].values():
            layer.fill_(cached)
        if self.graph is not None:
            self.graph.replay()
        by_graph = self._sums() if self.graph is None else self.captured
        return [by_graph.tolist(), self._sums().tolist()]


def main() -> None:
    server = Colocated(sys.argv[1])
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        with torch.no_grad():
            print(json.dumps(getattr(server, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
