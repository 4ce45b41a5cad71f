"""Tools of real MCP servers, written with the official package, over standard streams and over HTTP."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from megatron_collab.launch.play_specs import play_spec, tool_spec
from megatron_collab.launch.prepare import compare_tools
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.tools import ToolFailure, mcp_server
from megatron_collab.rollout.tools.toolbox import LONGEST_RESULT, Toolbox
from megatron_collab.runtime.process import wait_for
from megatron_collab.settings import ConfigError, RolloutConfig
from tests.helpers import free_port, listening
from tests.llm.endpoint import Endpoint, in_thread
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config, toolbox_of
from tests.rollout.test_tools import TASK, Scores, notes

pytestmark = pytest.mark.processes
BEARER = "MEGATRON_COLLAB_TEST_BEARER"

# The process keeps the words. `python notebook.py PORT` serves HTTP, which requires the key.
NOTEBOOK = """
import asyncio, os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notebook", log_level="CRITICAL")
words = []
WIRE = os.readlink("/proc/self/fd/1")


def flood(text):
    # The library has moved the descriptor of the standard output.
    wires = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    (wire,) = [wire for wire in wires if wire > 2 and os.readlink(f"/proc/self/fd/{wire}") == WIRE]
    while True:
        os.write(wire, text)

@server.tool()
async def note(word: str) -> str:
    \"\"\"Notes a word; gives all that is noted.\"\"\"
    if word == "die":
        os._exit(1)
    if word == "bad":
        raise ToolError("not that word")
    if word == "slow":
        await asyncio.sleep(60)
    if word == "nap" and os.path.exists(__file__ + ".naps"):
        await asyncio.sleep(2)
    if word == "long":
        return "x" * 200_000
    if word == "flood":
        flood(b"x\\n" * 99)
    if word == "one line":
        flood(b"x" * 65536)
    if word == "mutter":  # 14 MB, which no pipe holds
        for _ in range(20_000):
            print("\\x1b[31mno" * 99, file=sys.stderr)
        time.sleep(60)
    words.append(word)
    return " ".join(words)


@server.tool()
def environment() -> list[str]:
    \"\"\"The variables of the process.\"\"\"
    return sorted(os.environ)


@server.tool()
def nothing() -> str:
    \"\"\"Says nothing.\"\"\"
    return ""


class Guarded:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        header = dict(scope.get("headers", [])).get(b"authorization")
        if scope["type"] == "http" and header != b"Bearer " + os.environ["KEY"].encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            return await send({"type": "http.response.body", "body": b""})
        await self.app(scope, receive, send)


if len(sys.argv) > 1:
    import uvicorn

    app = Guarded(server.streamable_http_app())
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
else:
    server.run()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mcp") / "notebook.py"
    file.write_text(NOTEBOOK)
    return file


@pytest.fixture(scope="module")
def url(notebook: Path) -> Iterator[str]:
    """Address of the notebook over HTTP, which requires a key."""
    port = free_port()
    os.environ[BEARER] = "a-key-of-the-test"
    environment = {**os.environ, "KEY": os.environ[BEARER]}
    process = subprocess.Popen([sys.executable, str(notebook), str(port)], env=environment)
    try:
        up = wait_for(lambda: bool(listening([psutil.Process(process.pid)]).popitem()[1]), 60)
        assert up, "the server does not listen"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()
        del os.environ[BEARER]


def box(timeout: float = 30.0, **settings: Any) -> Toolbox:
    options = RolloutConfig(mcp_servers={"notebook": settings}, tool_timeout=timeout)
    return toolbox_of(options, FakePolicy(lambda prompt, seed: ""))


def by_stdio(notebook: Path, **settings: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(notebook)], **settings}


