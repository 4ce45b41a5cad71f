"""Runs in every SGLang process that holds weights: receives new weights into the model's parameters.

SGLang calls `receive` (server.WEIGHT_LOADER) with an order that the trainer sent over HTTP. The bytes arrive through
the run's transport, bucket by bucket; each slice is copied to its place once. Connections persist.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_collab.runtime.device import synchronize
from megatron_collab.weight_sync.encoding import Index, alike, checksum, placed, read, spans, views
from megatron_collab.weight_sync.store_protocol import Address, SyncStore, connect
from megatron_collab.weight_sync.transports.base import ReceiverSetup, Transport, TransportReceiver

logger = logging.getLogger(__name__)
_receiver: Receiver | None = None

Copies = list[tuple[list[Tensor], list[Tensor]]]  # (blocks of parameters, slices of a bucket)


@torch.no_grad()
def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Execute an order, which is the name of the only tensor, as JSON.

    `attach`, if present, has the arguments of a new Receiver; `take` those of Receiver.take. The result is written
    to the store. Never raises: an exception would end SGLang without an answer to the trainer.
    """
    global _receiver
    order = json.loads(named_tensors[0][0])
    try:
        if "attach" in order:
            _receiver = None  # frees its memory first
            _receiver = Receiver(**order["attach"])
        assert _receiver is not None
        _receiver.take(model, **order["take"])
    except Exception:
        logger.exception("weights were not received")


class Row(NamedTuple):
    """A slice: `target` [bounds] lies at `offset` of a bucket, `size` bytes, written by trainer rank `source`."""

    source: int
    target: str
    bounds: Sequence[tuple[int, int]]
    offset: int
    size: int
    quantized: bool

    def placed(self, parameters: Mapping[str, Tensor]) -> list[tuple[Tensor, str, Index]]:
        """The blocks of the parameters that this slice fills, with their names and indices."""
        index = tuple(slice(*bound) for bound in self.bounds)
        return [(parameters[name][at], name, at) for name, at in placed(self.target, index, self.quantized)]


