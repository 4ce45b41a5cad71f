"""Services that are gone: a Ray cluster, and the server of Weights & Biases."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megatron_collab.config import Config
from megatron_collab.observability.writers import wandb, writer_kinds
from megatron_collab.settings import ConfigError
from tests.helpers import free_port
from tests.llm.endpoint import Endpoint, in_thread, says


class Refuses(BaseHTTPRequestHandler):
    """A server that does not know the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server_that(how: str) -> Iterator[str]:
    """Address of a server that is gone, never answers, refuses the key, or is another one; or a name of none."""
    match how:
        case "silent":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        case "refuses":
            with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
                Thread(target=server.serve_forever).start()
                yield f"http://127.0.0.1:{server.server_port}"
                server.shutdown()
        case "another":
            with in_thread(Endpoint(says("hello"))) as endpoint:
                yield f"http://127.0.0.1:{endpoint.port}"
        case "no host":
            yield "http://no-such-host.invalid"
        case _:
            yield f"http://127.0.0.1:{free_port()}"


KEY = "0" * 40
GONE = ("gone", "", KEY)  # a server at its address, one at the proxy's, and the key
UNREACHABLE = [("silent", "", KEY), ("refuses", "", KEY), ("another", "", KEY), ("no host", "", KEY)]
UNREACHABLE += [("no host", "silent", KEY), ("gone", "", "too-short")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("server", "proxy", "key"), [GONE, *(pytest.param(*names, marks=pytest.mark.slow) for names in UNREACHABLE)]
)
def test_weights_and_biases_without_a_network_goes_on_offline(
    server: str,
    proxy: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "_SECONDS", 1.0)
    config = Config()
    config.run.dir, config.run.wandb_project = str(tmp_path), "p"
    with server_that(server) as address, server_that(proxy) as behind:
        for name, value in {"API_KEY": key, "BASE_URL": address, "SILENT": "true"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        if proxy:
            monkeypatch.setenv("HTTP_PROXY", behind)
        writer = wandb.WandbWriter(None, config.run, {}, 0)
        writer.scalars(0, {"reward": 1.0})
        writer.close(failed=False)
        writer._wandb.teardown()
    err = capsys.readouterr().err
    assert err.count("megatron-collab: Weights & Biases: ") == 1 and "continuing offline" in err
    assert err.count("\n") == 1, err
    assert [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]


@pytest.mark.parametrize("key", [" ", f"{'0' * 40}\n", "0" * 40 + "é"])
def test_a_key_of_a_writer_that_no_header_can_hold_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases would not even go on offline."""
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ConfigError, match=r"^WANDB_API_KEY: must be printable ASCII without line breaks, and without"):
        writer_kinds(Config().run)
    monkeypatch.setenv("WANDB_API_KEY", key.strip().removesuffix("é"))
    assert ("wandb" in writer_kinds(Config().run)) is bool(key.strip())
