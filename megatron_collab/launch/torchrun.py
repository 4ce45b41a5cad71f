"""torchrun as this program needs it: `python -m megatron_collab.launch.torchrun ARGUMENTS OF TORCHRUN`.

The signal of runtime/preemption.py goes on to the ranks of this node instead of ending them, and the exit code is that
of the rank that failed first. To be safe from the first millisecond, start it with the signal blocked: `env
--block-signal=USR1 python -m megatron_collab.launch.torchrun …`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress

import psutil

from megatron_collab.runtime import preemption
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_HUNG, EXIT_PREEMPTED, EXIT_STOPPED

_EXPLAINED = (EXIT_BAD_INPUT, EXIT_STOPPED, EXIT_HUNG, EXIT_PREEMPTED)  # rank 0 has said why, in one line
_AGAIN = 1.0  # seconds; a rank that is started after the signal has to have it as well


def main(arguments: list[str]) -> int:
    preemption.block()
    threading.Thread(target=_forward, name="preemption", daemon=True).start()
    # Imported here: it takes seconds, in which the signal has to wait already.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:  # its own choice it would leave behind
        try:
            run.main([f"--log-dir={logs}", *arguments])
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if failure.exitcode not in _EXPLAINED:
                print(error, file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode  # as shells count signals
    return 0


def _forward() -> None:
    """Once the signal has come, send it to the ranks, which are our children; once it is pending, again is nothing."""
    signal.sigwait({preemption.SIGNAL})
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(preemption.SIGNAL)
        time.sleep(_AGAIN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
