"""`python -m megatron_collab.sglang_cpu.serve <SGLang's arguments>`: SGLang's HTTP server.

On a machine without a GPU the missing parts are installed first. SGLang spawns its processes, and a spawned
process imports the main module again: what is installed here is installed in all of them.
"""

from __future__ import annotations

import os
import sys

from megatron_collab.processes import die_with_parent
from megatron_collab.sglang_cpu.key import KEY_VARIABLE

if __name__ == "__mp_main__":
    # SGLang's processes see to this themselves, but only after imports that take many seconds.
    die_with_parent()

from megatron_collab.sglang_cpu import parts  # noqa: E402 (imports torch)

parts.install()

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from megatron_collab.sglang_cpu import deterministic

    deterministic.allow()


def main(arguments: list[str]) -> None:
    """Serve until ended; the API key comes from the environment."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*arguments, "--api-key", os.environ.pop(KEY_VARIABLE)]))


if __name__ == "__main__":
    main(sys.argv[1:])
