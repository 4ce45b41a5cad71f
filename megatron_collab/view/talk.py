"""Talk: one or two models, also of two runs, are served at a reader's request, each with a conversation.

A process of its own serves those of a run (talk/speaker.py), so that the page's server stays small and quick. It ends
on request, with the command, and if nobody has used it for IDLE_SECONDS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

from megatron_collab.observability.records import parsed
from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import require
from megatron_collab.talk.models import find_model, models_of
from megatron_collab.view.runs import RunView

MOST_MODELS, MOST_FUTURES, MOST_MESSAGES = 2, 8, 200
LONGEST_MESSAGE = 20_000  # characters
IDLE_SECONDS, ACTION_SECONDS, START_SECONDS = 15 * 60, 15 * 60, 60 * 60
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "start": {"models": list, "task": str},
    "say": {"text": str},
    "user": {},
    "futures": {"count": int},
    "undo": {},
    "stop": {},
}


class Speaker(Protocol):
    """Serves models of a run, and has a conversation with each of them."""

    def send(self, request: Mapping[str, Any]) -> None:
        """Have it do an `action` (begin, say, user, futures, undo) in all conversations, one after the other."""

    def updates(self) -> Iterator[Mapping[str, Any]]:
        """Changes of a TalkSession's state, as if this were its only speaker, until it has ended."""

    def end(self) -> None:
        """Let it end; returns at once. May be called twice, from any thread."""


Start = Callable[[Path, Sequence[str], int, int], Speaker]  # of a run's folder, names of models, part and parts of GPUs
Side = tuple[int, str]  # number of a run, name of a model of it


def models(run: RunView) -> list[dict[str, Any]]:
    """The models of a run, by step. Raises ConfigError if the run has none."""
    return [{"name": model.name, "step": model.step} for model in models_of(run.folder)]


class PageTalk:
    """The models that are served for the page: none, or those of one session."""

    def __init__(self, runs: Sequence[RunView], start: Start) -> None:
        self._runs, self._start = runs, start
        self._session: TalkSession | None = None
        self._lock = Lock()  # one action is accepted at a time

    def state(self) -> dict[str, Any] | None:
        """That of the session (TalkSession.state); None before the first one."""
        return None if self._session is None else self._session.state

    def act(self, body: bytes) -> dict[str, Any] | None:
        """Accept an action, which `body` has as JSON; returns the state at once.

        Raises ConfigError if it is malformed or another one is running, LookupError if there is no such run.
        """
        values = dict(parsed(body.decode(errors="replace")) or {})
        action = values.pop("action", None)
        require(isinstance(action, str) and action in _FIELDS, f"action: give one of {', '.join(_FIELDS)}")
        assert isinstance(action, str)
        fields, kinds = _FIELDS[action], {name: type(value) for name, value in values.items()}
        require(kinds == fields, f"{action} has {', '.join(fields) or 'no values'} and nothing else")
        with self._lock:
            if action == "start":
                self._begin(**values)
            else:
                require(self._session is not None, "no model is served; start one")
                assert self._session
                if action == "stop":
                    self._session.end("")
                else:
                    self._session.act(action, values)
        return self.state()

    def _begin(self, models: list[Any], task: str) -> None:
        """Begin conversations about a task, or about nothing, with models; others that are served end first."""
        valid = all(isinstance(side, list) and [*map(type, side)] == [int, str] for side in models)
        message = f"models: give at most {MOST_MODELS}, each as the number of a run and a name"
        require(valid and 0 < len(models) <= MOST_MODELS, message)
        names = dict[int, list[str]]()
        for run, name in models:
            if not 0 <= run < len(self._runs):
                raise LookupError(f"no run {run}; there are {len(self._runs)}")
            find_model(self._runs[run].folder, name)
            names.setdefault(run, []).append(name)
        sides, session, about = [(run, name) for run, name in models], self._session, {"task": task}
        if session and not session.ended and session.state["models"] == sides:
            session.act("begin", about)
            return
        if session:
            session.end()
            session.join()  # the next models may need its memory
        speakers = {
            run: self._start(self._runs[run].folder, of_run, part, len(names))
            for part, (run, of_run) in enumerate(names.items())
        }
        self._session = TalkSession(sides, speakers, about)


