"""Replaces personal data in the texts of a conversation by placeholders such as <EMAIL_1>, the same in all its texts.

Presidio's recognizers find data with a fixed form, with checksums if there are any; they need no model. Names have no
fixed form. They are found if a text introduces them ("my name is …"), by a spaCy model if one is installed, or by the
model that describes the conversation, which lists the names it has read (`Placeholders.add`). Presidio's analyzer is
not used: it loads a language model, and looks up the domains of e-mail addresses in the network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_collab.config import ConfigError
from megatron_collab.runtime.redact import redact

PERSON = "PERSON"
KINDS = {  # data with a fixed form, by Presidio's name
    "EMAIL_ADDRESS": "EMAIL",
    "PHONE_NUMBER": "PHONE",
    "CREDIT_CARD": "CARD",
    "IBAN_CODE": "IBAN",
    "US_SSN": "SSN",
    "IP_ADDRESS": "IP",
    "MAC_ADDRESS": "MAC",
    "CRYPTO": "WALLET",
    "URL": "URL",
}
_LEAST = 0.4  # Presidio's score of a phone number; patterns with a lower score need context words
_PLACEHOLDER = r"<[A-Z]+_\d+>"
_SPELLED_AS_IS = ("EMAIL", "URL", PERSON)  # the spelling of other kinds ignores spaces, dots and brackets
_SEPARATORS = re.compile(r"[\s().\-/]+")
_TITLES = r"(?:Mr|Mrs|Ms|Miss|Dr|Prof)\b\.?"
_NAME = r"[^\W\d_a-z][\w'\u2019-]+"  # begins with a capital, or a letter of a script without any
# Presidio's own pattern stops after an internal host name and leaves the rest. A bare main.py is a file.
_ADDRESS = (
    r"(?:\b[a-z][a-z0-9+.\-]{1,20}://|\bwww\.)[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
    r"|(?<![\w.@/])(?:[\w\-]{1,63}\.){1,8}[a-z]{2,}(?:/[^\s<>\"'`?]*)?\?[^\s<>\"'`=]+=[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
)
_INTRODUCED = re.compile(
    rf"(?:(?i:\b(?:my|full|first|last) name(?: is|'s|\u2019s|:)|\bname:|\b(?:regards|sincerely|cheers|yours),)\s+"
    rf"(?:{_TITLES}\s+)?|\b{_TITLES}[ ]+)({_NAME}(?:[ ]+(?:[a-z]{{2,3}}[ ]+)?{_NAME}){{0,2}})"
)
# In lower case only if a clause ends after it, because "my name is" precedes many other words.
_NO_NAME = r"(?:a|already|also|an|at|in|not|no|on|still|the|this|too|wrong)\b"
_INTRODUCED_SMALL = re.compile(
    rf"\b(?:my (?:(?:full|first|last) )?name(?: is|'s|\u2019s|:)|name:)\s+(?!{_NO_NAME})"
    rf"([^\W\d_]{{2,}}(?:[ ]+(?!and\b|but\b|from\b)[^\W\d_]{{2,}})?)(?=\s*(?:[.,;:!?)\n]|\Z|(?:and|but|from)\b))",
    re.IGNORECASE,
)
_PARTS = re.compile(r"[^\W\d_]{3,}")


class Span(NamedTuple):
    """The position of personal data in a text, and its kind."""

    begin: int
    end: int
    kind: str


class PersonalData:
    """Finds personal data in texts."""

    def __init__(self, spacy_model: str | None = None) -> None:
        """`spacy_model`: a package or a folder; it finds names of people. Raises ConfigError if it cannot be loaded."""
        from presidio_analyzer import Pattern  # takes seconds
        from presidio_analyzer import predefined_recognizers as presidio

        class AnyEmail(presidio.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> None:
                """Accepts every domain: Presidio's own looks it up in the network, and internal domains count too."""

        self._recognizers = [
            *(AnyEmail(), presidio.PhoneRecognizer(), presidio.CreditCardRecognizer(), presidio.IbanRecognizer()),
            *(presidio.UsSsnRecognizer(), presidio.IpRecognizer(), presidio.MacAddressRecognizer()),
            *(presidio.CryptoRecognizer(), presidio.UrlRecognizer(patterns=[Pattern("address", _ADDRESS, 0.6)])),
        ]
        self._model = _load_spacy(spacy_model) if spacy_model else None

    def spans(self, text: str) -> list[Span]:
        """Data with a fixed form, in order. Of overlapping matches the longest is kept, then that of the best score."""
        matches = [
            (result.end - result.start, result.score, Span(result.start, result.end, KINDS[result.entity_type]))
            for recognizer in self._recognizers
            for result in recognizer.analyze(text, recognizer.supported_entities, None)
            if result.score >= _LEAST and not _is_code(text[result.start : result.end])
        ]
        kept = list[Span]()
        for *_, span in sorted(matches, key=lambda match: (-match[0], -match[1], match[2])):
            if all(span.end <= other.begin or other.end <= span.begin for other in kept):
                kept.append(span)
        return sorted(kept)

    def names(self, text: str) -> Iterator[str]:
        """Names of people, as far as they are recognized."""
        for pattern in (_INTRODUCED, _INTRODUCED_SMALL):
            yield from (match[1] for match in pattern.finditer(text))
        if self._model:
            yield from (entity.text for entity in self._model(text).ents if entity.label_ in ("PERSON", "PER"))


