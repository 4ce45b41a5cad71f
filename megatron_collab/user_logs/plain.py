"""One spelling of a text, in which personal data is looked for, with a map back to the original."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

# Scripts without spaces between words, and Hangul, whose particles are joined to a word.
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
_UNSPACED = re.compile(f"[{UNSPACED}]")
_QUOTES = dict.fromkeys("\u2018\u2019\u02bc\u02b9", "'") | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
_JAMO = range(0x1161, 0x1200)  # vowels and final consonants of a decomposed syllable


class PlainText:
    """`text`: composed (NFKC), with simple spaces, hyphens, quotes and ASCII digits, without invisible characters.

    A space is inserted between a script without spaces and another one, so that words have ends everywhere.
    """

    def __init__(self, original: str) -> None:
        characters, places = list[str](), list[tuple[int, int]]()
        for begin, end in _clusters(original):
            for character in map(_plain, unicodedata.normalize("NFKC", original[begin:end])):
                if characters and _meet(characters[-1], character):
                    characters.append(" ")
                    places.append((begin, begin))
                characters += character
                places += [(begin, end)] * len(character)
        self.text = "".join(characters)
        self._places = places

    def place(self, begin: int, end: int) -> tuple[int, int]:
        """Where text[begin:end], which is not empty, is in the original."""
        return self._places[begin][0], self._places[end - 1][1]


def plain(text: str) -> str:
    return PlainText(text).text


def _clusters(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each character together with the marks that compose with it."""
    begin = 0
    for at in range(1, len(text) + 1):
        if at == len(text) or not (unicodedata.category(text[at])[0] == "M" or ord(text[at]) in _JAMO):
            yield begin, at
            begin = at


def _plain(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Nd":
        return str(unicodedata.decimal(character))
    if kind == "Pd" or character == "\u2212":
        return "-"
    if kind in ("Cf", "Zs"):
        return " " if kind == "Zs" else ""
    return _QUOTES.get(character, character)


def _meet(before: str, after: str) -> bool:
    """Whether two scripts meet, one of which has no spaces between words."""
    unspaced = [_UNSPACED.match(character) is not None for character in (before[-1:], after[:1])]
    return before[-1:].isalnum() and (after[:1].isalnum() or after[:1] in (":", "+")) and unspaced[0] != unspaced[1]
