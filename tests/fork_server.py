"""Processes that import what ranks need once per test session; ranks are forks of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
SET_BY_PATCHES = "LITELLM_LOCAL_MODEL_COST_MAP"  # the process sets it again, and passes on what its patches have set
_servers: dict[bool, ForkServer] = {}  # key: with TransformerEngine?


class ForkServer:
    """`tests.forked` as a process, which ends with this one."""

    def __init__(self, engine: bool) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forked", "serve", str(theirs.fileno()), *(["engine"] * engine)]
            environment = os.environ | _ENVIRONMENT
            environment.pop(SET_BY_PATCHES, None)
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, pass_fds=[theirs.fileno()])

    def alive(self) -> bool:
        return self._process.poll() is None

    def do(self, call: Path, seconds: float) -> None:
        """Run the call in that file; RuntimeError if it fails, TimeoutError after `seconds`."""
        self._connection.settimeout(seconds)
        try:
            sys.stdout.flush()
            socket.send_fds(self._connection, [str(call).encode()], [1, 2])
            code = self._connection.recv(100).decode()
        except TimeoutError:
            self.end()
            raise
        if code != "0":
            raise RuntimeError(f"the process that starts the ranks ended with code {code or self._process.wait()}")

    def end(self) -> None:
        """End the process and its ranks."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def fork_server(engine: bool) -> ForkServer:
    """The fork server of this session, started on first use; `engine`: TransformerEngine over reference kernels."""
    if engine not in _servers or not _servers[engine].alive():
        _servers[engine] = ForkServer(engine)
    return _servers[engine]


def end_fork_servers() -> None:
    while _servers:
        _servers.popitem()[1].end()
