"""Ranks that are forks of one process, which imports once; `python -m tests.forked` is what tests.ranks starts."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_collab import patches
from megatron_collab.runtime.process import die_with_parent
from megatron_collab.trainer.megatron.te_cpu.install import install
from tests.helpers import free_port

Ended = tuple[int | None, Any]  # exit code, -N: by signal N, None: it was stopped; what its function returned, if 0


def fork(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Ended]:
    """How `function(*arguments)` ended on every rank. os.killpg(0, …) by one of them is for all."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    parent, group, ended = os.getpid(), 0, list[Ended]()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        children = []
        for rank, file in enumerate(files):
            child = os.fork()
            if not child:
                code = 1
                try:
                    os.setpgid(0, group)
                    die_with_parent(parent)
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    pickle.dump(function(*arguments), file)
                    file.flush()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            os.setpgid(child, group := group or child)
            children.append(child)
        for child, file in zip(children, files, strict=True):
            status = os.waitpid(child, os.WUNTRACED)[1]
            code = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            file.seek(0)
            ended.append((code, pickle.load(file) if code == 0 else None))
    return ended


def main(call: Path, engine: str = "") -> None:
    """Fork what the file `call` says, a pickled function with its ranks and arguments, and write there how it ended.

    With `engine` the ranks have TransformerEngine over reference kernels.
    """
    if engine:
        install()
    patches.apply("megatron", "litellm")
    function, ranks, arguments = pickle.loads(call.read_bytes())
    call.write_bytes(pickle.dumps(fork(function, ranks, *arguments)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
