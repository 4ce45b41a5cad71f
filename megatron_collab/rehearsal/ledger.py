"""Counts the memory of tensors on a simulated device: every storage once, from its first tensor to its last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HOST = "host"  # the part for tensors in host memory
PINNED = "pinned"  # the part for host memory that torch reserves for pinned tensors and never releases
PASSING = "temporaries"  # the part for unclaimed tensors


@dataclass
class MemoryUsage:
    """Bytes by part: of live storages `now`, and the `most` at once since `reset`."""

    now: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    peak: int = 0  # maximum over time of the sum of all parts on the device

    @property
    def total(self) -> int:
        return sum(size for part, size in self.now.items() if part not in (HOST, PINNED))

    def add(self, part: str, size: int) -> None:
        self.now[part] += size
        if size > 0:
            self.most[part] = max(self.most[part], self.now[part])
            self.peak = max(self.peak, self.total)


class Ledger(TorchDispatchMode):
    """A mode that books the storage of every new tensor under the current `part`.

    It wraps a FakeTensorMode, which creates the tensors. If the program reads a number from one, it gets 1, so sizes
    must not depend on values. A selection by a mask has the fraction `picked` of all elements.
    """

    def __init__(self, picked: float = 1.0) -> None:
        super().__init__()
        self.usage = MemoryUsage()
        self._picked = picked
        self.part = PASSING
        self._live: dict[int, _Storage] = {}
        self._free: Counter[int] = Counter()  # size -> number of reserved blocks that are free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if isinstance(args[0], FakeTensor):
                return args[0].dtype is torch.bool or (1.0 if args[0].dtype.is_floating_point else 1)
            with _disable_current_modes():
                return func(*args)
        if func is torch.ops.aten.masked_select.default and isinstance(args[0], FakeTensor):
            func, args = torch.ops.aten.new_empty.default, (args[0], [round(args[0].numel() * self._picked)])
        kwargs = kwargs or {}
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:  # impossible on a machine without a GPU
            kwargs = kwargs | {"pin_memory": False}
        result = func(*args, **kwargs)
        for tensor in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                if pinned:
                    self._pin(tensor)
                self._book(tensor, HOST if pinned else self.part)  # also for later views of a pinned tensor
        return result

    def _pin(self, tensor: Tensor) -> None:
        """Like torch's allocator: use a block of the next power of two, a free one if available."""
        block = 1 << (tensor.untyped_storage().nbytes() - 1).bit_length()
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.usage.add(PINNED, block)
        finalize(tensor.untyped_storage(), self._free.update, [block])

    def _book(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = _Storage(ref(storage), part, size)
        self.usage.add(part, size)
        finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        entry = self._live.pop(key)
        self.usage.add(entry.part, -entry.size)

    @contextmanager
    def booking(self, part: str) -> Iterator[None]:
        """Book tensors that are created inside the block under `part`."""
        previous, self.part = self.part, part
        try:
            yield
        finally:
            self.part = previous

    def claim(self, part: str, tensors: Iterable[Tensor | torch.UntypedStorage], booked: str | None = None) -> None:
        """Move these storages to `part`; with `booked`, only those under that part."""
        storages = [tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        self._move(part, [self._live[s._cdata] for s in storages if s._cdata in self._live], booked)

    def claim_all(self, part: str, booked: str) -> None:
        """Move all storages under part `booked` to `part`."""
        self._move(part, self._live.values(), booked)

    def _move(self, part: str, storages: Iterable[_Storage], booked: str | None) -> None:
        for entry in storages:
            if entry.part != part and booked in (None, entry.part):
                self.usage.add(entry.part, -entry.size)
                entry.part = part
                self.usage.add(part, entry.size)

    def update_sizes(self) -> MemoryUsage:
        """Update the sizes of all storages, since resizing bypasses torch's dispatcher."""
        for entry in self._live.values():
            storage = entry.storage()
            size = storage.nbytes() if storage is not None else 0
            self.usage.add(entry.part, size - entry.size)
            entry.size = size
        return self.usage

    def reset(self) -> None:
        """Restart `most` and `peak` from the current usage."""
        self.usage.most = Counter(self.usage.now)
        self.usage.peak = self.usage.total


@dataclass
class _Storage:
    storage: ref[torch.UntypedStorage]
    part: str
    size: int