def say(box: Toolbox, *calls: str, hanging: str = "") -> list[str]:
    """The tool messages of one conversation with these calls, of which the one that hangs times out soon."""
    timeout = box.timeout

    async def conversation() -> list[str]:
        answers = []
        async with box.open(TASK) as session:
            for call in calls:
                box.timeout = 0.5 if call == hanging else timeout
                answers.append((await session.answer(f"call {call}"))[0][0].content)
        return answers

    return asyncio.run(conversation())


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_each_conversation_has_its_own_process_which_ends_with_it(notebook: Path) -> None:
    before = children()
    toolbox = box(**by_stdio(notebook))
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["note", "environment", "nothing"]
    assert toolbox.functions["note"].schema["parameters"]["required"] == ["word"]
    assert say(toolbox, 'note {"word": "a"}', 'note {"word": "b"}') == ["a", "a b"]
    answers = say(
        toolbox, 'note {"word": "c"}', 'note {"word": "bad"}', 'note {"word": 3}', "environment {}", "nothing {}"
    )
    assert answers[0] == "c" and answers[1].startswith("error: ") and "not that word" in answers[1]
    assert answers[2] == "error: argument word: 3 is not of type 'string'"
    assert "PATH" in answers[3] and "PYTEST_CURRENT_TEST" not in answers[3]
    assert answers[4] == ""
    assert toolbox.counters == {"tool_calls": 7, "tool_errors": 2}
    assert children() == before


@pytest.mark.slow
def test_futures_repeat_the_calls_of_the_trained_turn(notebook: Path) -> None:
    options = config(mcp_servers={"notebook": by_stdio(notebook)}, max_user_turns=1, futures=2)
    options.train.rollouts_per_prompt, options.reward.weights = 1, {"m": 1.0}
    options.reward.metrics = {"m": {"metric": "asks"}}
    policy, users = FakePolicy(lambda prompt, seed: notes(prompt)), FakeUsers(lambda goal, messages: "go on")
    player = FuturesPlayer(policy, CharacterRenderer(), users, Scores(), play_spec(options))  # type: ignore[arg-type]
    before = children()
    (rollout,) = asyncio.run(player.play(TASK, "s")).rollouts
    for future in rollout.futures:
        assert [m.content for m in future.conversation.messages if m.role == "tool"] == ["a", "a b"]
    assert player.tools.counters == {"tool_calls": 3}
    assert children() == before


def test_hung_calls_time_out_and_dead_servers_are_restarted(notebook: Path) -> None:
    toolbox, slow = box(**by_stdio(notebook)), 'note {"word": "slow"}'
    results = say(toolbox, 'note {"word": "a"}', slow, 'note {"word": "b"}', hanging=slow)
    assert results == ["a", "error: note timed out", "a b"]
    assert toolbox.counters == {"tool_calls": 3, "tool_timeouts": 1, "tool_reconnects": 1}
    before = children()
    with pytest.raises(ToolFailure, match=r"^tool note: "):  # dies again
        say(toolbox, 'note {"word": "a"}', 'note {"word": "die"}')
    assert toolbox.counters["tool_failures"] == 1
    assert children() == before


@pytest.mark.slow
def test_a_server_that_is_killed_between_calls_is_started_again(notebook: Path, tmp_path: Path) -> None:
    before = children()

    async def killed_between(tested: Toolbox, file: Path) -> list[str]:
        """Answers after each of two kills; after the second the program is missing for one call."""
        answers = []
        async with tested.open(TASK) as session:
            await session.answer('call note {"word": "a"}')
            for gone in (False, True):
                (pid,) = children() - before
                psutil.Process(pid).kill()
                if gone:
                    file.rename(f"{file}.gone")
                    with pytest.raises(ToolFailure):
                        await session.answer('call note {"word": "-"}')
                    Path(f"{file}.gone").rename(file)
                answers.append((await session.answer('call note {"word": "b"}'))[0][0].content)
        for tools in tested.toolsets:
            await tools._leave_all()  # type: ignore[attr-defined]  # a shared server stays until its process ends
        return answers

    mine = shutil.copy(notebook, tmp_path / "mine.py")
    private = box(**by_stdio(mine))
    assert asyncio.run(killed_between(private, mine)) == ["a b", "a b b"]
    assert private.counters == {"tool_calls": 4, "tool_reconnects": 2, "tool_failures": 1}
    assert asyncio.run(killed_between(box(**by_stdio(mine, shared=True)), mine)) == ["b", "b"]
    assert children() == before


