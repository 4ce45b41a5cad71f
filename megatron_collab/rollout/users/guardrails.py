"""Guardrails of simulated users: reject empty messages, role flips, and leaks of the goal or of the answer.

Texts are compared word by word, without case and punctuation.

- empty: only white space.
- role flip: the message begins as the assistant's (`**Assistant**:`, `AI:`), speaks as one ("as an AI, I", "how can I
  help you"), or is the assistant's last message again (of five words or more).
- leak: the message copies, in runs of twelve words or more that are new in the conversation, more than half of what
  the goal contains beyond the task's messages, or any such run of the instructions; or it states the task's answer
  although neither the goal nor the conversation contains it. Answers of up to three characters without a digit (A, yes)
  occur by chance and do not count. A user may quote single facts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_collab.types import Message, Task

RUN = 12  # length of word runs that do not recur by chance
_REPEATED = 5  # words
_SHORT = 3  # characters

_WORD = re.compile(r"[^\W_]+(?:[.,]\d+)*")
_FLIPPED = re.compile(
    r"\A[\W_]*(?:assistant|ai)\W*:"
    r"|\bas an ai(?: \w+){0,2},? i\b|\bi(?: am|['\u2019]m)(?: just| only)? an ai\b"
    r"|\bhow (?:can|may) i (?:help|assist) you\b",
    re.IGNORECASE,
)


EMPTY, FLIPPED, LEAKED = "user_empty", "user_role_flip", "user_leak"  # counters of rejected messages
COMPLAINTS = {  # sent to the user's model
    EMPTY: "Your response is empty. Write the user's next message.",
    FLIPPED: "Your response is what the assistant would say. You are the user: write the user's next message.",
    LEAKED: "Your response gives away what the user keeps back: the instructions, the whole goal at once, or a "
    "solution. Say in your own words only what the assistant needs to know next, and leave the solution to the "
    "assistant.",
}


def refusal(text: str, task: Task, instructions: str, conversation: Sequence[Message]) -> str | None:
    """Why `text` is rejected as the user's message, or None; `instructions`: the model's prompt without the goal."""
    if not text.strip():
        return EMPTY
    words = _words(text)
    last = next((message.content for message in reversed(conversation) if message.role == "assistant"), "")
    if _FLIPPED.search(text) or (len(words) >= _REPEATED and words == _words(last)):
        return FLIPPED
    if _leaks(words, task, instructions, conversation) or _solves(words, task, conversation):
        return LEAKED
    return None


def _leaks(words: list[str], task: Task, instructions: str, conversation: Sequence[Message]) -> bool:
    new_runs = _runs(words) - _message_runs(conversation)
    if new_runs & _runs(_words(instructions)):
        return True
    goal = _words(task.goal)
    hidden = set(range(len(goal))) - _copied(goal, _message_runs(task.messages))
    return bool(hidden) and 2 * len(hidden & _copied(goal, new_runs)) > len(hidden)


def _solves(words: list[str], task: Task, conversation: Sequence[Message]) -> bool:
    answer = _words(task.answer)
    if not answer or (len(task.answer.strip()) <= _SHORT and not any(map(str.isdigit, task.answer))):
        return False
    known = [task.goal, *(message.content for message in conversation)]
    return _contains(words, answer) and not any(_contains(_words(text), answer) for text in known)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def _message_runs(messages: Sequence[Message]) -> set[tuple[str, ...]]:
    return {run for message in messages for run in _runs(_words(message.content))}


def _copied(words: list[str], runs: set[tuple[str, ...]]) -> set[int]:
    """The positions in `words` that belong to one of `runs`."""
    starts = (i for i in range(len(words) - RUN + 1) if tuple(words[i : i + RUN]) in runs)
    return {i + offset for i in starts for offset in range(RUN)}


def _contains(words: list[str], part: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))