class TalkSession:
    """Models while speakers serve them, those of each run by another one.

    `state`: `models`, a Side each; `progress`, a line while they start; `sets`, the tasks of the first run; `doing`,
    the action that is running; `chats`, of each model what talk.session.Chat has, once all are served; the `fault` of
    the session, and whether it has `ended`. A later state, also of a later session, has a higher `version`.
    """

    _versions = count()

    def __init__(self, models: Sequence[Side], speakers: Mapping[int, Speaker], about: Mapping[str, Any]) -> None:
        """Follow `speakers` that have just started, by run, and let them begin conversations `about` something."""
        self._speakers = speakers
        self._lock = Lock()  # of the state, and of the two below
        self._chats = dict[int, list[Any]]()  # by run
        self._working = set[int]()  # the runs whose speaker does what is to be done
        self._news = SimpleQueue[tuple[int, Mapping[str, Any]]]()
        nothing = {"progress": "", "sets": [], "doing": "", "chats": [], "fault": "", "ended": False}
        self.state: dict[str, Any] = {"models": models, **nothing}
        self.act("begin", about)
        self._readers = [Thread(target=self._read, args=entry, daemon=True) for entry in speakers.items()]
        for thread in (*self._readers, Thread(target=self._follow, daemon=True)):
            thread.start()

    @property
    def ended(self) -> bool:
        return bool(self.state["ended"])

    def act(self, action: str, values: Mapping[str, Any]) -> None:
        """Have the speakers act. Raises ConfigError if it is out of bounds, or if another action is running."""
        text, futures = values.get("text", "-"), values.get("count", 1)
        require(0 < len(text) <= LONGEST_MESSAGE, f"text: give 1 to {LONGEST_MESSAGE} characters")
        require(0 < futures <= MOST_FUTURES, f"count: give 1 to {MOST_FUTURES}")
        with self._lock:
            state = self.state
            require(not state["ended"], "the models are no longer served; start them again")
            require(not state["doing"], "wait until the last action has finished, or stop the models")
            longest = max((len(chat["row"]["messages"]) for chat in state["chats"] if chat["row"]), default=0)
            is_short = action in ("begin", "undo") or longest < MOST_MESSAGES
            require(is_short, f"a conversation has {MOST_MESSAGES} messages; begin another one")
            self._working = {*self._speakers}
            self._set({"doing": action, "fault": ""})
        self._news.put((0, {}))  # the limit of time is another one
        for speaker in self._speakers.values():
            speaker.send({"action": action, **values})

    def end(self, fault: str = "") -> None:
        """End the speakers; `fault`: the reason, if nobody requested it."""
        with self._lock:
            if not self.ended:
                chats = [{**chat, "busy": False} for chat in self.state["chats"]]
                self._set({"ended": True, "fault": fault, "doing": "", "progress": "", "chats": chats})
        self._news.put((0, {}))
        for speaker in self._speakers.values():
            speaker.end()

    def join(self) -> None:
        """Return once the speakers have ended."""
        for thread in self._readers:
            thread.join()

    def _read(self, run: int, speaker: Speaker) -> None:
        """Pass on what a speaker says until it ends, and with it the session."""
        fault = ""
        try:
            for news in speaker.updates():
                self._news.put((run, news))
                fault = news.get("fault", fault)
        except Exception as error:
            fault = one_line(redact(f"{type(error).__name__}: {error}"))
        self._news.put((run, {"ended": True, "fault": fault}))

    def _follow(self) -> None:
        """Take over what the speakers say; ends the session if nothing happens for too long."""
        while not self.ended:
            is_starting = self.state["doing"] and not self.state["chats"]
            seconds = START_SECONDS if is_starting else ACTION_SECONDS if self.state["doing"] else IDLE_SECONDS
            try:
                self._take(*self._news.get(timeout=seconds))
            except Empty:
                reason = "no progress" if self.state["doing"] else "unused"
                self.end(f"ended: {reason} for {seconds // 60} minutes")

    def _take(self, run: int, news: Mapping[str, Any]) -> None:
        """Take over what the speaker of a run says."""
        if news.get("ended"):
            self.end(news["fault"])
            return
        changed = dict(news)
        with self._lock:
            if self.ended:
                return
            if "chats" in news:
                self._chats[run] = news["chats"]
                by_run = {number: iter(chats) for number, chats in self._chats.items()}
                all_served = by_run.keys() == self._speakers.keys()
                changed["chats"] = [next(by_run[number]) for number, _ in self.state["models"]] if all_served else []
            if "doing" in news:
                self._working.discard(run)
                changed["doing"] = self.state["doing"] if self._working else ""
            if "sets" in news and run != self.state["models"][0][0]:
                del changed["sets"]
            self._set(changed)

    def _set(self, changed: Mapping[str, Any]) -> None:
        self.state = {**self.state, **changed, "version": next(self._versions)}
