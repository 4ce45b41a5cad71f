"""Ranks that are forks of one process, which imports once; `python -m tests.forked` is what tests.ranks starts.

On GPUs each is a process that imports for itself, since CUDA works in no fork of a process that has used it.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from megatron_collab import patches
from megatron_collab.runtime.process import die_with_parent
from megatron_collab.trainer.megatron.te_cpu.install import install
from tests.helpers import free_port

Ended = tuple[int | None, Any]  # exit code, -N: by signal N, None: it was stopped; what its function returned, if 0


def fork(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Ended]:
    """How `function(*arguments)` ended on every rank. os.killpg(0, …) by one of them is for all."""
    return start(lambda file: pickle.dump(function(*arguments), file), ranks)


def start(act: Callable[[IO[bytes]], None], ranks: int) -> list[Ended]:
    """How `act` ended in a process of each rank, which writes what it returns to the file that it is given."""
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
                    act(file)
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


def main(call: Path, *words: str) -> None:
    """Do what the file `call` says, a pickled function and its arguments, on so many ranks; write there how it ended.

    `engine`: the ranks have TransformerEngine over reference kernels. `spawn`: each is an interpreter of its own, which
    is given the number of the file for what it returns.
    """
    ranks, what = pickle.loads(call.read_bytes())
    if words == ("spawn",):

        def become(file: IO[bytes]) -> None:
            os.set_inheritable(file.fileno(), True)
            os.execv(sys.executable, [sys.executable, "-m", "tests.forked", str(call), str(file.fileno())])

        call.write_bytes(pickle.dumps(start(become, ranks)))
        return
    if words == ("engine",):
        install()
    patches.apply("megatron", "litellm")
    function, arguments = pickle.loads(what)
    if words and words[0].isdigit():
        with open(int(words[0]), "wb") as file:
            pickle.dump(function(*arguments), file)
    else:
        call.write_bytes(pickle.dumps(fork(function, ranks, *arguments)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
