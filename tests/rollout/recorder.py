"""SGLang servers in this process: they record their requests, and end on requests that would end SGLang."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.runtime.network import bindable


class Recorded(SGLangServer):
    """Appends requests to `events`, which may be shared, as "server 0: /path argument"."""

    def __init__(self, spec: ServerSpec, folder: Path, index: int, events: list[str]) -> None:
        self.events = events
        self.starts = True  # whether a restart succeeds
        super().__init__(spec, folder / f"{index}.log", index, self._begin)

    def _begin(self, spec: ServerSpec, log: Path, index: int, api_key: str) -> Any:
        self.code: int | None = None
        process = SimpleNamespace(
            url=f"http://127.0.0.1:{bindable('rollout.server.port', 0)}",
            ended=lambda: None if self.code is None else f"it ended with code {self.code}",
        )
        self._start(process.url)
        process.start = lambda: self._start(process.url)
        return process

    def _start(self, url: str) -> None:
        self.code = None
        self.log.parent.mkdir(exist_ok=True)
        self.log.write_text("out of memory\n")
        self.gone: set[str] = set()
        self.busy = False  # a request is running that does not end
        self.paused = self.idle = False
        self.note(f"start {self.generation}")
        if self.starts:
            self.http = ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), self._handler())
            threading.Thread(target=self.http.serve_forever, args=(0.01,)).start()
        else:
            self.code = 1

    def die(self) -> None:
        self.code = -9
        self.http.shutdown()
        self.http.server_close()

    def stop(self) -> None:
        if self.alive():
            self.die()

    def note(self, event: str) -> None:
        self.events.append(f"server {self.index}: {event}")

    def answer(self, path: str, body: dict[str, Any]) -> int:
        """Handle a request as SGLang does; return the HTTP status."""
        tags = set(body.get("tags", ()))
        path = path.partition("?")[0]
        if path not in ("/health", "/freeze_gc"):
            self.note(" ".join([path, *tags, *filter(None, [body.get("mode")])]))
        match path:
            case "/pause_generation":
                self.paused = True
            case "/flush_cache":
                self.idle = not self.busy
                return 200 if self.idle else 400
            case "/release_memory_occupation":
                if not (self.paused and self.idle) or tags & self.gone:  # an assertion in SGLang's scheduler
                    self.code = 1
                    return 500
                self.gone |= tags
            case "/resume_memory_occupation":
                if not tags <= self.gone:  # a KeyError there
                    self.code = 1
                    return 500
                self.gone -= tags
        return 200

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                authorized = self.headers["Authorization"] == f"Bearer {server.api_key}"
                self.send_response(server.answer(self.path, body) if authorized else 401)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                reply = json.dumps({"max_total_num_tokens": 4096} if self.path == "/get_server_info" else {}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        return Handler
