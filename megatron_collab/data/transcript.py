"""Conversations as simulated users and judges see them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

from megatron_collab.data.control_tokens import each_text
from megatron_collab.types import Message, visible

# In text as `_plain` returns it; a backslash is put at the empty group.
_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_ROLE = rf"(?<![^{_BREAKS}])[^\S{_BREAKS}]*()\\*\*\*(?:user|assistant|tool)\*\*\s*:"
_TAGS = "conversation|problem|correct_answer|criteria|s|bos|eos|(?:start|end)_of_turn"
_TOKEN = rf"<()\\*(?:\||/?\s*(?:{_TAGS})\s*>)|\[()\\*/?inst\]"
_BLANK = "\u115f\u1160\u2800"  # letters and signs that show nothing


def render(messages: Sequence[Message], *, tools: bool = False) -> str:
    """`**Role**: content` for each of the `visible_messages`.

    Contents are `quoted`, so that no message can speak for the other side.
    """
    return "\n".join(
        f"**{message.role.capitalize()}**: {quoted(message.content)}"
        for message in visible_messages(messages, tools=tools)
    )


def quoted(value: Any) -> Any:
    """`value`, a text or what JSON can hold, for a prompt that a judge or a simulated user reads.

    A role's mark at the start of a line, a tag of the built-in prompts, and a control token of common chat templates
    get a backslash. Characters that show nothing, look alike or break lines otherwise hide none of these.
    """
    return each_text(value, partial(escaped, pattern=f"{_ROLE}|{_TOKEN}"))


def escaped(text: str, pattern: str = _TOKEN) -> str:
    """`text` with a backslash in everything that matches, by default in control tokens of common chat templates."""
    plain, places = _plain(text)
    marks = [places[match.start(match.lastindex or 0)] for match in re.finditer(pattern, plain)]
    return "\\".join(text[start:stop] for start, stop in pairwise([0, *marks, len(text)]))


def _plain(text: str) -> tuple[str, Sequence[int]]:
    """`text` in small letters without accents, variants and characters that show nothing; the place of each letter."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text.lower(), range(len(text))
    letters = [
        (letter, at)
        for at, character in enumerate(text)
        for letter in unicodedata.normalize("NFKD", character).casefold()
        if letter.isspace() or not (unicodedata.category(letter)[0] in "CM" or letter in _BLANK)
    ]
    return "".join(letter for letter, _ in letters), [at for _, at in letters]


def visible_messages(messages: Sequence[Message], *, tools: bool = False) -> list[Message]:
    """Messages without system messages and thoughts; tool messages, and the calls before them, only with `tools`."""
    messages_to_show = []
    for message, after in zip_longest(messages, messages[1:]):
        about_tools = message.role == "tool" or (message.role == "assistant" and after and after.role == "tool")
        if message.role != "system" and (tools or not about_tools):
            text = visible(message.content) if message.role == "assistant" else message.content
            messages_to_show.append(replace(message, content=text))
    return messages_to_show
