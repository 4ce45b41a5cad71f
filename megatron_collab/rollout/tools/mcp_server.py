"""Tools of an MCP server (Model Context Protocol), called through the official client.

Each conversation has its own session from its first call on: a process if `command` is set, a connection if `url` is.
A server's state cannot be copied, so a future repeats the calls of the trained turn in a new session.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from megatron_collab.patches.mcp import ServerOutput, bound_output
from megatron_collab.rollout.tools import Schema, ToolError, ToolFailure, ToolLost, Toolset
from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ADDRESS, ConfigError, build, header_fault, nearest, option, require
from megatron_collab.types import Task, ToolCall

if TYPE_CHECKING:  # takes a second to import, and most runs use no MCP server
    from mcp import Client
    from mcp.types import CallToolResult

_LOST = "the connection to the MCP server is lost"
_MOST_TOOLS = 1000
_LONGEST_ERROR = 200  # characters
CONNECT_SECONDS = 30.0  # timeout for a server to start, or to list its tools


@dataclass(frozen=True)
class Options:
    """The settings of a server, as rollout.mcp_servers.NAME.SETTING."""

    command: str = option("", "command that runs the server on its standard input and output")
    args: list[str] = option([], "arguments of command", blank=True)
    env: list[str] = option([], "environment variables to pass to command, besides PATH, HOME and the like")
    url: str = option(
        "", "instead of command: address of a streamable HTTP server, e.g. http://10.0.0.5:8000/mcp", kind=ADDRESS
    )
    bearer: str = option("", "name of the environment variable with the bearer token for url")
    tools: list[str] = option([], "tools of the server that the policy gets; empty: all")
    shared: bool = option(False, "all conversations of a worker share a session; for servers without state")

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        for name in (*self.env, *([self.bearer] if self.bearer else [])):
            if name not in os.environ:
                raise ValueError(f"environment variable {name} is not set; set it")
        if self.bearer and (fault := header_fault(os.environ[self.bearer])):
            raise ValueError(f"environment variable {self.bearer} {fault}")


@dataclass(frozen=True)
class Server:
    """An MCP server by its name in the settings; see Options."""

    name: str
    command: str
    args: tuple[str, ...]
    env: tuple[str, ...]
    url: str
    bearer: str
    tools: tuple[str, ...]
    shared: bool

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A connected client; the asyncio task that enters the context must also exit it.

        Errors include the reason that the server's output gives for them.
        """
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        bound_output()
        output: Any = ServerOutput()
        try:
            async with AsyncExitStack() as stack:
                if self.command:
                    env = {name: os.environ[name] for name in self.env}
                    process = StdioServerParameters(command=self.command, args=list(self.args), env=env)
                    transport: Any = stdio_client(process, output)
                else:
                    headers = {"Authorization": f"Bearer {os.environ[self.bearer]}"} if self.bearer else {}
                    headers["Accept-Encoding"] = "identity"
                    hooks: Any = {"response": [output.bound]}
                    http = httpx2.AsyncClient(headers=headers, event_hooks=hooks, timeout=None)  # see tool_timeout
                    transport = streamable_http_client(self.url, http_client=await stack.enter_async_context(http))
                yield await stack.enter_async_context(Client(transport))
        except Exception as error:
            if not (detail := one_line(redact(output.detail), _LONGEST_ERROR)):
                raise
            raise RuntimeError(f"{_reason(error)}; {detail}") from error


def server(name: str, settings: Mapping[str, Any]) -> Server:
    """The server configured as rollout.mcp_servers.`name`. Raises ConfigError."""
    options: dict[str, Any] = asdict(build(Options, settings, f"rollout.mcp_servers.{name}."))
    tuples = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
    return Server(name, **{**options, **tuples})


@cache
def server_schemas(server: Server) -> tuple[Schema, ...]:
    """The server's tools that the policy may call, in the server's order; listed once per process.

    Raises ConfigError if the server does not answer, or lacks a configured tool.
    """

    async def ask() -> list[Any]:
        server_tools, cursor = [], None
        async with asyncio.timeout(CONNECT_SECONDS), server.connect() as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                server_tools += page.tools
                if len(server_tools) > _MOST_TOOLS:
                    raise ValueError(f"it lists more than {_MOST_TOOLS} tools")
                if not (cursor := page.next_cursor):
                    return server_tools

    setting = f"rollout.mcp_servers.{server.name}"
    with ThreadPoolExecutor(1) as thread:  # the current thread may run an event loop
        try:
            tools = thread.submit(asyncio.run, ask()).result()
        except Exception as error:  # of the program, the network, the protocol or the server
            target = server.url or " ".join([server.command, *server.args])
            message = f"no answer from {target} ({_reason(error)}); start it, or correct the setting"
            raise ConfigError(f"{setting}: {message}") from error
    schemas = {tool.name: _schema(tool) for tool in tools}
    require(bool(schemas), f"{setting}: the server has no tools; remove it")
    for name in server.tools:
        message = f"{setting}.tools={name}: no such tool; the server has {', '.join(schemas)}{nearest(name, schemas)}"
        require(name in schemas, message)
    return tuple(schemas[name] for name in server.tools or schemas)