class Receiver:
    """A server rank's side of weight syncs: its plan, its parameters and its transport."""

    def __init__(
        self,
        *,
        store: tuple[str, int],
        prefix: str,
        timeout: float,
        server: int,
        rank: int,
        dtype: str,
        parameters: Mapping[str, str],
        constants: Mapping[str, float],
        rounds: Sequence[Sequence[Sequence[Any]]],
        transport: str,
        arguments: Mapping[str, Any],
    ) -> None:
        """`store`, `prefix`: see store_protocol.connect; `server`, `rank`: of this process; `dtype`: of slices.

        `parameters`: dtype and shape of every parameter, by name, exactly those that the server must have;
        `constants`: values of parameters that are filled with a number instead of being sent; `rounds`: the rows of
        each bucket. Buckets arrive through `transport`, as module:Class or FILE.py:Class, whose receiver takes
        `arguments`.
        """
        self._address: Address = (store[0], store[1])
        self._store = connect(self._address, prefix, timeout)
        self._prefix, self._timeout, self._server, self._rank = prefix, timeout, server, rank
        self._dtype = getattr(torch, dtype)
        self._parameters, self._constants = parameters, constants
        self._rounds = [[Row(*row) for row in rows] for rows in rounds]
        self._spec, self._arguments = transport, arguments
        self._transport: TransportReceiver | None = None
        self._copies: dict[int, tuple[int, Copies]] = {}  # by bucket: its address and the copies from it
        self._pointers: list[int] = []  # addresses of the parameters that _copies writes to

    def take(self, model: torch.nn.Module, publish: int, first: int, verify: bool) -> None:
        """Load the weights of publish number `publish`, rounds `first` and later, into the model.

        `verify`: report the checksum of the weights after loading.
        Raises ValueError if the parameters differ from the plan, RuntimeError if the trainer stops sending.
        """
        store = SyncStore(self._store, publish)
        try:
            parameters = loaded_parameters(model)
            if self._transport is None:
                check_parameters(parameters, self._parameters)
                self._transport = self._open(store, next(iter(parameters.values())).device)
            pointers = [parameter.data_ptr() for parameter in parameters.values()]
            if pointers != self._pointers:  # SGLang may replace parameters after it has loaded weights
                self._copies, self._pointers = {}, pointers
            for name, value in self._constants.items():  # at every publish: releasing memory discards them
                parameters[name].fill_(value)
            for number, bucket in enumerate(self._transport.buckets(store, first), first):
                if self._copies.get(number, (0,))[0] != bucket.data_ptr():
                    copies = self._plan(parameters, self._rounds[number], bucket)
                    self._copies[number] = bucket.data_ptr(), copies
                for places, slices in self._copies[number][1]:
                    torch._foreach_copy_(places, slices)
                synchronize(bucket)  # the bucket may be overwritten as soon as the next one is requested
            blocks = (block for rows in self._rounds[first:] for row in rows for block in row.placed(parameters))
            total = read(checksum(*block) for block in blocks) if verify else 0
        except Exception as error:
            self._transport, self._pointers = None, []  # the senders detect the lost transport
            with suppress(RuntimeError):  # the trainer may have ended
                store.abandon(self._server, [self._rank])
                store.answer(self._server, self._rank, {"error": f"{type(error).__name__}: {error}"})
            raise
        store.answer(self._server, self._rank, {"checksum": total})

    def _open(self, store: SyncStore, device: torch.device) -> TransportReceiver:
        parts = [spans((row.source, row.offset, row.size) for row in rows) for rows in self._rounds]
        setup = ReceiverSetup(
            store, self._address, self._prefix, self._timeout, self._server, self._rank, parts, device
        )
        return receiver_class(self._spec)(setup, **self._arguments)

    def _plan(self, parameters: Mapping[str, Tensor], rows: Sequence[Row], bucket: Tensor) -> Copies:
        """Cached by the caller: in a small model these views would take a tenth of the time of the copies."""
        return planned_copies(parameters, rows, bucket, self._dtype)


def receiver_class(spec: str) -> type[TransportReceiver]:
    """The receiver of the transport module:Class or FILE.py:Class."""
    location, _, name = spec.rpartition(":")
    if location.endswith(".py"):
        # Imported here: Hydra, which it imports, takes a third of a second, and the shipped transports are modules.
        from megatron_collab.settings.extension import resolve

        receiver: type[TransportReceiver] = resolve(spec, "publish.transport", Transport).receiver
        return receiver
    module: Any = importlib.import_module(location)
    receiver = getattr(module, name).receiver
    return receiver


def loaded_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of a server's rank, by the names of hf_to_sglang.py.

    LoRA's A and B of every layer are in slots; the last slot has the run's adapters (inference/adapters.py).
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_a"):
            parameters |= {f"{name}.lora_a": layer.lora_a[-1], f"{name}.lora_b": layer.lora_b[-1]}
    return parameters


def check_parameters(parameters: Mapping[str, Tensor], planned: Mapping[str, str]) -> None:
    """Raises ValueError if a parameter is missing in the plan or differs from it: it would keep old weights."""
    actual = {name: f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for name, tensor in parameters.items()}
    for name in sorted(actual.keys() | planned.keys()):
        actual_type, planned_type = actual.get(name, "missing"), planned.get(name, "no such parameter")
        if actual_type != planned_type:
            raise ValueError(f"the server's parameter {name} is {actual_type}; the trainer's plan has {planned_type}")


def planned_copies(parameters: Mapping[str, Tensor], rows: Sequence[Row], bucket: Tensor, dtype: torch.dtype) -> Copies:
    """Copies to make from `bucket` (uint8) once it is written; `dtype`: of the slices."""
    targets: list[Tensor] = []
    slices: list[Tensor] = []
    for row in rows:
        blocks = [block for block, _, _ in row.placed(parameters)]
        targets += blocks
        slices += views(bucket[row.offset : row.offset + row.size], blocks[0].shape, dtype, row.quantized)
    return alike(targets, slices)
