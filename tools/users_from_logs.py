"""`megatron-collab users-from-logs` from a source checkout."""

import sys

from megatron_collab.commands.__main__ import run

if __name__ == "__main__":
    sys.exit(run("users-from-logs", sys.argv[1:]))
