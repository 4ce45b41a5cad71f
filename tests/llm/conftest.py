from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_collab.llm import client as clients


@pytest.fixture
def no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client means to pause; it does not."""
    requested: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        requested.append(seconds)
        await sleep(0)

    monkeypatch.setattr(clients, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
    return requested
