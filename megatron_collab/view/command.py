"""Look at runs in a browser: curves, evaluations and every conversation, also while the runs are being written.

    megatron-collab view RUN [RUN …] [--port 8000] [--labels FILE]

It prints an address and answers there until Ctrl-C, to this machine only and only to those who have the address. From
another machine, forward the port: ssh -L 8000:127.0.0.1:8000 HOST. It writes nothing in the folders but the ratings of
a blind test, and starts nothing until you talk with a model.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn

from megatron_collab.commands import ArgumentParser
from megatron_collab.runtime.console import show_secret
from megatron_collab.settings import ConfigError, require
from megatron_collab.view.labels import Label, read
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application

logger = logging.getLogger(__name__)

_HOSTS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)  # of an address family
_CONNECTIONS = 100  # at a time
_FAULTS = 20  # of a file that are printed


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("view", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--port", type=_port, default=0, help="port of the loopback interface [a free one]")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="people's labels of the run's conversations")
    options = parser.parse_args(arguments)
    folders = dict[str, Path]()
    for folder in options.runs:
        folders.setdefault(os.path.realpath(folder), folder)  # of a run that is named twice, the first name
    runs = [RunView(folder) for folder in folders.values()]
    if options.labels:
        require(len(runs) == 1, f"--labels={options.labels}: are of one run; view {len(runs)} runs without it")
        runs = [RunView(runs[0].folder, _labels(options.labels))]
    token = secrets.token_urlsafe()
    with listening(options.port) as server_socket:
        show_secret(f"{address(server_socket)}?token={token}")
        return serve(uvicorn.Server(_config(runs, token)), server_socket)


def _labels(file: Path) -> Sequence[Label]:
    """The labels in a file. Raises ConfigError if it has a faulty row; the first ones are printed before."""
    labels, faults = read(file)
    for fault in faults[:_FAULTS]:
        logger.error(fault)
    rows = "1 row is" if len(faults) == 1 else f"{len(faults)} rows are"
    require(not faults, f"--labels={file}: {rows} faulty; correct the file")
    return labels


def listening(port: int) -> socket.socket:
    """A socket of the loopback interface: IPv4, or IPv6 if the machine has no IPv4; port 0: a free one.

    Raises ConfigError if the port is not available.
    """
    for host, family in _HOSTS.items():
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            if error.errno not in _ABSENT:
                raise ConfigError(f"--port={port}: {host} cannot listen there: {reason}; choose another") from None
    raise ConfigError(f"no loopback address ({' or '.join(_HOSTS)}): {reason}; set up the interface lo")


def address(server_socket: socket.socket) -> str:
    """The URL of what listens at `server_socket`."""
    host, port = server_socket.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(server: uvicorn.Server, server_socket: socket.socket) -> int:
    """Answer until Ctrl-C, which ends this process with exit code 0. Returns 1 if the server fails."""
    thread = threading.Thread(target=server.run, args=([server_socket],), daemon=True)
    thread.start()
    with suppress(KeyboardInterrupt):
        thread.join()
        return 1
    os._exit(0)  # nothing is being written, and threads that still read a large run would delay a normal exit


def _config(runs: Sequence[RunView], token: str) -> uvicorn.Config:
    """No log of requests, and no websockets; its own errors are shown."""
    return uvicorn.Config(
        application(runs, token),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",  # not of requests that it refuses
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise ValueError(text)
    return port
