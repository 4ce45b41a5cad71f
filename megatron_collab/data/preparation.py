"""Published data as rows to train on: tasks, conversations, pairs, and their split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_collab.data.candidates import extremes, pair_of
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import conversation_row, pair_row, render_sample, task_row
from megatron_collab.data.examples import Examples, load_conversations, load_pairs, load_tasks
from megatron_collab.data.formats import FORMATS
from megatron_collab.data.length import certainly_longer
from megatron_collab.data.messages import Messages, ToolConversation, Unfit
from megatron_collab.data.pairs import Pair, conversations
from megatron_collab.data.prefixes import Prompts, prefixes
from megatron_collab.data.rows import ALL
from megatron_collab.data.sources import Source
from megatron_collab.data.survey import best_of_conversations, candidates_of
from megatron_collab.types import Message, Task


@dataclass(frozen=True)
class PreparedRow:
    """A row to write. Rows of equal `group`, a digest of the user's first message, belong to one conversation and stay
    on one side of a split. A task without messages is grouped by its goal.
    """

    group: str
    row: dict[str, Any]


class Preparation:
    """The rows of one kind, `to`.

    rl: every prefix of a conversation that ends with the user, each prompt once. opened: the goals only, each once; the
    user opens the conversation. sft: of scored candidates the best of a conversation's last turn. dpo: the best against
    the worst candidate of a turn.

    After an iteration, `dropped` counts the rows left out, by reason, and `unread` what of messages was not read. All
    iterations give the same rows.
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
        """`system`: system message to put in front. `gap`: for dpo, smallest difference of scores. With a `renderer`,
        rows of more than `longest` tokens are left out: prompts for rl, conversations for sft and dpo.

        Raises ConfigError, and ValueError if the data cannot be read.
        """
        load: Any = {"rl": load_tasks, "opened": load_tasks, "sft": load_conversations, "dpo": load_pairs}[to]
        # Published data is split by row: the turns of a conversation may lie in different splits.
        self.examples: Examples[Any] = load(replace(source, split=source.split or ALL), "SOURCE")
        self.dropped, self.unread = Counter[str](), Counter[str]()
        self._to, self._system, self._gap = to, system, gap
        self._renderer, self._longest = renderer, longest
        self._format = FORMATS[self.examples.format]

    def __iter__(self) -> Iterator[PreparedRow]:
        self.dropped, self.unread = Counter(), Counter()
        rows = {"rl": self._tasks, "opened": self._unopened_rows, "sft": self._conversations, "dpo": self._pairs}
        return rows[self._to]()

    def _tasks(self) -> Iterator[PreparedRow]:
        prompts = Prompts()
        for number, row in self.examples.numbered():
            task: Task | None = self._read(row, number)
            for prefix in prefixes(task) if task else ():
                prompt = replace(prefix, messages=self._with_system(prefix.messages))
                if not prompts.new(prompt):
                    self.dropped["prefixes of conversations that another row has too"] += 1
                elif prompt.unopened or self._fits(prompt.messages):
                    yield PreparedRow(_group(prompt.messages, prompt), task_row(prompt))

    def _unopened_rows(self) -> Iterator[PreparedRow]:
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
            yield PreparedRow(_group(task.messages, task), task_row(replace(task, messages=self._with_system(system))))

    def _conversations(self) -> Iterator[PreparedRow]:
        chosen = best_of_conversations(candidates_of(self.examples, self._format)) if self._format.candidate else None
        for number, row in self.examples.numbered():
            messages: Messages | None = self._read(row, number)
            if messages and chosen is not None and number not in chosen:
                self.dropped["candidates that are not the best of the last turn"] += 1
            elif messages:
                conversation = self._with_system(messages)
                if self._fits(conversation):
                    yield PreparedRow(_group(conversation), conversation_row(conversation))

    def _pairs(self) -> Iterator[PreparedRow]:
        for pair in self._candidate_pairs() if self._format.pair is None else self._published_pairs():
            if pair.scores and pair.scores[0] - pair.scores[1] < self._gap:
                self.dropped[f"pairs whose scores differ by less than {self._gap:g}"] += 1
                continue
            full_pair = pair._replace(prompt=self._with_system(pair.prompt))
            if self._fits(*conversations(full_pair)):
                yield PreparedRow(_group(full_pair.prompt), pair_row(full_pair))

    def _published_pairs(self) -> Iterator[Pair]:
        for number, row in self.examples.numbered():
            if pair := self._read(row, number):
                yield pair

    def _candidate_pairs(self) -> Iterator[Pair]:
        for extreme in extremes(self.examples):
            if extreme.best == extreme.worst:
                self.dropped["turns with one candidate"] += 1
                continue
            best, worst = (self._read(self.examples.rows[at], at) for at in extreme[:2])
            if best and worst:
                yield pair_of(best, worst, extreme.scores)

    def _read(self, row: Any, number: int) -> Any:
        try:
            example = self.examples.read(row, number)
            self.unread.update(self.examples.unread(row))
            return example
        except Unfit as reason:
            self.dropped[f"rows {reason}"] += 1
            return None

    def _with_system(self, messages: Messages) -> Messages:
        """`messages` with the system message in front, in place of any other one."""
        if not self._system:
            return messages
        without_system = tuple(message for message in messages if message.role != "system")
        with_system = (Message("system", self._system), *without_system)
        return ToolConversation(with_system, messages.tools) if isinstance(messages, ToolConversation) else with_system

    def _fits(self, *conversations: Messages) -> bool:
        """Whether no conversation has too many tokens. One that ends with the user is measured as a prompt."""
        renderer, fits = self._renderer, True
        for messages in conversations if renderer else ():
            assert renderer
            if certainly_longer(renderer, messages, self._longest):
                fits = False
                break
            prompt = messages[-1].role == "user"
            tokens = renderer.first(messages) if prompt else render_sample(renderer, messages).token_ids
            fits = fits and len(tokens) <= self._longest
        unit = "prefixes of conversations" if self._to == "rl" else "rows"
        self.dropped[f"{unit} of more than {self._longest} tokens"] += not fits
        return fits


def groups_of_eval(groups: Iterable[str], share: float, seed: int) -> set[str]:
    """About `share` of the groups: none for 0, otherwise at least one and not all, if there are two or more.

    Each group is drawn from the seed independently. So it is on the same side in rows for sft, rl and dpo, although
    these leave out different groups.
    """
    drawn = {group: _fraction(f"{seed}/{group}") for group in groups}
    order = sorted(drawn, key=drawn.__getitem__)
    count = sum(fraction < share for fraction in drawn.values())
    count = min(max(count, 1), len(order) - 1) if share else 0
    return set(order[:count])


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _group(messages: Messages, task: Task | None = None) -> str:
    texts = (message.content for message in messages if message.role == "user")
    first = next(texts, task.goal if task else "")
    return hashlib.blake2b(first.encode(), digest_size=16).hexdigest()
