"""`megatron-collab plan-sync` from a source checkout."""

import sys

from megatron_collab.commands.plan_sync import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
