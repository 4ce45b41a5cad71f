"""torchrun as this program needs it: `python -m megatron_collab.launch.torchrun ARGUMENTS OF TORCHRUN`.

The preemption signal goes on to the ranks of this node instead of ending them, and the exit code is that of the rank
that failed first. To be safe from the first millisecond, start it with the signal blocked: `env --block-signal=USR1 …`.
The ranks meet at --master-addr: a free port of loopback, or for several nodes a port of an address of the first node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from megatron_collab.runtime import process
from megatron_collab.runtime.files import COMPILE_CACHE, ScratchFolder

if TYPE_CHECKING:
    import torch.distributed as dist

# Rank 0 has said why, in one line.
_EXPLAINED = (process.EXIT_BAD_INPUT, process.EXIT_STOPPED, process.EXIT_HUNG, process.EXIT_PREEMPTED)
_AGAIN = 1.0  # seconds; a rank that is started after the signal has to have it as well


def main(arguments: list[str]) -> int:
    process.imports_begin()  # the one below takes seconds, in which the signal has to wait already
    os.environ.setdefault(*COMPILE_CACHE)
    threading.Thread(target=_forward, name="preemption", daemon=True).start()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    process.imports_done()

    with ScratchFolder() as scratch:
        os.environ["TMPDIR"] = str(scratch)  # what libraries of a killed rank leave there goes with it
        options = run.parse_args([f"--log-dir={scratch}", *arguments])
        try:
            store = _store(options)
        except ValueError as error:
            print(f"megatron-collab: {error}", file=sys.stderr)
            return process.EXIT_BAD_INPUT
        try:
            run.run(options)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if failure.exitcode not in _EXPLAINED:
                print(error, file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode  # as shells count signals
        finally:
            del store  # which had to live until torchrun took it
    return 0


def _store(options: Namespace) -> dist.TCPStore | None:
    """Where the ranks meet, on the first node; torchrun takes it, as it is there at the port that `options` then name.

    By itself torchrun listens on every interface, and on one node also unpickles what any client has put into its
    store. Raises ValueError where --master-addr and --master-port are not available, or others are asked for.
    """
    import torch.distributed as dist
    from torch.distributed import run

    if options.rdzv_backend != "static" or options.rdzv_endpoint:
        raise ValueError("--rdzv-backend, --rdzv-endpoint: the ranks meet at --master-addr, --master-port; give these")
    options.standalone = False  # it says what one node has anyway
    if options.master_port is None:
        options.master_port = 0 if run.parse_min_max_nnodes(options.nnodes)[1] == 1 else 29500  # torchrun's own
    if options.node_rank != 0:
        return None
    try:
        listener = socket.create_server((options.master_addr, options.master_port))
    except (OSError, OverflowError) as error:
        given = f"--master-addr={options.master_addr}, --master-port={options.master_port}"
        raise ValueError(f"{given}: {error}; give an address of this node, the first one, and a free port") from error
    options.master_port = listener.getsockname()[1]
    # multi_tenant: shared by all of this process that name its port.
    kind = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    return dist.TCPStore(options.master_addr, options.master_port, **kind, master_listen_fd=listener.detach())


def _forward() -> None:
    """Once the signal has come, send it to the ranks, which are our children; once it is pending, again is nothing."""
    signal.sigwait({process.PREEMPTION_SIGNAL})
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(process.PREEMPTION_SIGNAL)
        time.sleep(_AGAIN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
