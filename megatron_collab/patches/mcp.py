"""Patch of the MCP client: the output of a server is bounded, and its standard error does not reach the console."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from subprocess import PIPE
from typing import Any

from megatron_collab.patches import Patch

LONGEST_OUTPUT, MOST_LINES = 1 << 24, 10_000  # bytes and lines that a server may write after a message to it
_LAST_WORDS = 2000  # bytes of standard error that are kept


class OutputFlood(RuntimeError):
    """A server writes more than it may."""


class Budget:
    """Counts what a server writes after each message to it."""

    def __init__(self) -> None:
        self._bytes, self._lines = LONGEST_OUTPUT, MOST_LINES

    def renew(self) -> None:
        self._bytes, self._lines = LONGEST_OUTPUT, MOST_LINES

    def spend(self, chunk: bytes) -> bytes:
        """`chunk`. Raises OutputFlood if it is too much."""
        self._bytes -= len(chunk)
        self._lines -= chunk.count(b"\n")
        if self._bytes < 0 or self._lines < 0:
            limits = f"{LONGEST_OUTPUT} bytes or {MOST_LINES} lines"
            raise OutputFlood(f"it writes more than {limits} without being asked again; correct the server")
        return chunk


class ServerOutput:
    """What a server writes besides messages: the end of its standard error, and whether it floods over HTTP."""

    def __init__(self) -> None:
        self._end, self._flood = b"", ""

    @property
    def detail(self) -> str:
        """What an error of the connection is about, if the server's output says so; else empty."""
        text = self._end.decode(errors="replace").strip()
        return self._flood or (f"it wrote: {text}" if text else "")

    async def read(self, stream: Any) -> None:
        """Read the standard error of a server's process."""
        from anyio import BrokenResourceError, ClosedResourceError, EndOfStream

        with suppress(BrokenResourceError, ClosedResourceError, EndOfStream, OSError):
            while True:
                self._end = (self._end + await stream.receive())[-_LAST_WORDS:]

    async def bound(self, response: Any) -> None:
        """A hook of httpx2 for responses: bodies end by OutputFlood, and none is compressed."""
        import httpx2

        packing = response.headers.get("content-encoding", "identity")
        if packing != "identity":
            raise OutputFlood(f"it answers in Content-Encoding {packing}, which was not accepted; correct the server")
        output, stream = self, response.stream

        class Counted(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                budget = Budget()
                async for chunk in stream:
                    try:
                        yield budget.spend(chunk)
                    except OutputFlood as error:
                        output._flood = str(error)
                        raise

            async def aclose(self) -> None:
                await stream.aclose()

        response.stream = Counted()


@cache
def bound_output() -> None:
    """Make `stdio_client` end the connection by OutputFlood, and read standard error if `errlog` is a ServerOutput.

    Its own log, a traceback for each line that is no message, is turned off: callers get the errors.
    """
    from anyio import EndOfStream
    from anyio.abc import ByteReceiveStream, ByteSendStream
    from mcp import client

    stdio: Any = client.stdio

    class Output(ByteReceiveStream):
        def __init__(self, stream: Any, budget: Budget) -> None:
            self._stream, self._budget, self._flooded = stream, budget, False

        async def receive(self, max_bytes: int = 1 << 16) -> bytes:
            if self._flooded:  # the client reads on until the end
                raise EndOfStream
            try:
                return self._budget.spend(await self._stream.receive(max_bytes))
            except OutputFlood:
                self._flooded = True
                raise

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Input(ByteSendStream):
        def __init__(self, stream: Any, budget: Budget) -> None:
            self._stream, self._budget = stream, budget

        async def send(self, item: bytes) -> None:
            self._budget.renew()
            await self._stream.send(item)

        async def aclose(self) -> None:
            await self._stream.aclose()

    create = stdio._create_platform_compatible_process

    async def bounded(*, errlog: Any, **options: Any) -> Any:
        captured = isinstance(errlog, ServerOutput)
        process: Any = await create(errlog=PIPE if captured else errlog, **options)
        budget = Budget()
        process._stdin, process._stdout = Input(process.stdin, budget), Output(process.stdout, budget)
        if captured:
            process._stdout.reader = asyncio.create_task(errlog.read(process.stderr))  # a task needs a reference
        return process

    stdio._create_platform_compatible_process = bounded
    logging.getLogger("mcp").setLevel(logging.CRITICAL + 1)


PATCHES = (
    Patch(
        "mcp",
        "servers write a bounded amount",
        why="A server that writes without an end fills memory, and the log with tracebacks: 489,710 lines in a test.",
        upstream="client/stdio.py:108 (create process), :140 (buffer of a line), :224 (log)",
        until="the client limits the length of a message and what it logs",
        test="tests/rollout/test_mcp_server.py::test_a_server_that_floods_is_refused_in_one_line",
        uses=("mcp.client.stdio._create_platform_compatible_process", "anyio.abc.Process.stdin"),
    ),
)
