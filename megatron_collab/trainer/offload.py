"""Offloading: optimizer state and gradients leave the device between two updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


class Offload:
    """Offloads optimizer state, float32 masters and gradients to host memory, and brings them back.

    The tensors stay the same objects, so every view of them is valid again afterwards. Gradients come back as zeros.
    The copies in host memory are kept for the next time. Megatron's own offload gives the parameters of a float32
    model a memory of their own, apart from the model's: it is not used.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def leave(self) -> None:
        for storage in self._storages():
            copy = self._kept.setdefault(storage._cdata, torch.UntypedStorage(storage.nbytes()))
            copy.copy_(storage)
            self._away.append((storage, copy))
            storage.resize_(0)
        for chunk in self._chunks:
            chunk.offload_grad_buffers()

    def come_back(self) -> None:
        for storage, copy in self._away:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._away.clear()
        for chunk in self._chunks:
            chunk.restore_grad_buffers()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Storages of the states and parameters of the inner optimizers, each once, without those of the model."""
        buffers = [buffer for chunk in self._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        seen = {buffer.param_data.untyped_storage()._cdata for buffer in buffers}
        for part in self._optimizer.chained_optimizers:
            inner = part.optimizer
            tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    yield storage
