"""torchrun with our signal handling: `python -m megatron_collab.launch.torchrun ARGUMENTS OF TORCHRUN`.

Signals are forwarded to the ranks of this node instead of ending them (runtime/signals.py), and the exit code is that
of the rank that failed first. To lose no signal during startup, start it with signals blocked:
`env --block-signal=USR1 …`. The rendezvous is at --master-addr: a free loopback port, or on several nodes a port of an
address of the first node.
"""

from __future__ import annotations

import logging
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

from megatron_collab.runtime import console, gpu_environment, keys, process, screen, signals
from megatron_collab.runtime.files import ScratchFolder, remove_abandoned

if TYPE_CHECKING:
    import torch.distributed as dist


logger = logging.getLogger("megatron_collab")  # __name__ is __main__ if this module is the program
# Exit codes for which rank 0 has already printed the reason.
_EXPLAINED = (
    *(process.EXIT_BAD_INPUT, process.EXIT_STOPPED, process.EXIT_HUNG),
    *(signals.EXIT_PREEMPTED, signals.EXIT_INTERRUPTED, signals.EXIT_TERMINATED),
)
_RESEND_SECONDS = 1.0  # ranks started after the signal must receive it too


def main(arguments: list[str]) -> int:
    signals.begin()
    process.imports_begin()  # the one below takes seconds
    keys.put_away()
    console.begin()
    os.environ |= {signals.LAUNCHER: str(os.getpid())}
    gpu_environment.enter()  # the dynamic loader of a rank reads some of it before Python starts
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    process.imports_done()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a rank's end is reported below
    relay = _Relay()
    signals.give_to(relay)
    with ScratchFolder() as scratch:
        os.environ["TMPDIR"] = str(scratch)  # leftovers of killed ranks are deleted with it
        options = run.parse_args([f"--log-dir={scratch}", "--signals-to-handle=SIGQUIT", *arguments])
        try:
            store = _store(options)
        except ValueError as error:
            logger.error(str(error))
            return process.EXIT_BAD_INPUT
        try:
            run.run(options)
        except ChildFailedError as error:
            screen.restore()
            if relay.ended:
                return signals.EXIT_INTERRUPTED
            _, failure = error.get_first_failure()
            if failure.exitcode not in _EXPLAINED:
                logger.error(str(error))
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode  # as shells count signals
        finally:
            del store  # had to live until torchrun took it over
            remove_abandoned()  # files of killed ranks
    return 0


def _store(options: Namespace) -> dist.TCPStore | None:
    """The rendezvous store, on the first node; torchrun reuses it, since it listens at the port set in `options`.

    torchrun's own store listens on every interface, and on one node torchrun also unpickles what any client has put
    into it. Raises ValueError if --master-addr and --master-port are not available, or another rendezvous is requested.
    """
    import torch.distributed as dist
    from torch.distributed import run

    if options.rdzv_backend != "static" or options.rdzv_endpoint:
        raise ValueError("--rdzv-backend, --rdzv-endpoint: not supported; give --master-addr and --master-port")
    options.standalone = False  # one node is standalone anyway
    if options.master_port is None:
        options.master_port = 0 if run.parse_min_max_nnodes(options.nnodes)[1] == 1 else 29500  # torchrun's default
    if options.node_rank != 0:
        return None
    try:
        listener = socket.create_server((options.master_addr, options.master_port))
    except (OSError, OverflowError) as error:
        address = f"--master-addr={options.master_addr}, --master-port={options.master_port}"
        raise ValueError(f"{address}: {error}; give an address of this first node and a free port") from error
    options.master_port = listener.getsockname()[1]
    # multi_tenant: shared by all stores of this process with the same port.
    kind = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    return dist.TCPStore(options.master_addr, options.master_port, **kind, master_listen_fd=listener.detach())


class _Relay:
    """Forwards signals to the ranks, the child processes; a second SIGINT kills them at once (`ended`)."""

    def __init__(self) -> None:
        self.ended = False
        self._passed: signal.Signals | None = None

    def __call__(self, number: signal.Signals, sender: int) -> None:
        if number == signal.SIGINT and self._passed == signal.SIGINT:
            print("megatron-collab: second SIGINT: killed; the last checkpoint counts", file=sys.stderr, flush=True)
            self.ended = True
            self._send(signal.SIGKILL)
            return
        first = self._passed is None
        self._passed = signals.GRACE if number == signal.SIGTERM else number
        self._send(self._passed)
        if first:
            threading.Thread(target=self._repeat, name="relay", daemon=True).start()

    def _repeat(self) -> None:
        """Send the signal repeatedly: harmless while it is pending, and ranks started later must receive it too."""
        while self._passed is not None:
            time.sleep(_RESEND_SECONDS)
            self._send(self._passed)

    def _send(self, number: signal.Signals) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
