"""`megatron-collab doctor` from a source checkout."""

import sys

from megatron_collab.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
