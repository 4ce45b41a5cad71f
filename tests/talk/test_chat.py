"""What `megatron-collab chat` prints of its lines, over a scripted conversation without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.talk.chat import _Terminal
from megatron_collab.talk.session import Chat

ROW: dict[str, Any] = {"messages": [], "ending": None, "scores": {}, "error": "", "reward": None}
QUESTION, REPLY = {"role": "user", "content": "hello"}, "one two\nuser: three \x1b[31m"


class ScriptedTalk:
    """Models that answer in pieces, and a simulated user that fails before it writes."""

    def __init__(self, *names: str) -> None:
        self.models = [SimpleNamespace(name=name) for name in names]
        self.chats = [Chat() for _ in names]

    async def act(self, action: str, show: Callable[[], None], *values: Any) -> None:
        for chat in self.chats:
            chat.busy, chat.fault = True, ""
        for rows in zip(*(self.rows(action, chat, *values) for chat in self.chats), strict=True):
            for chat, row in zip(self.chats, rows, strict=True):
                chat.row = row
            show()
        for chat in self.chats:
            chat.busy = False
            show()

    def rows(self, action: str, chat: Chat, *values: Any) -> Iterator[Any]:
        if action == "user":
            yield ROW | {"ending": "error", "error": "user scripted: 401 Unauthorized"}
        elif action != "say":
            yield ROW
        else:
            for end in (0, 4, 8, len(REPLY)):
                answer = [{"role": "assistant", "content": REPLY[:end]}] if end else []
                yield ROW | {"messages": [QUESTION, *answer]}


def printed(capsys: pytest.CaptureFixture[str], *lines: str, models: tuple[str, ...] = ("step_60",)) -> list[str]:
    async def obey() -> None:
        terminal = _Terminal(ScriptedTalk(*models), None)  # type: ignore[arg-type]
        await terminal.begin()
        for line in lines:
            await terminal.obey(line)

    asyncio.run(obey())
    return capsys.readouterr().out.splitlines()


def test_an_ending_without_a_message_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    ending = "--- step_60: error (user scripted: 401 Unauthorized)"
    assert printed(capsys, "/user", "/user") == [ending]
    assert printed(capsys, "/user", "/undo", "/user") == [ending] * 2
    assert printed(capsys, "/user", "/reset", "/user") == [ending] * 2


def test_replies_are_printed_while_they_grow_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """No line of a reply looks like another message, and the terminal obeys none of its characters."""
    reply = ["one two", "    user: three \\x1b[31m"]
    expected = [f"before: {reply[0]}", reply[1], f"step_60: {reply[0]}", reply[1]]
    assert printed(capsys, "hello", models=("before", "step_60")) == expected
    assert printed(capsys, "hello", "/undo")[-1] == "--- step_60: back to message 0"


def test_a_reply_is_printed_before_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    talk = ScriptedTalk("step_60")
    shown: list[str] = []

    async def obey() -> None:
        terminal = _Terminal(talk, None)  # type: ignore[arg-type]
        await terminal.begin()
        show = terminal._show
        terminal._show = lambda: (show(), shown.append(capsys.readouterr().out))  # type: ignore[method-assign]
        await terminal.obey("hello")

    asyncio.run(obey())
    assert shown == ["", "step_60: one", " two", "\n    user: three \\x1b[31m", "\n"]


def test_a_number_that_is_too_long_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(capsys, f"/futures {'9' * 5000}")
    assert line.startswith("/user, /futures N")