@pytest.mark.slow
def test_each_repeated_call_has_the_whole_timeout(notebook: Path, tmp_path: Path) -> None:
    """And not what remains of the timeout of the call that found the connection lost."""
    mine = shutil.copy(notebook, tmp_path / "mine.py")
    toolbox, before = box(timeout=5.0, **by_stdio(mine)), children()

    async def conversation() -> str:
        async with toolbox.open(TASK) as session:
            for _ in range(3):
                await session.answer('call note {"word": "nap"}')
            (pid,) = children() - before
            psutil.Process(pid).kill()
            Path(f"{mine}.naps").touch()  # from now on a nap takes 2 s
            return (await session.answer('call note {"word": "a"}'))[0][0].content

    assert asyncio.run(conversation()) == "nap nap nap a"
    # Closing has that timeout too, and the end of a server may take as long on a busy machine.
    assert (toolbox.counters["tool_calls"], toolbox.counters["tool_reconnects"]) == (4, 1)


@pytest.mark.slow
def test_over_http_with_a_key_shared_or_not(url: str) -> None:
    shared = box(url=url, bearer=BEARER, tools=["note"], shared=True)
    assert [schema["function"]["name"] for schema in shared.schemas] == ["note"]
    assert say(shared, 'note {"word": "a"}') == ["a"]
    private = box(url=url, bearer=BEARER, tools=["note"])
    assert say(private, 'note {"word": "b"}', 'note {"word": "bad"}')[0] == "a b"
    assert private.counters == {"tool_calls": 2, "tool_errors": 1}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "rollout.mcp_servers.notebook: give either command or url"),
        ({"url": "localhost:1"}, "rollout.mcp_servers.notebook.url=localhost:1: must begin with http://"),
        ({"cmd": "x"}, "rollout.mcp_servers.notebook.cmd: no such setting; there are command, "),
        ({"command": "x", "env": ["NOT_SET_1"]}, "environment variable NOT_SET_1 is not set; set it"),
        ({"command": "/no/such/program"}, "rollout.mcp_servers.notebook: no answer from /no/such/program"),
        ({"command": "/bin/false"}, "rollout.mcp_servers.notebook: no answer from /bin/false"),
        ({"url": "http://127.0.0.1:9/mcp"}, "rollout.mcp_servers.notebook: no answer from http://127.0.0.1:9/mcp"),
        ({"url": "{url}"}, "no answer from {url}"),
        (
            {"url": "{url}", "bearer": BEARER, "tools": ["nota"]},
            "tools=nota: no such tool; the server has note, environment, nothing; the",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_in_one_line(settings: dict[str, Any], why: str, url: str) -> None:
    filled = {key: value.format(url=url) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(ConfigError) as error:
        tool_spec(RolloutConfig(mcp_servers={"notebook": filled})).schemas()
    assert why.format(url=url) in str(error.value) and "\n" not in str(error.value)


def test_a_server_whose_tools_have_changed_since_the_run_began_is_named(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings = []
    for tools in ([], [], ["note"]):
        server = {"url": url, "bearer": BEARER, "tools": tools}
        compare_tools(tmp_path, tool_spec(RolloutConfig(mcp_servers={"n": server})))
        warnings.append(capsys.readouterr().err)
    assert warnings[:2] == ["", ""] and warnings[2].count("\n") == 1
    assert warnings[2].startswith("megatron-collab: rollout.mcp_servers.n: its tools have changed since the run")
    assert warnings[2].endswith(": environment, nothing\n")


def test_two_tools_of_one_name_are_refused(notebook: Path, url: str) -> None:
    both = {"notebook": by_stdio(notebook), "two": {"url": url, "bearer": BEARER}}
    with pytest.raises(ConfigError, match=r"^tool note: two of rollout.tools and rollout.mcp_servers have this name"):
        tool_spec(RolloutConfig(mcp_servers=both)).schemas()


FLOODS = {
    "lines": "while True: print('x')",
    "one line": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "messages": 'while True: print(\'{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}\')',
    "braces": "while True: print('{')",
    "blank lines": "while True: print()",
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that would go on writing get a fifth of a second to end by themselves, not the two of the client.

    They have time to reach the limit on a busy machine.
    """
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.2)
    monkeypatch.setattr(mcp_server, "CONNECT_SECONDS", 300.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "flood", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("lines", "one line"))) for name in FLOODS]
)
def test_a_server_that_floods_is_refused_in_one_line(flood: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="OutputFlood: it writes more than 16777216 bytes or 10000 lines"):
        tool_spec(
            RolloutConfig(mcp_servers={"n": {"command": sys.executable, "args": ["-c", FLOODS[flood]]}})
        ).schemas()
    assert capfd.readouterr() == ("", "")


def test_the_standard_error_of_a_server_stays_in_the_reason(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys\nsys.stderr.write('\\x1b[31m no ' * 100_000 + 'sk-ab12cd34ef56gh78ij90kl12 end')"
    with pytest.raises(ConfigError) as error:
        tool_spec(RolloutConfig(mcp_servers={"n": {"command": sys.executable, "args": ["-c", program]}})).schemas()
    assert r"\x1b[31m no \x1b[31m no *** end)" in str(error.value) and len(str(error.value)) < 600
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_floods_within_a_conversation_are_bounded(notebook: Path, capfd: pytest.CaptureFixture[str]) -> None:
    toolbox, before = box(timeout=60.0, **by_stdio(notebook)), children()
    long, noted = say(toolbox, 'note {"word": "long"}', 'note {"word": "a"}')
    assert long == "x" * LONGEST_RESULT + f"\n[cut: {LONGEST_RESULT} of 200000 characters]" and noted == "a"
    assert toolbox.counters == {"tool_calls": 2, "tool_cut": 1}
    for word in ("flood", "one line"):
        with pytest.raises(ToolFailure, match="ToolLost: the connection to the MCP server is lost: OutputFlood: it wr"):
            say(toolbox, f'note {{"word": "{word}"}}')
    mutter = 'note {"word": "mutter"}'
    answers = say(box(**by_stdio(notebook)), 'note {"word": "a"}', mutter, 'note {"word": "b"}', hanging=mutter)
    assert answers == ["a", "error: note timed out", "a b"]
    assert capfd.readouterr() == ("", "") and children() == before


HTTP_FLOODS = {
    "json": ({"content-type": "application/json"}, b"[" * 65536),
    "events": ({"content-type": "text/event-stream"}, b"data: x\n\n" * 9999),
    "line": ({"content-type": "text/event-stream"}, b"data: " + b"x" * 65536),
    "compressed": ({"content-type": "application/json", "content-encoding": "gzip"}, b"x"),
}


@pytest.mark.parametrize(("headers", "chunk"), HTTP_FLOODS.values(), ids=HTTP_FLOODS.keys())
def test_a_server_that_floods_over_http_is_refused_in_one_line(
    headers: dict[str, str], chunk: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(chunk)
        return response

    with in_thread(Endpoint(flood)) as endpoint:
        url = f"http://127.0.0.1:{endpoint.port}/v1/chat/completions"
        reason = r"no answer from .*(it writes more than|1048576 byte limit|Content-Encoding gzip)"
        with pytest.raises(ConfigError, match=reason) as error:
            tool_spec(RolloutConfig(mcp_servers={"n": {"url": url}})).schemas()
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""