class Placeholders:
    """The placeholders of one conversation: personal data found in any of its texts is replaced in all of them."""

    def __init__(self, data: PersonalData, known: Iterable[str] = ()) -> None:
        """`known`: names of the person in the log."""
        self._data = data
        self._placeholders: dict[tuple[str, str], str] = {}  # by kind and spelling
        self._entities: dict[str, tuple[str, str]] = {}  # searched as whole words: kind and full text by spelling
        self._pattern: re.Pattern[str] | None = None
        for text in known:
            self.add(text)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of placeholders so far, by kind."""
        return Counter(kind for kind, _ in self._placeholders)

    def read(self, text: str) -> None:
        """Adds the names in a text."""
        for name in self._data.names(text):
            self.add(name)

    def add(self, text: str, kind: str = PERSON) -> None:
        """Replaces `text` from now on if it stands as whole words, in any case; of a person also parts of the name."""
        text = " ".join(re.sub(_PLACEHOLDER, " ", text).split()).strip(".,;:!?\"'()")
        if len(text) < 2:
            return
        parts = _PARTS.findall(text) if kind == PERSON else []
        spellings = [text, *(part for part in parts if part[0].isupper() or text.islower())]
        known = (self._entities.get(spelling.casefold()) for spelling in (text, *parts[:1]))
        entity = next(filter(None, known), (kind, text))
        for spelling in spellings:
            self._entities.setdefault(spelling.casefold(), entity)
        longest = sorted(self._entities, key=len, reverse=True)
        alternatives = "|".join(r"\s+".join(map(re.escape, words.split())) for words in longest)
        self._pattern = re.compile(rf"{_PLACEHOLDER}|(?<![^\W_])(?:{alternatives})(?![^\W_])", re.IGNORECASE)

    def replaced(self, text: str) -> str:
        """`text` without API keys and without the personal data found or added so far."""
        text, pieces, at = redact(text), list[str](), 0
        for span in self._data.spans(text):
            pieces += [text[at : span.begin], self._placeholder(span.kind, text[span.begin : span.end])]
            at = span.end
        without_forms = "".join([*pieces, text[at:]])
        return self._pattern.sub(self._of_match, without_forms) if self._pattern else without_forms

    def _of_match(self, match: re.Match[str]) -> str:
        entity = self._entities.get(" ".join(match[0].split()).casefold())
        return self._placeholder(*entity) if entity else match[0]  # a placeholder stays

    def _placeholder(self, kind: str, text: str) -> str:
        spelling = text.casefold() if kind in _SPELLED_AS_IS else _SEPARATORS.sub("", text).casefold()
        return self._placeholders.setdefault((kind, spelling), f"<{kind}_{self.counts[kind] + 1}>")


def _is_code(text: str) -> bool:
    """Whether an IPv6 address has so few parts that it is more likely part of a program, as in std::min."""
    return "::" in text and len(re.findall(r"[0-9a-fA-F]+", text)) < 3


def _load_spacy(model: str) -> Any:
    import spacy

    try:
        return spacy.load(model)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = f"install it with python -m spacy download {model}, or give the folder of a pipeline"
        raise ConfigError(f"--spacy={model}: spaCy cannot load it ({reason}); {remedy}") from error
