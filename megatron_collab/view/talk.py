"""Talk: one or two models of a run are served at a reader's request, each with a conversation that the page continues.

A process of its own serves them (speaker.py), so that the page's server stays small and quick. It ends on request, with
the command, and if nobody has used it for IDLE_SECONDS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import Any, Protocol

from megatron_collab.config import require
from megatron_collab.observability.records import parsed
from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.text import one_line
from megatron_collab.talk.models import find_model, models_of
from megatron_collab.view.runs import RunView

MOST_MODELS, MOST_FUTURES, MOST_MESSAGES = 2, 8, 200
LONGEST_MESSAGE = 20_000  # characters
IDLE_SECONDS, ACTION_SECONDS, START_SECONDS = 15 * 60, 15 * 60, 60 * 60
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "start": {"run": int, "models": list, "task": str},
    "say": {"text": str},
    "user": {},
    "futures": {"count": int},
    "undo": {},
    "stop": {},
}


class Speaker(Protocol):
    """Serves models, and has a conversation with each of them."""

    def send(self, request: Mapping[str, Any]) -> None:
        """Let it do an `action` (begin, say, user, futures, undo) in all conversations, one after the other."""

    def updates(self) -> Iterator[Mapping[str, Any]]:
        """Parts of the state of a TalkSession that are new, until it has ended."""

    def end(self) -> None:
        """Let it end; returns at once. May be called twice, from any thread."""


Start = Callable[[Path, Sequence[str]], Speaker]  # of a run's folder and the names of its models


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

    def _begin(self, run: int, models: list[Any], task: str) -> None:
        """Begin conversations about a task, or about nothing, with models; others that are served end first."""
        if not 0 <= run < len(self._runs):
            raise LookupError(f"no run {run}; there are {len(self._runs)}")
        names = [name for name in models if isinstance(name, str)]
        valid = names == models and 0 < len(models) <= MOST_MODELS
        require(valid, f"models: give the names of at most {MOST_MODELS}")
        folder = self._runs[run].folder
        for name in names:
            find_model(folder, name)
        session, about = self._session, {"task": task}
        if session and not session.ended and (session.state["run"], session.state["models"]) == (run, names):
            session.act("begin", about)
            return
        if session:
            session.end()
            session.join()  # the next models may need its memory
        self._session = TalkSession(run, names, self._start(folder, names), about)


class TalkSession:
    """Models of a run while a speaker serves them.

    `state`: `run` and the names of its `models`; `progress`, a line while they start; `sets`, the tasks of the run;
    `doing`, the action that is running, and `said`, its text; `chats`, of each model the `row` of its conversation, how
    many messages of it are the `prompt`, the `futures` of its end, a `fault`, and whether it is `busy`; the `fault` of
    the session, and whether it has `ended`. A later state, also of a later session, has a higher `version`.
    """

    _versions = count()

    def __init__(self, run: int, models: Sequence[str], speaker: Speaker, about: Mapping[str, Any]) -> None:
        """Follow a speaker that has just started, and let it begin conversations `about` something."""
        self._speaker = speaker
        self._lock = Lock()  # of the state, and of the timer
        self._timer: Timer | None = None
        nothing = {"progress": "", "sets": [], "doing": "", "said": "", "chats": [], "fault": "", "ended": False}
        self.state: dict[str, Any] = {"run": run, "models": models, **nothing}
        self.act("begin", about)
        self._thread = Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return bool(self.state["ended"])

    def act(self, action: str, values: Mapping[str, Any]) -> None:
        """Let the speaker do it. Raises ConfigError if it is out of bounds, or if another action is running."""
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
            self._set({"doing": action, "said": values.get("text", ""), "fault": ""})
        self._speaker.send({"action": action, **values})

    def end(self, fault: str = "") -> None:
        """Let the speaker end; `fault`: why, if it was no request."""
        self._update({"ended": True, "fault": fault})
        self._speaker.end()

    def join(self) -> None:
        """Return once the speaker has ended."""
        self._thread.join()

    def _follow(self) -> None:
        try:
            for part in self._speaker.updates():
                self._update(part)
        except Exception as error:
            self.end(one_line(redact(f"{type(error).__name__}: {error}")))
        self._update({"ended": True})

    def _update(self, part: Mapping[str, Any]) -> None:
        """Take over new parts of the state, unless the session has ended."""
        with self._lock:
            if not self.ended:
                self._set(part)

    def _set(self, part: Mapping[str, Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        nothing = {"doing": "", "said": "", "progress": ""} if part.get("ended") else {}
        self.state = {**self.state, **part, **nothing, "version": next(self._versions)}
        if not self.ended:
            self._timer = self._time_limit()

    def _time_limit(self) -> Timer:
        """Ends the session if nothing happens for too long."""
        is_starting = self.state["doing"] and not self.state["chats"]
        seconds = START_SECONDS if is_starting else ACTION_SECONDS if self.state["doing"] else IDLE_SECONDS
        reason = "no progress" if self.state["doing"] else "unused"
        timer = Timer(seconds, self.end, [f"ended: {reason} for {seconds // 60} minutes"])
        timer.daemon = True
        timer.start()
        return timer
