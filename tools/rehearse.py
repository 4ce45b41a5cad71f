"""`megatron-collab rehearse` from a source checkout."""

import sys

from megatron_collab.commands.__main__ import run

if __name__ == "__main__":
    sys.exit(run("rehearse", sys.argv[1:]))
