"""`megatron-collab recording` from a source checkout."""

import sys

from megatron_collab.commands.__main__ import run

if __name__ == "__main__":
    sys.exit(run("recording", sys.argv[1:]))
