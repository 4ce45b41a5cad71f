"""A RAY_ADDRESS where no cluster of Ray is: refused before the start, or the run ends in one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_collab import train
from megatron_collab.runtime import ray_cluster
from megatron_collab.runtime.process import EXIT_BAD_INPUT, EXIT_STOPPED, RunStopped
from tests.helpers import free_port
from tests.llm.endpoint import Endpoint, in_thread, says
from tests.program import Program, evaluation_of

OF_ITS_OWN = ("unshare", "--pid", "--fork", "--mount-proc")  # where no cluster of another run can be detected
JOIN = """
from megatron_collab.runtime import ray_cluster
ray_cluster._HEALTH_SECONDS = {seconds}
try:
    ray_cluster._join()
except ray_cluster.RunStopped as error:
    print(error)
"""


@pytest.mark.parametrize("address", ["", "not an address", "head", "head:0", "http://head:8265", "[::1:6379", "auto "])
def test_text_that_is_no_address_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert train.main(["experiment=booking", f"run.dir={tmp_path}/run"]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"RAY_ADDRESS={address}: " in err and "unset it for a cluster" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "no-such-host.invalid", "ray://127.0.0.1"])
def test_an_address_where_nothing_listens_ends_the_run(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_CLUSTER_SECONDS", 0.1)
    monkeypatch.setenv("RAY_ADDRESS", address := f"{host}:{free_port()}")
    with pytest.raises(RunStopped) as end:
        ray_cluster._join()
    reason = "no Ray cluster there (nothing answers there within 0.1 s)"
    assert str(end.value) == f"RAY_ADDRESS={address}: {reason}; start Ray, or unset it for a cluster of this run"


def test_a_ray_that_exits_ends_the_run(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """It does so if a cluster answers no more; what its client warns of is in the one line."""

    def init() -> None:
        warnings.warn("connection timed out", stacklevel=1)
        raise SystemExit(15)

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_check_health", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(RunStopped, match="RAY_ADDRESS=auto: no Ray cluster there"):
        ray_cluster._join()
    assert not recwarn.list


class NotFound(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def listener(host: str, then: Callable[[socket.socket], object] | None) -> Iterator[str]:
    """The address of a program that does this with each connection; None: it accepts none, though the kernel does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:

        def serve() -> None:
            with suppress(OSError):  # the server was closed
                while then:
                    then(server.accept()[0])

        Thread(target=serve, daemon=True).start()
        yield f"[{host}]:{server.getsockname()[1]}" if ":" in host else f"{host}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def http_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def writes_bytes(connection: socket.socket) -> None:
    with suppress(OSError), connection:
        connection.sendall(bytes(100_000))


@pytest.mark.processes
def test_another_program_at_the_address_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, also at IPv6, hangs up, speaks HTTP or something else. ray.init would ask for minutes."""
    monkeypatch.setattr(ray_cluster, "_HEALTH_SECONDS", 6.0)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **_: pytest.fail("asked for minutes"))
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        programs = [listener("127.0.0.1", None), listener("::1", None), http_server()]
        programs += [listener("127.0.0.1", then) for then in (socket.socket.close, writes_bytes)]
        for end in pool.map(failure, [stack.enter_context(program) for program in programs]):
            assert str(end) == "what listens there does not answer in 6 s"


def failure(address: str) -> RuntimeError:
    with pytest.raises(RuntimeError) as end:
        ray_cluster._check_health(address)
    return end.value


@pytest.mark.parametrize(
    ("address", "token", "mode", "checked"),
    [
        ("auto", "secret", None, "token"),
        ("auto", "", None, "unset"),
        ("auto", "secret", "disabled", "disabled"),
        ("127.0.0.1:6379", "secret", None, "unset"),
    ],
)
def test_auto_is_checked_with_the_token_of_the_user(
    address: str, token: str, mode: str | None, checked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ray.init joins there, unless the variable of Ray says otherwise. A stand-in for Ray's command prints it."""
    (command := tmp_path / "python").write_text('#!/bin/sh\necho "${RAY_AUTH_MODE-unset}" >&2\nexit 1\n')
    command.chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(token)
    monkeypatch.setattr(sys, "executable", str(command))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    loader = ray_cluster.AuthenticationTokenLoader.instance()
    loader.reset_cache()
    try:
        assert str(failure(address)) == checked
    finally:
        loader.reset_cache()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a namespace of its own")
@pytest.mark.parametrize("stale", [False, True])
def test_auto_without_a_cluster_ends_the_run(stale: bool, tmp_path: Path) -> None:
    """Also if the file of one that is gone names its address."""
    if stale:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    ended = subprocess.run(
        [*OF_ITS_OWN, sys.executable, "-c", JOIN.format(seconds=15.0 if stale else 60.0)],
        env={**os.environ, "RAY_ADDRESS": "auto", "RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    reason = "what listens there does not answer in 15 s" if stale else "Could not find any running Ray instance"
    assert ended.stdout.count("\n") == 1 and ended.stderr == "", ended
    assert ended.stdout.startswith("RAY_ADDRESS=auto: no Ray cluster there (") and reason in ended.stdout


def test_a_local_cluster_is_started_with_the_care_of_one_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_ADDRESS=local asks Ray for one; it then is on loopback, in a scratch folder and without agents left."""
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_cluster, "_start_ray", lambda **options: started.append(options))
    monkeypatch.setattr(ray_cluster, "_reaper", lambda: subprocess.Popen(["true"], stdin=subprocess.PIPE))
    monkeypatch.setattr(ray_cluster, "_join", lambda **_: pytest.fail("joined"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with ray_cluster.ray_session(2):
        assert [options["num_cpus"] for options in started] == [2]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("server", ["gone", "http"])
def test_a_run_ends_in_one_line(server: str, tmp_path: Path) -> None:
    with in_thread(Endpoint(says("hello"))) as endpoint, http_server() if server == "http" else nullcontext() as http:
        address = http or f"127.0.0.1:{free_port()}"
        settings = evaluation_of(endpoint, tmp_path)
        program = Program(
            settings, tmp_path / "log", "megatron_collab.evaluate", OPENAI_API_KEY="k", RAY_ADDRESS=address
        )
        try:
            assert program.wait() == EXIT_STOPPED and program.gone() == []
        finally:
            program.end()
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and log.count(f"RAY_ADDRESS={address}: no Ray cluster there (") == 1, log
