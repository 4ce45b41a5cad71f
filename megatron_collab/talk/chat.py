"""Chat with the models of a run in the terminal: its newest checkpoint, an earlier one, or two side by side.

    megatron-collab chat RUN                        # the newest model; another one: --step before, best or N
    megatron-collab chat RUN --beside before        # the same messages to both
    megatron-collab chat RUN --index 0 [--set NAME] # about a task of the run's data; or --task ID

Each line is a message. Others begin with /:

    /user         the simulated user of the task writes the message
    /futures N    N continuations with the simulated user, scored; the conversation stays
    /undo         take the last message back
    /reset        begin anew
    /save FILE    write the conversations, a line of JSON each, as in transcripts

Ctrl-C, Ctrl-D or the end of the input ends it. The settings are the run's; it writes nothing in its folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_collab.commands import ArgumentParser
from megatron_collab.config import WRITTEN_FILE, ConfigError, check_path, require
from megatron_collab.runtime.console import show
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped
from megatron_collab.talk import ChatError

if TYPE_CHECKING:  # Ray and the libraries of data take seconds to import
    from megatron_collab.talk.session import Chat, Row, Talk
    from megatron_collab.types import Task

_HELP = "/user, /futures N, /undo, /reset or /save FILE; any other line is a message"
_MOST_DIGITS = 9


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("chat", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a training run")
    parser.add_argument("--step", default="after", help="before, best, a step, or after: the newest model [after]")
    parser.add_argument("--beside", metavar="STEP", help="another model that gets the same messages")
    parser.add_argument("--task", metavar="ID", help="id of a task of the run's data")
    parser.add_argument("--index", type=int, metavar="N", help="number of a task, from 0")
    parser.add_argument("--set", metavar="NAME", help="of tasks: a set of data.eval, or a source [the first set]")
    parser.add_argument("--user", metavar="NAME", help="user who plays the task [the task's]")
    parser.add_argument("option", nargs="*", help="option=value: other settings than the run's")
    options = parser.parse_intermixed_args(arguments)
    has_task = options.task is not None or options.index is not None
    require(options.task is None or options.index is None, "--task and --index: give one of them")
    require(has_task or options.user is None, "--user: plays a task; give --task ID or --index N too")
    names = [options.step] if options.beside is None else [options.step, options.beside]
    with suppress(KeyboardInterrupt):
        from megatron_collab.talk.session import Talk

        talk = Talk(options.run, names, options.option)
        task = talk.find_task(options.task, options.index or 0, options.set) if has_task else None
        task = talk.played_by(task, options.user) if task and options.user else task
        try:
            with talk:
                _chat(talk, task)
        except RunStopped as stopped:
            print(f"megatron-collab: {stopped}", file=sys.stderr)
            return EXIT_STOPPED
    return 0


def _chat(talk: Talk, task: Task | None) -> None:
    """Obey the lines of the input until it ends."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        import readline  # noqa: F401 (input() edits lines with it)
    else:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    terminal = _Terminal(talk, task)
    with asyncio.Runner() as runner, suppress(EOFError):
        runner.run(terminal.begin())
        while True:
            if line := input("> " if is_typed else "").strip():
                runner.run(terminal.obey(line))


class _Terminal:
    """The chats with all models of `talk` about `task`, and what is printed of them."""

    def __init__(self, talk: Talk, task: Task | None) -> None:
        self._talk, self._task = talk, task
        self._chats: list[Chat] = []
        self._shown: list[tuple[int, str | None]] = []  # of each chat: number of messages, ending

    async def begin(self) -> None:
        """Begin the chats anew."""
        for chat in self._chats:
            await chat.close()
        chats = (self._talk.begin(model, self._task) for model in range(len(self._talk.models)))
        self._chats = list(await asyncio.gather(*chats))
        self._shown = [(0, None) for _ in self._chats]
        self._show()

    async def obey(self, line: str) -> None:
        """Do what a line says, and print what came of it, or why it cannot be done."""
        command, _, argument = line.partition(" ")
        try:
            if not line.startswith("/"):
                await self._all(lambda chat: chat.say(line), typed=1)
            elif command == "/user":
                await self._all(lambda chat: chat.let_user())
            elif command == "/futures" and argument.isdecimal() and len(argument) <= _MOST_DIGITS:
                await self._futures(int(argument))
            elif command == "/undo":
                await self._all(lambda chat: chat.undo())
            elif command == "/reset":
                await self.begin()
            elif command == "/save" and argument:
                self._save(Path(argument))
            else:
                show(_HELP)
        except (ChatError, ConfigError, OSError) as error:
            show(str(error))

    async def _all(self, move: Callable[[Chat], Awaitable[Row]], typed: int = 0) -> None:
        """Move all chats that can; one may have ended before the other. Raises ChatError if one cannot.

        Of the new messages the first `typed` are not printed: the terminal has them already.
        """
        results = await asyncio.gather(*(move(chat) for chat in self._chats), return_exceptions=True)
        self._show(typed)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _futures(self, count: int) -> None:
        played = await asyncio.gather(*(chat.futures(count) for chat in self._chats))
        for chat, row in ((chat, row) for chat, rows in zip(self._chats, played, strict=True) for row in rows):
            show(f"--- {chat.model.name}, future {row['future'] + 1} of {count}: {_outcome(row)}")
            _print(chat, row, len(chat.row["messages"]))

    def _save(self, file: Path) -> None:
        check_path("/save", file, WRITTEN_FILE)
        rows = ({"model": chat.model.name, **chat.row} for chat in self._chats)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        show(f"{file}: written")

    def _show(self, typed: int = 0) -> None:
        """Print the messages that are new, and endings."""
        for number, chat in enumerate(self._chats):
            (shown, ending), messages = self._shown[number], chat.row["messages"]
            if shown > len(messages):
                show(f"--- {chat.model.name}: back to message {len(messages)}")
            _print(chat, chat.row, shown + typed)
            if chat.row["ending"] not in (None, ending):
                show(f"--- {chat.model.name}: {_outcome(chat.row)}")
            self._shown[number] = len(messages), chat.row["ending"]


def _print(chat: Chat, row: Row, start: int) -> None:
    """Print the messages of `row` from number `start` on, those of the model with its thoughts."""
    messages = row["messages"]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    turns = row.get("turns", [])
    raw = dict(zip(replies[len(replies) - len(turns) :], turns, strict=True))
    for at in range(start, len(messages)):
        name = chat.model.name if at in replies else messages[at]["role"]
        text = raw.get(at, messages[at]["content"]).strip().replace("\n", "\n    ")  # else it could imitate another
        show(f"{name}: {text}")


def _outcome(row: Row) -> str:
    """Ending, scores and reward of a conversation."""
    scores = {name: "missing" if isinstance(score, dict) else f"{score:.4g}" for name, score in row["scores"].items()}
    error = f" ({row['error']})" if row["error"] else ""
    reward = [] if row["reward"] is None else [f"reward over all {row['reward']:.4g}"]
    return ", ".join([f"{row['ending']}{error}", *(f"{name} {score}" for name, score in scores.items()), *reward])
