"""Personal data in every form that docs/howto/users-from-logs.md promises; tools/bench/personal.py reads it too.

Each value of forms.txt stands in a sentence of three scripts (Latin, Cyrillic, Han without spaces), and each text is
written in further ways: decomposed, with spaces that do not break, with wide digits, in capital and in small letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_CASED = ("KEY", "WALLET")  # in other letters they are others
NO_WORD = re.compile(r"[\W_]+")


class Form(NamedTuple):
    kind: str
    text: str
    value: str
    in_cases: bool


def _listed() -> Iterator[Form]:
    """The forms of forms.txt: a section for each kind, with sentences ("in …") for its values, or with whole texts.

    Those that begin with = are not written in capitals and in small letters.
    """
    for section in Path(__file__).with_name("forms.txt").read_text().split("#### ")[1:]:
        kind, *lines = filter(None, section.split("\n"))
        sentences = [line.removeprefix("in ") for line in lines if line.startswith("in ")]
        for line in lines[len(sentences) :]:
            if sentences:
                yield from (Form(kind, sentence.format(line), line, kind not in _CASED) for sentence in sentences)
            else:
                before, value, after = re.split(r"[{}]", line.removeprefix("= ").replace("\\n", "\n"))
                yield Form(kind, before + value + after, value, not line.startswith("= "))


FORMS = tuple(_listed())
KINDS = tuple(dict.fromkeys(form.kind for form in FORMS))
WRITINGS: dict[str, Callable[[str], str]] = {
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "spaces that do not break": lambda text: text.replace(" ", "\u00a0"),
    "narrow spaces, hyphens": lambda text: text.replace(" ", "\u202f").replace("-", "\u2011"),
    "invisible characters": lambda text: re.sub(r"(?<=\w\w)(?=\w)", "\u200b", text),
    "wide digits": lambda text: text.translate({ord("0") + digit: 0xFF10 + digit for digit in range(10)}),
    "small letters": str.lower,
    "capital letters": str.upper,
}


def written(form: Form) -> Iterator[tuple[str, str, str]]:
    """The ways to write a form: the name of the way, the text and its value."""
    for name, write in WRITINGS.items():
        if "letters" not in name or form.in_cases:
            yield name, write(form.text), write(form.value)


def is_left(value: str, clean: str) -> bool:
    """Whether a part of a value, of two letters or digits or more, is still in a text."""
    folded = NO_WORD.sub(" ", unicodedata.normalize("NFKC", clean.replace("\u200b", "")).casefold())
    words = NO_WORD.sub(" ", unicodedata.normalize("NFKC", value.replace("\u200b", "")).casefold()).split()
    small = {"de", "la", "van", "von", "bin", "фон", "at", "dot"}
    return any(len(word) > 1 and word not in small and word in folded.split() for word in words) or (
        NO_WORD.sub("", value.casefold()) in folded.replace(" ", "")
    )
