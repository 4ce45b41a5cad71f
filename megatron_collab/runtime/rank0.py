"""What rank 0 alone does, while the other ranks wait for it in a collective."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_collab.runtime import heartbeat
from megatron_collab.runtime.process import Hung, Preempted, RunStopped, raise_if_preempted

# What a failure of rank 0 becomes on the other ranks: the first that it is one of.
_KINDS = (Preempted, Hung, RunStopped, RuntimeError)
_group: dist.ProcessGroup | None = None  # None: the one of all collectives


def listen(timeout: timedelta) -> None:
    """From now on wait for rank 0 in a group of its own; collective.

    It goes over the CPU: ranks that wait in NCCL would keep their GPUs busy, which colocated servers compute on.
    """
    global _group
    _group = dist.new_group(backend="gloo", timeout=timeout)


def hang_up() -> None:
    """Before the process groups end."""
    global _group
    _group = None


def look() -> None:
    """Raise Preempted on every rank where rank 0 has been told to end; collective."""
    from_leader(lambda: None)


def wait_until(sees: Callable[[], bool]) -> None:
    """Return on every rank once rank 0 sees it; collective, a look at a time: none may take as long as a collective."""
    while not from_leader(sees):
        pass


def from_leader(make: Callable[[], Any]) -> Any:
    """As `shared`; Preempted on every rank where rank 0 has been told to end."""

    def unless_told() -> Any:
        raise_if_preempted()
        return make()

    return shared(unless_told)


def shared(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; where rank 0 fails, every rank raises instead of waiting for it.

    Where rank 0 raises RunStopped, every rank does.
    """
    heartbeat.beat()
    box: list[Any] = [None, None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:
            failure = error
        if failure is not None:
            kind = next((number for number, kind in enumerate(_KINDS) if isinstance(failure, kind)), len(_KINDS) - 1)
            box[1:] = f"{type(failure).__name__}: {failure}", kind
    dist.broadcast_object_list(box, src=0, group=_group)
    heartbeat.beat()
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise _KINDS[box[2]](f"rank 0 failed: {box[1]}")
    return box[0]
