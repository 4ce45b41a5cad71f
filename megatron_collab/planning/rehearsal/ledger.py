"""Counts what tensors hold on a device that does not exist: every storage once, from its first tensor to its last."""

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

HOST = "host"  # the part of what is in host memory
PINNED = "pinned"  # of what torch has reserved of it for tensors in pinned memory, which it does not give back
PASSING = "temporaries"  # of what nobody has claimed


@dataclass
class Held:
    """Bytes of the storages that live now, and the most at once since `reset`, by part."""

    now: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    peak: int = 0  # of all parts on the device together

    @property
    def total(self) -> int:
        return sum(size for part, size in self.now.items() if part not in (HOST, PINNED))

    def add(self, part: str, size: int) -> None:
        self.now[part] += size
        if size > 0:
            self.most[part] = max(self.most[part], self.now[part])
            self.peak = max(self.peak, self.total)


class Ledger(TorchDispatchMode):
    """Within it every tensor's storage is booked under the part that is `part` when it is made.

    It goes around a FakeTensorMode, which makes the tensors. Where the program reads a number off one of these, it gets
    a 1: what decides sizes must not come from there. Of what it picks by a mask, it gets the share `picked`.
    """

    def __init__(self, picked: float = 1.0) -> None:
        super().__init__()
        self.held = Held()
        self._picked = picked
        self.part = PASSING
        self._live: dict[int, _Storage] = {}
        self._free: Counter[int] = Counter()  # sizes of blocks that are reserved and free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if isinstance(args[0], FakeTensor):
                return _one(args[0].dtype)
            with _disable_current_modes():
                return func(*args)
        if func is torch.ops.aten.masked_select.default and isinstance(args[0], FakeTensor):
            func, args = torch.ops.aten.new_empty.default, (args[0], [round(args[0].numel() * self._picked)])
        kwargs = kwargs or {}
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:  # which a machine without a GPU cannot
            kwargs = kwargs | {"pin_memory": False}
        made = func(*args, **kwargs)
        for tensor in [made] if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(tensor, Tensor):
                if pinned:
                    self._pin(tensor)
                self._book(tensor, HOST if pinned else self.part)  # a view of a pinned tensor is booked nowhere else
        return made

    def _pin(self, tensor: Tensor) -> None:
        """As torch's allocator: a block of the next power of two, a free one if there is one of this size."""
        block = 1 << (tensor.untyped_storage().nbytes() - 1).bit_length()
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.held.add(PINNED, block)
        finalize(tensor.untyped_storage(), self._free.update, [block])

    def _book(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = _Storage(ref(storage), part, size)
        self.held.add(part, size)
        finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        gone = self._live.pop(key)
        self.held.add(gone.part, -gone.size)

    @contextmanager
    def booking(self, part: str) -> Iterator[None]:
        """What is made within it belongs to `part`."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def claim(self, part: str, tensors: Iterable[Tensor | torch.UntypedStorage], booked: str | None = None) -> None:
        """These storages belong to `part`: those that are `booked` so, or all."""
        storages = [tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        self._move(part, [self._live[s._cdata] for s in storages if s._cdata in self._live], booked)

    def claim_all(self, part: str, booked: str) -> None:
        """Everything that is `booked` so belongs to `part`."""
        self._move(part, self._live.values(), booked)

    def _move(self, part: str, storages: Iterable[_Storage], booked: str | None) -> None:
        for found in storages:
            if found.part != part and booked in (None, found.part):
                self.held.add(found.part, -found.size)
                found.part = part
                self.held.add(part, found.size)

    def resized(self) -> Held:
        """Book again what storages hold now: they are resized beside torch's dispatcher."""
        for found in self._live.values():
            storage = found.storage()
            size = storage.nbytes() if storage is not None else 0
            self.held.add(found.part, size - found.size)
            found.size = size
        return self.held

    def reset(self) -> None:
        """From now on the most is that of what comes."""
        self.held.most = Counter(self.held.now)
        self.held.peak = self.held.total


@dataclass
class _Storage:
    storage: ref[torch.UntypedStorage]
    part: str
    size: int


def _one(dtype: torch.dtype) -> int | float | bool:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
