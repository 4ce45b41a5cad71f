"""The bench of a step's timeline: latencies of users and judges from a recording."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_collab.llm.recording import Call, CallKey, Shard, Usage


@pytest.fixture
def players(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "tools" / "bench")
    from simulated import players

    return players


def record(folder: Path, calls: list[dict[str, Any]]) -> None:
    """A recording of calls that have these attributes of Call, the usage under "taken"."""
    shard = Shard(folder, "runs/one")
    for number, call in enumerate(calls):
        usage = Usage(requests=1, **call.pop("taken"))
        question = {"model": "openai/m", "messages": [], "number": number}
        fields = {"name": "train-0-0/0/0", "number": number, "time": 1.0, "question": question, "answer": {}}
        shard.record(
            CallKey("train-0-0/0/0", number, question), Call(**{**fields, "failed": None, "taken": usage, **call})
        )


def test_latencies_are_drawn_from_the_answered_calls_of_a_recording(players: ModuleType, tmp_path: Path) -> None:
    refused = {"failed": ("LlmError", "refused"), "answer": None}
    record(
        tmp_path,
        [
            {"taken": {"seconds": 0.5}},
            {"taken": {"seconds": 7.0}},
            {"taken": {"seconds": 90.0}, **refused},
            {"taken": {"seconds": 0.0, "cached": True}},
        ],
    )
    seconds = players.recorded_seconds(tmp_path)
    assert sorted(seconds) == [0.5, 7.0]
    traffic, drawn = players.Traffic(recorded=seconds), random.Random(0)
    assert {traffic.call_seconds(drawn) for _ in range(50)} == {0.5, 7.0}


def test_a_recording_without_an_answered_call_is_refused(players: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded calls"):
        players.recorded_seconds(tmp_path)
    record(tmp_path, [{"taken": {"seconds": 0.0, "cached": True}}])
    with pytest.raises(ValueError, match="holds no answered call"):
        players.recorded_seconds(tmp_path)
