"""Models to talk with, for tests of the page: a script writes for them and for the simulated user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from megatron_collab.observability.run_record import SETTINGS
from tests.view.recorded_runs import GOAL, MARKS, MARKUP, scores

Row = dict[str, Any]
TASKS = {f"booking-{number}": f"I would like a table, number {number}." for number in range(3)}
BROKEN = "broken"  # name of a run whose models do not start
FAULT = "SGLang server 0: it ended with code 1; its log is server_0.log"
WAIT, HOSTILE = "wait", "hostile"  # messages: half of the reply comes, the rest once `go_on` is set; it should harm


class ScriptedSpeaker:
    """A talk.Speaker of models that repeat what they read, each reply in two parts.

    The simulated user ends a conversation of 5 messages.
    """

    go_on = Event()

    def __init__(self, folder: Path, models: Sequence[str], part: int = 0, parts: int = 1) -> None:
        self.share = part, parts
        self._is_broken = folder.name == BROKEN
        self._chats: list[Row] = [
            {"model": model, "prompt": 0, "row": None, "futures": [], "fault": ""} for model in models
        ]
        self._requests = SimpleQueue[Mapping[str, Any] | None]()

    def send(self, request: Mapping[str, Any]) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self.go_on.set()
        self._requests.put(None)

    def updates(self) -> Iterator[Mapping[str, Any]]:
        tasks = [{"id": name, "text": text} for name, text in TASKS.items()]
        yield {"progress": "a server starts", "sets": [{"name": "test", "tasks": tasks, "total": 50}]}
        if self._is_broken:
            yield {"fault": FAULT}
            return
        while (request := self._requests.get()) is not None:
            played = [_played(chat, **request) for chat in self._chats]
            parts = [_half(chat, changes.get("row")) for chat, changes in zip(self._chats, played, strict=True)]
            yield {"chats": [{**chat, "row": row, "busy": True} for chat, row in parts], "progress": ""}
            if request.get("text") == WAIT:
                self.go_on.wait()
            for chat, changes in zip(self._chats, played, strict=True):
                chat |= {"futures": [], "fault": "", **changes}
            yield {"chats": [{**chat, "busy": False} for chat in self._chats], "doing": ""}


def write_models(run: Path, *steps: int) -> None:
    """Add to a run what the page needs to know its models: checkpoints, and the model that it began with."""
    settings = json.loads((run / SETTINGS).read_text())
    (run / SETTINGS).write_text(json.dumps(settings | {"model": {"path": str(run / "model")}}))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    for step in steps:
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)


def _half(chat: Row, row: Row | None) -> tuple[Row, Row | None]:
    """A chat with the row that it has while a reply to it is written: half of the reply."""
    before = chat["row"]
    if not (row and row["turns"] and len(row["messages"]) > len(before["messages"] if before else [])):
        return chat, before
    *messages, reply = row["messages"]
    whole = reply["content"]
    text = whole[: len(whole) // 2]
    raw = row["turns"][-1].removesuffix(whole) + text
    return chat, row | {"messages": [*messages, reply | {"content": text}], "turns": [*row["turns"][:-1], raw]}


def _played(chat: Row, action: str, task: str = "", text: str = "", count: int = 0) -> Row:
    """What an action changes in a chat."""
    model, row = chat["model"], chat["row"]
    match action:
        case "begin":
            opening = [("system", "You book tables."), ("user", TASKS[task])] if task else []
            row = {"task": task, "goal": GOAL if task else "", "ending": None, "error": "", "messages": [], "turns": []}
            return {"row": _replied(row, model, *opening) if opening else row, "prompt": len(opening)}
        case "undo":
            return {"row": row | {"messages": row["messages"][:-2], "turns": row["turns"][:-1]}}
        case "futures":
            return {"futures": [_future(row, model, future) for future in range(count)]}
    if row["ending"]:
        return {"fault": "the conversation has ended; begin another one"}
    if action == "user" and len(row["messages"]) >= 5:
        return {"row": row | {"ending": "user_done"}}
    return {"row": _replied(row, model, ("user", text or "For four, please."))}


def _replied(row: Row, model: str, *messages: tuple[str, str]) -> Row:
    added = [{"role": role, "content": content} for role, content in messages]
    heard = messages[-1][1]
    reply = f"{MARKUP}{MARKS}{MARKUP}{'m' * 5000}" if heard == HOSTILE else f"{model} heard: {heard}"
    added.append({"role": "assistant", "content": reply})
    raw = f"<think>{model} thinks{reply if heard == HOSTILE else ''}</think>{reply}"
    return row | {"messages": [*row["messages"], *added], "turns": [*row["turns"], raw]}


def _future(row: Row, model: str, future: int) -> Row:
    played = _replied(row, model, ("user", f"Answer {future}"))
    number = {"rollout": 0, "future": future, "reward": 0.5}
    return played | number | {"ending": "user_done" if future else "turn_limit"} | scores(0, future)
