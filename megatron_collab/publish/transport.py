"""Weights to SGLang on the same machine: shared memory that every rank writes and the servers read.

Only a description travels over HTTP. The segments are made once and kept, as touching fresh pages costs far
more than copying; the process that torch starts beside us removes them when the last user is gone.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_collab.publish.plan import Bucket


class PublishError(RuntimeError):
    """The new weights did not reach every server; the message says where it failed."""


# The way of sharing is a setting of the process, and every server has a thread that sends to it.
_strategy_lock = threading.Lock()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share memory by name: descriptors can only be handed to children, and the server is none."""
    with _strategy_lock:
        strategy = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)


def _serialize(value: Any) -> bytes:
    with _shared_by_name():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(value)
        return buffer.getvalue()


def shared_segments(count: int, size: int) -> list[torch.Tensor]:
    """`count` uint8 tensors [size] in memory that all ranks of this machine share; collective."""
    segments: list[torch.Tensor] = []
    # A serialized tensor can be opened once: a copy for every other rank.
    copies: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        with _shared_by_name():
            segments = [torch.empty(size, dtype=torch.uint8).share_memory_() for _ in range(count)]
        copies[1:] = [[_serialize(segment) for segment in segments] for _ in copies[1:]]
    dist.broadcast_object_list(copies, src=0)
    return segments or [ForkingPickler.loads(copy) for copy in copies[dist.get_rank()]]


def views(segment: torch.Tensor, bucket: Bucket, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a bucket as they lie in `segment`, by name."""
    return {
        tensor.name: segment[tensor.offset :].view(dtype)[: _count(tensor.shape)].view(tensor.shape)
        for tensor in bucket.tensors
    }


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


class Link:
    """Rank 0's line to one server."""

    def __init__(self, url: str, api_key: str, tp: int, timeout: float) -> None:
        """`tp`: the server's tensor-parallel size; `timeout`: seconds that one call may take."""
        self.url, self.tp, self.timeout = url, tp, timeout
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def begin(self) -> None:
        """Stop sampling and open an update: requests under way are aborted, later ones wait."""
        self._post("/pause_generation", {"mode": "abort"})
        self._post("/begin_weight_update", {})

    def send(self, segment: torch.Tensor, bucket: Bucket, dtype: torch.dtype, last: bool) -> None:
        """Have the server load a bucket; returns when it no longer reads the segment."""
        metadata = []
        for tensor in bucket.tensors:
            size = _count(tensor.shape) * dtype.itemsize
            metadata.append(
                SimpleNamespace(
                    name=tensor.name,
                    shape=torch.Size(tensor.shape),
                    dtype=dtype,
                    start_idx=tensor.offset,
                    end_idx=tensor.offset + size,
                    numel=size,
                )
            )
        payload = {"flattened_tensor": segment, "metadata": metadata}
        # One serialization for each rank of the server: each can be opened once.
        copies = [base64.b64encode(_serialize(payload)).decode() for _ in range(self.tp)]
        self._post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": copies, "load_format": "flattened_bucket", "flush_cache": last},
        )

    def commit(self, version: int) -> None:
        """Close the update, name the weights, and sample again."""
        self._post("/end_weight_update", {})
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._post("/continue_generation", {})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        request = Request(self.url + path, json.dumps(body).encode(), self._headers)
        try:
            with urlopen(request, timeout=self.timeout) as answer:
                answer.read()
        except HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())
            raise PublishError(f"{self.url}{path}: status {error.code}: {reason[:300]}") from error
        except OSError as error:
            raise PublishError(f"{self.url}{path}: {error}") from error
