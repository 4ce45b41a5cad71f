"""Work that only rank 0 does while the other ranks wait for its result in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.runtime.files import full_disk
from megatron_collab.runtime.process import (
    Hung,
    Interrupted,
    Preempted,
    RunStopped,
    beat,
    lost_process,
    raise_if_preempted,
)

# Type of a failure of rank 0 on the other ranks: the first that it is an instance of, else RuntimeError.
_KINDS = (Interrupted, Preempted, Hung, RunStopped)
_group: dist.ProcessGroup | None = None  # None: the default group


@contextmanager
def dedicated_group(timeout: timedelta) -> Iterator[None]:
    """Within the block, ranks wait for rank 0 in a dedicated gloo group; collective.

    The group is on the CPU: waiting in NCCL would keep GPUs busy that colocated servers compute on.
    """
    global _group
    _group = dist.new_group(backend="gloo", timeout=timeout)
    try:
        yield
    finally:
        _group = None


def check_preemption() -> None:
    """Raise Preempted on every rank once rank 0 has received a preemption notice; collective."""
    from_leader(lambda: None)


class PreemptionWatch:
    """Repeated check_preemption that never waits for rank 0: each call acts on the answer to the previous one."""

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def check(self) -> None:
        """Raise Preempted on every rank if rank 0 had received a notice at the previous call; collective."""
        self.settle()
        flag = torch.ones(1, dtype=torch.uint8)  # 0: preempted; a rehearsal reads 1 from every tensor
        if dist.get_rank() == 0:
            try:
                raise_if_preempted()
            except Preempted:
                flag.fill_(0)
        work = dist.broadcast(flag, src=0, group=_group, async_op=True)
        assert work is not None
        self._pending = flag, work

    def settle(self) -> None:
        """Like `check`, but without a new request."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        flag, work = pending
        work.wait()
        if not flag.item():
            if dist.get_rank() == 0:
                raise_if_preempted()  # its message names the signal
            raise Preempted("rank 0 received a preemption notice")


def wait_until(holds: Callable[[], bool]) -> None:
    """Return on every rank once `holds()` is true on rank 0. Each poll is a collective, so that none can time out."""
    while not from_leader(holds):
        pass


def meet() -> None:
    """Barrier of all ranks, with heartbeats. It does not wait for work on the GPUs: see device.free_cache."""
    beat()
    dist.barrier(_group)
    beat()


def shared(make: Callable[[], Any], preemptible: bool = False) -> Any:
    """The result of `make` on rank 0, returned on every rank; collective.

    If rank 0 fails, every rank raises instead of waiting: RunStopped if rank 0 raised it, RuntimeError for other
    errors. If `preemptible`, Preempted is raised once rank 0 has received a preemption notice.
    """
    beat()
    box: list[Any] = [None, None]  # the result, or what the other ranks raise
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            if preemptible:
                raise_if_preempted()
            box[0] = make()
        except Exception as raised:
            failure = error = full_disk(raised) or lost_process(raised) or raised
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            box[1] = kind(f"rank 0 failed: {type(error).__name__}: {error}")
    dist.broadcast_object_list(box, src=0, group=_group)
    beat()
    if failure or box[1]:
        raise failure or box[1]
    return box[0]


from_leader = partial(shared, preemptible=True)
