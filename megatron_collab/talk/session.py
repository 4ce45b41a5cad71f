"""Serves models of a run and begins chats with them. No user interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from megatron_collab.talk.models import AFTER, RunModel
from megatron_collab.types import Task

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


class ChatError(RuntimeError):
    """The chat cannot go on so: it has ended, no user can write, or the model is lost; the message says the way out."""


class TaskSet(NamedTuple):
    """Tasks of the run's data, under the name of their set of data.eval or source of data.train.

    `tasks` reads a task when it is accessed. `user`: the one who plays the tasks of the set, None: the run's.
    """

    name: str
    tasks: Sequence[Task]
    user: str | None = None


class Talk:
    """Context manager in which `models` of a run are served side by side, under the run's recorded settings.

    Enter and leave it in the same thread, which must live as long: servers end with the thread that started them. All
    other methods may be called from any thread, and awaited in any event loop.
    """

    def __init__(
        self,
        run: Path,
        names: Sequence[str] = (AFTER,),
        overrides: Sequence[str] = (),
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        """`names`: of the models, as `find_model` takes them. `overrides`: settings to change, as on a command line.

        `progress` is called with a line for each phase of the start. Starts nothing and takes about a second. Raises
        ConfigError for a folder that holds no run, a model that it lacks, or settings that cannot work here.
        """
        self.models: list[RunModel] = []
        self.task_sets: list[TaskSet] = []  # empty if the run played no conversations (sft, dpo)
        self.users: list[str] = []  # names that `begin` takes
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Convert and serve the models; returns once all answer, on CPU after about half a minute.

        Raises ConfigError if a checkpoint is damaged, RunStopped if a server or Ray does not start.
        """
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the servers, and with them all chats."""
        raise NotImplementedError

    def find_task(self, task: str | None, index: int = 0, name: str | None = None) -> Task:
        """The task with the id `task`, or number `index` (from 0) of a set, the first if `name` is None.

        Its user is the one who would play it in the run. Raises ConfigError if there is none.
        """
        raise NotImplementedError

    async def begin(self, model: int = 0, task: Task | None = None, user: str | None = None) -> Chat:
        """A chat with the model of this number in `models`. `user`: who plays the task, None: the task's user.

        If the task's conversation begins with messages, the model has answered them. Without a task only a person
        writes. Raises ConfigError for an unknown user, ChatError if the model is lost.
        """
        raise NotImplementedError


class Chat:
    """A conversation with a served model. One call at a time; futures may be played beside those of other chats.

    Rows are those of a run's transcripts (docs/reference/run-files.md): messages as the user sees them, `turns` with
    the model's thoughts if it has any, `private` notes of the simulated user by message, `scores`, `judgments`,
    `ending` (None while it goes on) and `error`. All texts come from models: show them as text.
    """

    model: RunModel
    task: Task | None
    row: Row  # the conversation so far

    async def say(self, text: str) -> Row:
        """The conversation after the user's message `text` and the model's answer.

        The answer includes calls of tools. Raises ChatError if the chat has ended or `text` is blank or too long.
        """
        raise NotImplementedError

    async def let_user(self) -> Row:
        """As `say`, with a message of the simulated user, who may also end the conversation.

        Raises ChatError if the chat has ended, or has no task.
        """
        raise NotImplementedError

    async def futures(self, count: int) -> list[Row]:
        """`count` continuations of the conversation, played with the simulated user to their endings and scored.

        The conversation itself stays. Rows have the scores of the run's metrics that apply to the task, and the reward
        over all futures. Raises ChatError if the chat has ended, has no task, or the model has not written yet.
        """
        raise NotImplementedError

    async def undo(self) -> Row:
        """The conversation without the last user's message and what followed. Raises ChatError if there is none."""
        raise NotImplementedError

    async def close(self) -> None:
        """Forget the conversation and close its tools."""
        raise NotImplementedError
