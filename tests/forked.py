"""`python -m tests.forked MODULE RANKS ARGUMENTS…`: ranks that are forks of one process, which imports once."""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from megatron_collab import patches
from megatron_collab.runtime.process import die_with_parent


def main(module: str, ranks: int, arguments: list[str]) -> int:
    """Run MODULE as every rank, with these arguments; how many ranks have failed."""
    name, parent = f"{module}", os.getpid()
    patches.apply("megatron", "litellm")
    importlib.import_module(name)
    sys.argv = [name, *arguments]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            die_with_parent(parent)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            return 0
        children.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
