"""torchrun for our ranks: forwards SIGUSR1 to them and ends with their exit code."""

from __future__ import annotations

import signal
import sys
import threading

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def _forward() -> None:
    while True:
        signal.sigwait([signal.SIGUSR1])
        for child in psutil.Process().children():
            child.send_signal(signal.SIGUSR1)


def main(arguments: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    threading.Thread(target=_forward, daemon=True).start()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