def _schema(tool: Any) -> Schema:
    return {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}


class McpTools(Toolset):
    """The tools of a server in one conversation; if `shared`, in all conversations of the process.

    `options` is the Server. A call that times out or loses its connection counts as not made: the next call gets a new
    session, in which all earlier calls are repeated, each with its own timeout. A call that loses its connection is
    retried once.
    """

    def __init__(self, options: Server, calls: Sequence[ToolCall] = ()) -> None:
        """`calls`: earlier calls, which are repeated before the next one."""
        super().__init__(options)
        self._calls = list(calls)
        self._session: McpSession | None = None
        self._lost = False  # whether the previous session was lost
        self._ending_sessions: list[McpSession] = []

    @property
    def schemas(self) -> Sequence[Schema]:
        return server_schemas(self.options)

    def new(self) -> McpTools:
        return self if self.options.shared else McpTools(self.options)

    async def fork(self) -> McpTools:
        return self if self.options.shared else McpTools(self.options, self._calls)

    async def answer(self, task: Task, call: ToolCall) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session = self._session
        if session is None:  # another conversation noticed that the shared session is lost
            raise ToolLost(_LOST)
        try:
            result = await session.call(call)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            self._leave(session)
            await session.ended()
            raise ToolLost(f"{_LOST}: {session.fault or _reason(error)}") from error
        except asyncio.CancelledError:
            if not self.options.shared:
                self._leave(session)
            raise
        self._calls += [] if self.options.shared else [call]
        if result.is_error:
            raise ToolError(_text(result))
        return _text(result)

    async def close(self) -> None:
        if not self.options.shared:
            await self._leave_all()

    async def _leave_all(self) -> None:
        if self._session:
            self._leave(self._session)
        await asyncio.gather(*(session.ended() for session in self._ending_sessions))

    async def restore(self, seconds: float) -> bool:
        """Open a session and repeat the earlier calls, unless a session is open; returns whether one was lost before.

        Raises ToolFailure if connecting times out, or a repeated call takes longer than `seconds`.
        """
        if self._session:
            return False
        session, step = McpSession(self.options), "connect"
        try:
            async with asyncio.timeout(limit := max(seconds, CONNECT_SECONDS)):
                await session.connected()
            for number, call in enumerate(self._calls):
                step = f"repeat call {number + 1} of {len(self._calls)}, {call.name},"
                async with asyncio.timeout(limit := seconds):
                    await session.call(call)
        except TimeoutError as error:
            self._leave(session)
            raise ToolFailure(f"the MCP server did not {step} within {limit:g} s") from error
        except BaseException:
            self._leave(session)
            raise
        if self._session:  # another conversation reopened the shared session first
            self._leave(session)
        else:
            self._session = session
        lost, self._lost = self._lost, False
        return lost

    def _leave(self, session: McpSession) -> None:
        """Stop using the session; another conversation may have done so already."""
        session.end()
        self._ending_sessions = [*(ending for ending in self._ending_sessions if not ending.closed), session]
        if self._session is session:
            self._session, self._lost = None, True


class McpSession:
    """A connection, held by a separate asyncio task (see Server.connect)."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.fault = ""  # why the connection ended
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    @property
    def closed(self) -> bool:
        return self._task.done()

    async def connected(self) -> Client:
        """The client, once connected. Raises ToolFailure if there is no connection."""
        return await asyncio.shield(self._client)

    async def call(self, call: ToolCall) -> CallToolResult:
        """Call a tool. Raises MCPError if the connection is lost or the server rejects the call."""
        client = await self.connected()
        return await client.call_tool(call.name, dict(call.arguments))

    def end(self) -> None:
        """Begin to close the session; a server process gets some seconds to exit by itself."""
        self._leaving.set()
        if not self._client.done():
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the session is closed."""
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with self._server.connect() as client:
                self._client.set_result(client)
                await self._leaving.wait()
        except Exception as error:  # any error, as in `server_schemas`; a lost connection is noticed by the next call
            self.fault = _reason(error)
            if not self._client.done():
                self._client.set_exception(ToolFailure(f"the MCP server does not answer: {self.fault}"))


def _text(result: CallToolResult) -> str:
    """The text for the policy: the texts of a result, type names of other blocks, or its structured content as JSON."""
    parts = []
    for block in result.content:
        text = getattr(getattr(block, "resource", block), "text", None)  # an embedded resource may be text
        parts.append(text if text is not None else f"[{block.type}]")
    return "\n".join(parts) if parts else json.dumps(result.structured_content, ensure_ascii=False)


def _reason(error: BaseException) -> str:
    """The first error inside the exception groups that the client raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(redact(f"{type(error).__name__}: {error}")).removesuffix(":")
