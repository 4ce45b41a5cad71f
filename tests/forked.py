"""Ranks that are forks of one process, which imports once; `python -m tests.forked` is what tests.fork_server starts.

On GPUs each rank is a separate process with its own imports: CUDA does not work in a fork of a process that used it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from megatron_collab import patches
from megatron_collab.rehearsal.te_cpu.install import install
from megatron_collab.runtime.process import die_with_parent, imports_begin, imports_done
from tests.helpers import free_port

# Imports of nearly all rank functions.
_PRELOADED = ("megatron_collab.trainer.trainer", "megatron_collab.checkpoint.checkpointer", "tests.ranks")
Ended = tuple[int | None, Any]  # (exit code, -N for signal N, None if stopped; the function's result if the code is 0)


def fork(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Ended]:
    """Run `function(*arguments)` on every rank; how each ended. os.killpg(0, …) by one rank reaches all of them."""
    return start(lambda file: pickle.dump(function(*arguments), file), ranks)


def start(act: Callable[[IO[bytes]], None], ranks: int) -> list[Ended]:
    """Run `act` in one process per rank; how each ended. `act` writes its result to the file it receives."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    group, ended = 0, list[Ended]()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        children = []
        for rank, file in enumerate(files):
            child = forked(_act_as_rank, act, rank, group, file)
            os.setpgid(child, group := group or child)
            children.append(child)
        for child, file in zip(children, files, strict=True):
            status = os.waitpid(child, os.WUNTRACED)[1]
            code = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            file.seek(0)
            ended.append((code, pickle.load(file) if code == 0 else None))
    return ended


def _act_as_rank(act: Callable[[IO[bytes]], None], rank: int, group: int, file: IO[bytes]) -> None:
    os.setpgid(0, group)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    act(file)
    file.flush()


def forked(act: Callable[..., None], *arguments: Any) -> int:
    """Fork a process that runs `act` and exits with code 0, or 1 if it raised; return its process id."""
    parent = os.getpid()
    if child := os.fork():
        return child
    code = 1
    try:
        die_with_parent(parent)
        act(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve(connection: socket.socket, engine: bool) -> None:
    """Run calls, each in a fork of this process, until the connection is closed; answer each with its exit code.

    A message is the file of a call, with standard output and error of the calling process. The file holds the
    environment, the number of ranks and a pickled function with its arguments, and then how the ranks ended.
    """
    imports_begin()
    environment = dict(os.environ)
    if engine:
        install()
    patches.apply("megatron", "litellm")
    variables_of_patches = dict(os.environ.items() - environment.items())
    for module in _PRELOADED:
        import_module(module)
    imports_done()
    while True:
        file, streams, *_ = socket.recv_fds(connection, 4096, 2)
        if not file:
            return
        child = forked(_do, Path(file.decode()), streams, variables_of_patches)
        for stream in streams:
            os.close(stream)
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _do(call: Path, streams: list[int], variables_of_patches: dict[str, str]) -> None:
    for stream, target in zip(streams, (sys.stdout, sys.stderr), strict=True):
        os.dup2(stream, target.fileno())
    environment, ranks, work = pickle.loads(call.read_bytes())
    os.environ.clear()
    os.environ |= environment | variables_of_patches
    function, arguments = pickle.loads(work)
    call.write_bytes(pickle.dumps(fork(function, ranks, *arguments)))


def spawn(call: Path) -> None:
    """Like `_do`, with a separate interpreter for each rank."""
    _, ranks, _ = pickle.loads(call.read_bytes())

    def become(file: IO[bytes]) -> None:
        os.set_inheritable(file.fileno(), True)
        os.execv(sys.executable, [sys.executable, "-m", "tests.forked", "rank", str(call), str(file.fileno())])

    call.write_bytes(pickle.dumps(start(become, ranks)))


def be_a_rank(call: Path, output: int) -> None:
    """A rank of `spawn`: write the result of the call's function to the file descriptor `output`."""
    patches.apply("megatron", "litellm")
    function, arguments = pickle.loads(pickle.loads(call.read_bytes())[2])
    with open(output, "wb") as file:
        pickle.dump(function(*arguments), file)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", number, *engine]:
            serve(socket.socket(fileno=int(number)), bool(engine))
        case ["spawn", call]:
            spawn(Path(call))
        case ["rank", call, number]:
            be_a_rank(Path(call), int(number))
