"""Memory really allocated by one training step: storages of the state, and of activations while they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import finalize

import numpy as np
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models.hf_to_megatron import ModelShape
from megatron_collab.trainer.critic import _with_value_head
from megatron_collab.trainer.megatron import config as megatron_config
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.microbatches import make_micro_batches
from megatron_collab.trainer.network import Trainable


class Holder:
    """Adds up the storages of tensors, each once, while any holder keeps them."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self.most = 0
        self._bytes = 0
        self._users: Counter[int] = Counter()
        self._ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}

    def keep(self, tensor: Tensor, holder: object) -> None:
        """Count `tensor` as long as `holder` lives."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._ignored:
            return
        key, size = storage._cdata, storage.nbytes()
        self._users[key] += 1
        if self._users[key] == 1:
            self._bytes += size
            self.most = max(self.most, self._bytes)
        finalize(holder, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self._bytes -= size

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what autograd saves, what stages exchange, and the rotation, which recomputation keeps unsaved."""
        real, communicate = policies.rotated, P2PCommunicator._communicate

        def rotated(*arguments: object) -> object:
            rotation = real(*arguments)
            self.keep(rotation.cos, rotation)
            self.keep(rotation.sin, rotation)
            return rotation

        def exchanged(stages: P2PCommunicator, **options: Any) -> Any:
            received = communicate(stages, **options)
            for tensor in (options["tensor_send_next"], options["tensor_send_prev"], *received[:2]):
                if tensor is not None:
                    self.keep(tensor, tensor)
            return received

        with (
            saved_tensors_hooks(self._pack, lambda saved: saved.tensor),
            mock.patch.object(policies, "rotated", rotated),
            mock.patch.object(P2PCommunicator, "_communicate", exchanged),
        ):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self.keep(tensor, saved)
        return saved


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def allocated_bytes(config: Config, hf: dict[str, object], micro_batches: int, critic: bool = False) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer and activations of this rank in one step.

    Each data parallel rank has `micro_batches` full micro-batches of two sequences each. The SwiGLU is fused, as on a
    GPU.
    """
    shape = ModelShape.from_hf(hf)
    plain = megatron_config._fusions
    with mock.patch.object(
        megatron_config, "_fusions", lambda *arguments: plain(*arguments) | {"bias_activation_fusion": True}
    ):
        chunks = policies.build(network_spec(config), shape)
    chunks = _with_value_head(chunks) if critic else chunks
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    trainable = Trainable(chunks, config.optim, config.parallel.offload)
    tokens, parallel = config.train.tokens_per_micro_batch, config.parallel
    ranks = config.launch.nproc_per_node // (parallel.tp * parallel.pp)
    rng = np.random.default_rng(0)
    lengths = [tokens // 4 + 1, tokens - tokens // 4 + 1] * micro_batches * ranks  # each takes one position less
    columns = {
        "token_ids": [rng.integers(0, shape.vocab, size=length) for length in lengths],
        "loss_mask": [(np.arange(length) > 0).astype(np.float32) for length in lengths],
    }
    network, device = network_spec(config), next(trainable.chunks[0].parameters()).device
    batches = make_micro_batches(network, tokens, columns, device)
    assert [batch.token_ids.shape[1] for batch in batches] == [tokens] * micro_batches

    parameters = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    holder = Holder(parameters)
    with holder.saving():
        trainable.step(batches, lambda _, hidden: (hidden.float().sum(), None), lr=1e-3)

    buffers = [b for chunk in trainable.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    inner = [part.optimizer for part in trainable.optimizer.chained_optimizers]
    state = [value for optimizer in inner for values in optimizer.state.values() for value in values.values()]
    masters = [tensor for optimizer in inner for group in optimizer.param_groups for tensor in group["params"]]
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return {
        "parameters": _size(parameters),
        "gradients": _size(buffer.grad_data for buffer in buffers),
        "optimizer": _size(t for t in (*state, *masters) if t.untyped_storage().data_ptr() not in weights),
        "activations": holder.most,
    }


def _size(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
