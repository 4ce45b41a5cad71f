"""`megatron-collab convert` from a source checkout."""

import sys

from megatron_collab.commands.convert import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
