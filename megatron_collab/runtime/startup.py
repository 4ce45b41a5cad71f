"""What a process of the program does first, and once its imports are through; a module of its own, so that it comes
before every import that takes time."""

from __future__ import annotations

import gc
import signal
import sys

from megatron_collab.runtime.process import block_preemption_signal, watch_for_preemption


def begin() -> None:
    """Before any other import: block the preemption notice, which would end a process that is still importing.

    Garbage is not collected until `settled`: imports make none, and looking for it takes a quarter of their time.
    """
    block_preemption_signal()
    gc.disable()


def settled() -> None:
    """Everything is imported: collect garbage again, without looking through what the imports made."""
    gc.freeze()
    gc.enable()


def take_signals(rank: int) -> None:
    """Rank 0 watches for the preemption notice, and puts its servers and workers away where it is terminated.

    The other ranks end with Ctrl-C at once: Python would see it only after the collective that they wait in.
    """
    if rank == 0:
        watch_for_preemption()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
