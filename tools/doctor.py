"""`megatron-collab doctor` from a source checkout."""

import sys

from megatron_collab.commands.__main__ import run
from megatron_collab.runtime import gpu_environment

if __name__ == "__main__":
    gpu_environment.reload()
    sys.exit(run("doctor", sys.argv[1:]))
