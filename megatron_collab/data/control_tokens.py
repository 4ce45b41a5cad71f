"""Control tokens in the text of messages, which stay text: only the chat template writes control tokens.

Before a message is rendered, each control token in it is cut after its first character; the pieces between cuts are
tokenized apart. Text without control tokens is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

_CUT, _LITERAL = "\ufdd0", "\ufdd1"  # noncharacters of Unicode; a _CUT of the text is followed by _LITERAL


def any_of(tokens: Iterable[str], completed: bool = False) -> re.Pattern[str]:
    """A pattern for each of these; of one that begins with another, the longer one.

    `completed`: also for one that lacks its first or last character at an end of the text, as `<|im_end|`, since
    templates write names within `<` and `>`. A mere word is none, as `think` of `<think>`.
    """
    ordered = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)

    def either(texts: Iterable[str]) -> str:
        return f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'})"

    def part(first: int, last: int | None) -> str:
        return either(text for token in ordered if re.search(r"\w\W|\W\w", text := token[first:last]))

    incomplete = rf"|\A{part(1, None)}|{part(0, -1)}\Z|\A{part(1, -1)}\Z" if completed else ""
    return re.compile(either(ordered) + incomplete)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value`, a text or what JSON can hold, with `change` applied to every text in it."""
    if isinstance(value, Mapping):
        return {each_text(name, change): each_text(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [each_text(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def count(value: Any, tokens: re.Pattern[str]) -> int:
    """Number of matches in `value`, a text or what JSON can hold."""
    matches = list[str]()

    def note(text: str) -> str:
        matches.extend(tokens.findall(text))
        return text

    each_text(value, note)
    return len(matches)


def cut(value: Any, tokens: re.Pattern[str]) -> Any:
    """`value`, a text or what JSON can hold, in which every text that matches is cut after its first character."""

    def cut_text(text: str) -> str:
        text, places = text.replace(_CUT, _CUT + _LITERAL), [0]
        while match := tokens.search(text, places[-1]):  # matches may overlap
            places.append(match.start() + 1)
        return _CUT.join(text[start:stop] for start, stop in pairwise([*places, len(text)]))

    return each_text(value, cut_text)


def split(text: str) -> list[str]:
    """The parts of a rendered text between cuts."""
    return [part.replace(_CUT + _LITERAL, _CUT) for part in re.split(f"{_CUT}(?!{_LITERAL})", text)]
