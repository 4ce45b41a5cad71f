"""Work of rank 0 alone, while the other ranks wait for its result in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_collab.runtime.process import Hung, Interrupted, Preempted, RunStopped, beat, raise_if_preempted

# What a failure of rank 0 becomes on the other ranks: the first that it is an instance of, else RuntimeError.
_KINDS = (Interrupted, Preempted, Hung, RunStopped)
_group: dist.ProcessGroup | None = None  # None: the default group


@contextmanager
def own_group(timeout: timedelta) -> Iterator[None]:
    """Within it ranks wait for rank 0 in a group of its own; collective.

    It goes over the CPU: ranks that wait in NCCL would keep their GPUs busy, which colocated servers compute on.
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
    """check_preemption again and again without waiting for rank 0: what one call asks is answered at the next."""

    def __init__(self) -> None:
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def check(self) -> None:
        """Raise Preempted on every rank where rank 0 had received a notice at the previous call; collective."""
        self.settle()
        noticed = torch.zeros(1, dtype=torch.uint8)
        if dist.get_rank() == 0:
            try:
                raise_if_preempted()
            except Preempted:
                noticed.fill_(1)
        work = dist.broadcast(noticed, src=0, group=_group, async_op=True)
        assert work is not None
        self._asked = noticed, work

    def settle(self) -> None:
        """As `check`, and ask nothing more."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        noticed, work = asked
        work.wait()
        if noticed.item():
            if dist.get_rank() == 0:
                raise_if_preempted()  # says which
            raise Preempted("rank 0 received a preemption notice")


def wait_until(holds: Callable[[], bool]) -> None:
    """Return on every rank once it holds on rank 0; collective. Each poll is one, since waiting may take longer."""
    while not from_leader(holds):
        pass


def meet() -> None:
    """Return once every rank is here; collective. It does not wait for work on the GPUs: see device.free_cache."""
    beat()
    dist.barrier(_group)
    beat()


def shared(make: Callable[[], Any], preemptible: bool = False) -> Any:
    """What rank 0 makes, on every rank; where rank 0 fails, every rank raises instead of waiting for it.

    Where rank 0 raises RunStopped, every rank does; RuntimeError for other errors. Where it is `preemptible`, Preempted
    once rank 0 has received a preemption notice.
    """
    beat()
    box: list[Any] = [None, None]  # the result, or what the other ranks raise
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            if preemptible:
                raise_if_preempted()
            box[0] = make()
        except Exception as error:
            failure = error
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
            box[1] = kind(f"rank 0 failed: {type(error).__name__}: {error}")
    dist.broadcast_object_list(box, src=0, group=_group)
    beat()
    if failure or box[1]:
        raise failure or box[1]
    return box[0]


from_leader = partial(shared, preemptible=True)
