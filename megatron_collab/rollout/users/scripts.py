"""Users without a model: scripted by an environment, replayed from the task, or revealing facts on request."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_collab import environments
from megatron_collab.data import answers
from megatron_collab.data.transcript import visible_messages
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.settings import UserConfig
from megatron_collab.settings.documents import parse_json
from megatron_collab.types import Conversation, Task

ASK_ME = "Please ask me what you need to know, or tell me the answer."
NO_MORE, TOLD_ALREADY = "That is all I know.", "I have told you all that I know about that."

_ANSWERED = re.compile(rf"{answers.MARK}|\banswer is\b", re.IGNORECASE)
_QUESTION = re.compile(
    r"[^.!?\n]*\?|[^.!?\n]*\b(?:tell me|let me know|give me|share|provide|clarify|specify)\b[^.!?\n]*", re.IGNORECASE
)
_WORD = re.compile(r"[^\W_]+")
_COMMON = frozenset(
    _WORD.findall(
        "a about all also am an and any are as at be been before but by can could did do does each every for from "
        "had has have he her hers him his how i if in is it its know let many me more much my need no not of on "
        "one or our out per please she should so some tell than that the their them then there these they this "
        "those to total up was we were what when where which while who whose why will with would you your"
    )
)


class ScriptedUser(User):
    """`scripted/WORLD` answers with the environment's script, given the task's goal and the conversation.

    The script sees what an llm user sees: no tool calls, no thoughts; an empty list if the user opens the conversation.
    Guardrails do not apply.
    """

    opens = True

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self.script = environments.find_script(argument)

    @classmethod
    def unavailable(cls, argument: str, settings: UserConfig) -> str | None:
        environments.find_script(argument)
        return None

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        if check := environments.find_goal_check(argument):
            check(task.goal)

    async def open(self) -> str:
        return self.script(self.task.goal, [])

    async def reply(self, conversation: Conversation) -> UserReply:
        self.users.counters["user_replies"] += 1
        return self.says(self.script(self.task.goal, visible_messages(conversation.messages)))


class ReplayUser(User):
    """A recorded user: sends the messages of metadata["replay"] in order, then ends the conversation."""

    opens = True

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        recorded_of(task)

    async def start(self, conversation: Conversation) -> None:
        self._recorded()

    async def open(self) -> str:
        return self._recorded()[0]

    async def reply(self, conversation: Conversation) -> UserReply:
        task_messages = len(self.task.original.messages)
        sent = sum(message.role == "user" for message in conversation.messages[task_messages:])
        remaining = self._recorded()[sent:]
        return self.says(remaining[0] if remaining else self.users.settings.stop)

    def _recorded(self) -> Sequence[str]:
        try:
            return recorded_of(self.task)
        except ValueError as error:
            raise UserError(f"user replay: task {self.task.id}: {error}") from error


class RevealUser(User):
    """A user who knows facts and reveals the requested ones; the goal is a JSON object {question, facts}.

    A fact is requested if it shares words with the assistant's questions. A word that occurs in n facts counts 1/n, so
    that names count more than the common subject; facts with more than half of the best count are revealed. If a
    question shares no word with any fact, it requests all: word overlap cannot distinguish "what else?" from a
    paraphrase. The user opens a conversation with the goal's question.
    """

    opens = True

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self.facts: list[str] = []  # read by `start`, whose errors are the user's
        self.revealed: set[int] = set()

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        facts_of(task)

    async def start(self, conversation: Conversation) -> None:
        """Read the facts, and which are already revealed. Raises UserError if the goal has another form."""
        try:
            self.facts = facts_of(self.task)
        except ValueError as error:
            raise UserError(f"user reveal: task {self.task.id}: {error}") from error
        texts = [message.content for message in conversation.messages if message.role == "user"]
        self.revealed = {i for i, fact in enumerate(self.facts) if any(fact in text for text in texts)}

    async def open(self) -> str:
        question = json.loads(self.task.goal).get("question")
        if not isinstance(question, str):
            raise UserError(f"user reveal: the goal of task {self.task.id} has no question for the first message")
        return question

    async def reply(self, conversation: Conversation) -> UserReply:
        text = conversation.messages[-1].content
        if _ANSWERED.search(text):
            return self.says(f"Thank you. {self.users.settings.stop}")
        questions = _QUESTION.findall(text)
        if not questions:
            return self.says(ASK_ME)
        new = [i for i in requested_facts(" ".join(questions), self.facts) if i not in self.revealed]
        self.revealed.update(new)
        if new:
            return self.says(" ".join(self.facts[i] for i in new))
        return self.says(NO_MORE if len(self.revealed) == len(self.facts) else TOLD_ALREADY)


def recorded_of(task: Task) -> Sequence[str]:
    """The messages of the user `replay`. Raises ValueError if the task has none."""
    recorded: Any = task.metadata.get("replay")
    listed = isinstance(recorded, Sequence) and not isinstance(recorded, str)
    if not listed or not all(isinstance(text, str) and text.strip() for text in recorded):
        raise ValueError("metadata.replay must be a list of strings; correct it, or choose another user")
    return recorded


def facts_of(task: Task) -> list[str]:
    """The facts of the user `reveal`. Raises ValueError if the goal has another form."""
    try:
        facts = parse_json(task.goal)["facts"]
    except (ValueError, KeyError, TypeError):
        facts = None
    if not isinstance(facts, list) or not all(isinstance(fact, str) for fact in facts):
        raise ValueError("the goal must be a JSON object {question, facts} with a list of strings as facts")
    return facts


def requested_facts(question: str, facts: Sequence[str]) -> list[int]:
    """The indexes of the facts that `question` requests, in order; see RevealUser."""
    words = [_words(fact) for fact in facts]
    holding = Counter(word for fact in words for word in fact)
    counts = [sum(1 / holding[word] for word in fact & _words(question)) for fact in words]
    best = max(counts, default=0.0)
    return [i for i, count in enumerate(counts) if best == 0.0 or count > best / 2]


def _words(text: str) -> set[str]:
    """The content words of `text`, without a plural s."""
    words = (word.casefold() for word in _WORD.findall(text))
    return {word.removesuffix("s") for word in words if word not in _COMMON}
