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
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.commands import ArgumentParser
from megatron_collab.runtime.console import show
from megatron_collab.runtime.process import EXIT_STOPPED, RunStopped
from megatron_collab.settings import WRITTEN_FILE, ConfigError, check_path, require

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
        self._printed: list[_Printed] = []

    async def begin(self) -> None:
        """Start the chats again."""
        self._printed = [_Printed(model.name) for model in self._talk.models]
        await self._act("begin", self._task)

    async def obey(self, line: str) -> None:
        """Carry out a line, and print the result, or why it is impossible."""
        command, _, argument = line.partition(" ")
        if not line.startswith("/"):
            await self._act("say", line)
        elif command == "/futures" and argument.isdecimal() and len(argument) <= _MOST_DIGITS:
            await self._act("futures", int(argument))
        elif command in ("/user", "/undo"):
            await self._act(command[1:])
        elif command == "/reset":
            await self.begin()
        elif command == "/save" and argument:
            self._save(Path(argument))
        else:
            show(_HELP)

    async def _act(self, action: str, *values: Any) -> None:
        """Do it in all chats that can; one may have ended before the other. Print futures and faults at the end."""
        for printed in self._printed:
            printed.typed = len(printed.texts) if action == "say" else None
        await self._talk.act(action, self._show, *values)
        for model, chat in zip(self._talk.models, self._talk.chats, strict=True):
            for future in chat.futures:
                assert chat.row
                show(f"--- {model.name}, future {future['future'] + 1} of {len(chat.futures)}: {_outcome(future)}")
                for text in _texts(model.name, future)[len(chat.row["messages"]) :]:
                    show(text)
        for fault in dict.fromkeys(chat.fault for chat in self._talk.chats if chat.fault):
            show(fault)

    def _save(self, file: Path) -> None:
        try:
            check_path("/save", file, WRITTEN_FILE)
            pairs = zip(self._talk.models, self._talk.chats, strict=True)
            rows = ({"model": model.name, **(chat.row or {})} for model, chat in pairs)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            show(f"{file}: written")
        except (ConfigError, OSError) as error:
            show(str(error))

    def _show(self) -> None:
        """Print what is new. What the second model writes follows once the first has finished."""
        for printed, chat in zip(self._printed, self._talk.chats, strict=True):
            printed.show(chat)
            if chat.busy:
                return


class _Printed:
    """What is printed of a chat with the model of this `name`: the `texts` of its messages, and its `ending`.

    `typed`: index of the message that a person has typed, which the terminal already shows.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.texts: list[str] = []
        self.ending: str | None = None
        self.typed: int | None = None
        self._is_open = False  # the last line, which goes on

    def show(self, chat: Chat) -> None:
        """Print what is new; the last message may grow while the chat is busy."""
        if chat.row is None:
            return
        before, self.texts = self.texts, _texts(self.name, chat.row)
        pairs = zip(before, self.texts, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same == len(self.texts) < len(before):
            self._end_line()
            show(f"--- {self.name}: back to message {same}")
        for number, text in enumerate(self.texts[same:], same):
            begun = before[number] if number < len(before) and self._is_open else ""
            if number == self.typed:
                continue
            if not begun or not text.startswith(begun):
                self._end_line()
                begun = ""
            show(text[len(begun) :], end="")
            self._is_open = True
        if not chat.busy:
            self._end_line()
        ending, self.ending = self.ending, chat.row["ending"]
        if self.ending not in (None, ending):
            show(f"--- {self.name}: {_outcome(chat.row)}")

    def _end_line(self) -> None:
        if self._is_open:
            show("")
        self._is_open = False


def _texts(name: str, row: Row) -> list[str]:
    """The messages of a conversation with the model of this name as they are printed, its own with its thoughts."""
    messages = row["messages"]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    turns = row.get("turns", [])
    raw = dict(zip(replies[len(replies) - len(turns) :], turns, strict=True))
    texts = []
    for at, message in enumerate(messages):
        text = raw.get(at, message["content"]).strip().replace("\n", "\n    ")  # else it could imitate another
        texts.append(f"{name if at in replies else message['role']}: {text}")
    return texts


def _outcome(row: Row) -> str:
    """Ending, scores and reward of a conversation."""
    scores = {name: "missing" if isinstance(score, dict) else f"{score:.4g}" for name, score in row["scores"].items()}
    error = f" ({row['error']})" if row["error"] else ""
    reward = [] if row["reward"] is None else [f"reward over all {row['reward']:.4g}"]
    return ", ".join([f"{row['ending']}{error}", *(f"{name} {score}" for name, score in scores.items()), *reward])
