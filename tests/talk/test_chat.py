"""What `megatron-collab chat` prints of its lines, over a scripted conversation without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.talk.chat import _Terminal

ROW: dict[str, Any] = {"messages": [], "ending": None, "scores": {}, "error": "", "reward": None}


class ScriptedChat:
    """A conversation whose simulated user fails before it writes."""

    model = SimpleNamespace(name="step_60")
    row = ROW

    async def let_user(self) -> None:
        self.row = ROW | {"ending": "error", "error": "user scripted: 401 Unauthorized"}

    async def undo(self) -> None:
        self.row = ROW

    async def close(self) -> None:
        pass


class ScriptedTalk:
    models = ("step_60",)

    async def begin(self, model: int, task: Any) -> ScriptedChat:
        return ScriptedChat()


def printed(capsys: pytest.CaptureFixture[str], *lines: str) -> list[str]:
    async def obey() -> None:
        terminal = _Terminal(ScriptedTalk(), None)  # type: ignore[arg-type]
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


def test_a_number_that_is_too_long_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(capsys, f"/futures {'9' * 5000}")
    assert line.startswith("/user, /futures N")
