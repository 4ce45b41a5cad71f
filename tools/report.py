"""`megatron-collab report` from a source checkout."""

import sys

from megatron_collab.commands.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
