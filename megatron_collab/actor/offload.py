"""Optimizer state and gradients off the device between two updates, so that the server has the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer


class Offload:
    """Takes the storage of optimizer state, float32 masters and gradients away and gives it back.

    The tensors stay the same objects, so every view of them is valid again afterwards. Gradients come back as zeros.
    Megatron's own offload gives the parameters of a float32 model a memory of their own, apart from the model's:
    it is not used.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._host: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def leave(self) -> None:
        if self._host:
            return
        trained = {parameter.untyped_storage().data_ptr() for chunk in self._chunks for parameter in chunk.parameters()}
        for storage in _storages(self._optimizer):
            if storage.data_ptr() not in trained:
                copy = torch.UntypedStorage(storage.nbytes())
                copy.copy_(storage)
                self._host.append((storage, copy))
                storage.resize_(0)
        for chunk in self._chunks:
            chunk.offload_grad_buffers()

    def come_back(self) -> None:
        for storage, copy in self._host:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        if self._host:
            for chunk in self._chunks:
                chunk.restore_grad_buffers()
        self._host.clear()


def _storages(optimizer: MegatronOptimizer) -> Iterator[torch.UntypedStorage]:
    """The storages of all states and parameters of the inner optimizers, each once."""
    seen = set()
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
