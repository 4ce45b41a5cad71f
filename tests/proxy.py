"""An HTTP proxy on loopback that records requests and forwards none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class RecordingProxy:
    """`requests`: method and target of every request, in order."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[str] = []

    def environment(self, no_proxy: str = "example.org") -> dict[str, str]:
        """Variables that make every client of a process use this proxy, except for the hosts of `no_proxy`."""
        return {**dict.fromkeys(VARIABLES, self.url), "no_proxy": no_proxy, "NO_PROXY": no_proxy}


@contextmanager
def recording_proxy() -> Iterator[RecordingProxy]:
    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            proxy.requests.append(f"{self.command} {self.path}")
            self.send_error(502)

        do_GET = do_POST = do_CONNECT = refuse

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        proxy = RecordingProxy(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield proxy
        server.shutdown()
        thread.join()
