"""From data as it is published to rows that are trained on: tasks, conversations, pairs, and their split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_collab.config import DataConfig
from megatron_collab.data.candidates import extremes, pair_of
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import conversation_row, pair_row, rendered, task_row
from megatron_collab.data.examples import Examples, load_conversations, load_pairs, load_tasks
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.pairs import Pair, conversations
from megatron_collab.data.prefixes import Prompts, prefixes
from megatron_collab.data.readers import Messages, Unfit
from megatron_collab.data.rows import ALL
from megatron_collab.data.sources import Source
from megatron_collab.data.survey import best_of_conversations, candidates_of
from megatron_collab.data.tool_messages import ToolConversation
from megatron_collab.types import Message, Task


@dataclass(frozen=True)
class Prepared:
    """A row that is written. Rows of equal `group`, the user's first message, are of one conversation: they stay on one
    side of a split. A task without a message has its goal in place of that."""

    group: str
    row: dict[str, Any]


class Preparation:
    """Rows for rl (every prefix of a conversation that ends with the user, each prompt once), sft (of scored candidates
    the best of the last turn of a conversation) or dpo (the best against the worst candidate of a turn); or opened: the
    goals alone, each once, about which the user opens the conversation.

    `dropped` counts, after an iteration, what is left out and why. Iterations give the same rows.
    """

    def __init__(
        self,
        source: Source,
        to: str,
        system: str = "",
        gap: float = 0.0,
        renderer: ChatRenderer | None = None,
        longest: int = 0,
    ) -> None:
        """`system`: a system message for the front. dpo: scores differ by `gap` or more. With a `renderer` nothing is
        longer than `longest` tokens: prompts for rl, conversations for sft and dpo.

        Raises ConfigError, and ValueError for what cannot be read.
        """
        load: Any = {"rl": load_tasks, "opened": load_tasks, "sft": load_conversations, "dpo": load_pairs}[to]
        # Published splits are by row: the last turn of a conversation may be in another one than its first.
        self.examples: Examples[Any] = load(replace(source, split=source.split or ALL), "SOURCE", DataConfig())
        self.dropped: Counter[str] = Counter()
        self._to, self._system, self._gap = to, system, gap
        self._renderer, self._longest = renderer, longest
        self._format = FORMATS[self.examples.format]

    def __iter__(self) -> Iterator[Prepared]:
        self.dropped = Counter()
        rows = {"rl": self._tasks, "opened": self._unopened, "sft": self._conversations, "dpo": self._pairs}
        return rows[self._to]()

    def _tasks(self) -> Iterator[Prepared]:
        prompts = Prompts()
        for number, row in self.examples.numbered():
            task: Task | None = self._read(row, number)
            for given in prefixes(task) if task else ():
                prompt = replace(given, messages=self._opened(given.messages))
                if not prompts.new(prompt):
                    self.dropped["prefixes of conversations that another row has too"] += 1
                elif prompt.unopened or self._fits(prompt.messages):
                    yield Prepared(_group(prompt.messages, prompt), task_row(prompt))

    def _unopened(self) -> Iterator[Prepared]:
        goals = set[tuple[str, str]]()
        for number, row in self.examples.numbered():
            task: Task | None = self._read(row, number)
            if task is None:
                continue
            if (task.goal, task.answer) in goals:
                self.dropped["goals that another row has too"] += 1
                continue
            goals.add((task.goal, task.answer))
            system = tuple(message for message in task.messages if message.role == "system")
            yield Prepared(_group(task.messages, task), task_row(replace(task, messages=self._opened(system))))

    def _conversations(self) -> Iterator[Prepared]:
        chosen = best_of_conversations(candidates_of(self.examples, self._format)) if self._format.candidate else None
        for number, row in self.examples.numbered():
            messages: Messages | None = self._read(row, number)
            if messages and chosen is not None and number not in chosen:
                self.dropped["candidates that are not the best of the last turn"] += 1
            elif messages:
                opened = self._opened(messages)
                if self._fits(opened):
                    yield Prepared(_group(opened), conversation_row(opened))

    def _pairs(self) -> Iterator[Prepared]:
        for pair in self._of_candidates() if self._format.pair is None else self._as_published():
            if pair.scores and pair.scores[0] - pair.scores[1] < self._gap:
                self.dropped[f"pairs whose scores differ by less than {self._gap:g}"] += 1
                continue
            opened = pair._replace(prompt=self._opened(pair.prompt))
            if self._fits(*conversations(opened)):
                yield Prepared(_group(opened.prompt), pair_row(opened))

    def _as_published(self) -> Iterator[Pair]:
        for number, row in self.examples.numbered():
            if pair := self._read(row, number):
                yield pair

    def _of_candidates(self) -> Iterator[Pair]:
        for one in extremes(self.examples):
            if one.best == one.worst:
                self.dropped["turns with one candidate"] += 1
                continue
            best, worst = (self._read(self.examples.rows[at], at) for at in one[:2])
            if best and worst:
                yield pair_of(best, worst, one.scores)

    def _read(self, row: Any, number: int) -> Any:
        try:
            return self.examples.read(row, number)
        except Unfit as reason:
            self.dropped[f"rows {reason}"] += 1
            return None

    def _opened(self, messages: Messages) -> Messages:
        """With the system message in front, in place of another one."""
        if not self._system:
            return messages
        own = tuple(message for message in messages if message.role != "system")
        opened = (Message("system", self._system), *own)
        return ToolConversation(opened, messages.tools) if isinstance(messages, ToolConversation) else opened

    def _fits(self, *conversations: Messages) -> bool:
        """Whether none has too many tokens; one that ends with the user is a prompt."""
        renderer, fits = self._renderer, True
        for messages in conversations if renderer else ():
            assert renderer
            prompt = messages[-1].role == "user"
            tokens = renderer.first(messages) if prompt else rendered(renderer, messages).token_ids
            fits = fits and len(tokens) <= self._longest
        counted = "prefixes of conversations" if self._to == "rl" else "rows"
        self.dropped[f"{counted} of more than {self._longest} tokens"] += not fits
        return fits


def groups_of_eval(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """About a share of the groups: none for 0, at least one and never all where there are two.

    A group is drawn from the seed by itself, so that it is on the same side in rows for sft, rl and dpo, which do not
    drop the same ones.
    """
    drawn = {group: _fraction(f"{seed}/{group}") for group in groups}
    order = sorted(drawn, key=drawn.__getitem__)
    count = sum(fraction < share for fraction in drawn.values())
    count = min(max(count, 1), len(order) - 1) if share else 0
    return set(order[:count])


def _fraction(text: str) -> float:
    """A number from 0 to below 1 that follows from the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _group(messages: Messages, task: Task | None = None) -> str:
    said = (message.content for message in messages if message.role == "user")
    first = next(said, task.goal if task else "")
    return hashlib.blake2b(first.encode(), digest_size=16).hexdigest()
