"""Work of rank 0 alone, while the other ranks wait for its result in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_collab.runtime.process import Hung, Preempted, RunStopped, beat, raise_if_preempted

# What a failure of rank 0 becomes on the other ranks: the first that it is an instance of, else RuntimeError.
_KINDS = (Preempted, Hung, RunStopped)
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
