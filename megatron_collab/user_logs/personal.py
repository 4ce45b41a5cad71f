"""Replaces personal data in the texts of a conversation by placeholders such as <EMAIL_1>, the same in all its texts.

The recognizers read a plain spelling of a text (`plain`). Data with a fixed form is recognized by Presidio and by
`forms`, with checksums if there are any; they need no model. Names have no fixed form. They are recognized if a text
introduces them (`names`), by a spaCy model if one is installed, or by the model that describes the conversation, which
lists the names it has read (`Placeholders.add`). Presidio's analyzer is not used: it loads a language model, and looks
up the domains of e-mail addresses in the network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_collab.runtime.redact import HIDDEN, key_spans
from megatron_collab.settings import ConfigError
from megatron_collab.user_logs import forms, names
from megatron_collab.user_logs.plain import PlainText, plain

PERSON = "PERSON"
KINDS = {  # what Presidio's recognizers find, by its name
    "EMAIL_ADDRESS": "EMAIL",
    "PHONE_NUMBER": "PHONE",
    "US_SSN": "SSN",
    "IP_ADDRESS": "IP",
    "MAC_ADDRESS": "MAC",
}
# Countries whose national telephone numbers are found; international ones are found of all.
REGIONS = ("US", "GB", "DE", "FR", "IL", "IN", "CA", "BR", "RU", "CN", "JP", "ES", "IT")
_LEAST = 0.4  # Presidio's score of a phone number; patterns with a lower score need context words
_PLACEHOLDER = r"<[A-Z]+_\d+>"
_SPELLED_AS_IS = ("EMAIL", "URL", PERSON)  # the spelling of other kinds ignores spaces, dots and brackets
_SEPARATORS = re.compile(r"[\s().\-/]+")
_NO_PHONE = re.compile(r"\d+[.,]\d+|\d{1,2}([./-])\d{1,2}\1(?:19|20)\d\d|(?:19|20)\d\d([./-])\d{1,2}\2\d{1,2}")
_PARTS = re.compile(r"[^\W\d_]{3,}")
_NO_PARTS = frozenset((*names.TITLES, *names.PARTICLES))


class Span(NamedTuple):
    """The position of personal data in a text, and its kind."""

    begin: int
    end: int
    kind: str

    def is_apart(self, spans: Iterable[Span]) -> bool:
        return all(self.end <= other.begin or other.end <= self.begin for other in spans)


class PersonalData:
    """Finds personal data in texts."""

    def __init__(self, spacy_model: str | None = None) -> None:
        """`spacy_model`: a package or a folder; it finds names of people. Raises ConfigError if it cannot be loaded."""
        from presidio_analyzer import predefined_recognizers as presidio  # takes seconds

        class AnyEmail(presidio.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> None:
                """Accepts every domain: Presidio's own looks it up in the network, and internal domains count too."""

        self._recognizers = [
            *(AnyEmail(), presidio.PhoneRecognizer(supported_regions=REGIONS), presidio.UsSsnRecognizer()),
            *(presidio.IpRecognizer(), presidio.MacAddressRecognizer()),
        ]
        self._model = _load_spacy(spacy_model) if spacy_model else None

    def spans(self, text: str) -> list[Span]:
        """Data with a fixed form in a plain text. Of overlapping matches the longest is kept, then that of the best
        score."""
        matches = [
            (result.score, Span(result.start, result.end, KINDS[result.entity_type]))
            for recognizer in self._recognizers
            for result in recognizer.analyze(text, recognizer.supported_entities, None)
            if result.score >= _LEAST and not _is_other(text[result.start : result.end], result.entity_type)
        ]
        matches += [(1.0, Span(*place)) for place in forms.spans(text)]
        matches += [(1.0, Span(*place, forms.SECRET)) for place in key_spans(text)]
        kept = list[Span]()
        for _, span in sorted(matches, key=lambda match: (match[1].begin - match[1].end, -match[0], match[1])):
            if span.is_apart(kept):
                kept.append(span)
        return kept

    def names(self, text: str) -> Iterator[str]:
        """Names of people in a plain text, as far as they are recognized."""
        yield from names.introduced(text)
        if self._model:
            yield from (entity.text for entity in self._model(text).ents if entity.label_ in ("PERSON", "PER"))


class Placeholders:
    """The placeholders of one conversation: personal data found in any of its texts is replaced in all of them."""

    def __init__(self, data: PersonalData, known: Iterable[str] = ()) -> None:
        """`known`: names of the person in the log."""
        self._data = data
        self._placeholders: dict[tuple[str, str], str] = {}  # by kind and spelling
        self._entities: dict[str, tuple[str, str]] = {}  # searched as whole words: kind and full text by spelling
        self._spellings = set[str]()
        self._pattern: re.Pattern[str] | None = None
        for text in known:
            self.add(text)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of placeholders so far, by kind."""
        return Counter(kind for kind, _ in self._placeholders)

    def read(self, text: str) -> None:
        """Adds the names in a text."""
        for name in self._data.names(plain(text)):
            self.add(name)

    def add(self, text: str, kind: str = PERSON) -> None:
        """Replaces `text` from now on if it stands as whole words, in any case; of a person also parts of the name."""
        text = " ".join(re.sub(_PLACEHOLDER, " ", plain(text)).split()).strip(".,;:!?\"'()")
        if len(text) < 2:
            return
        parts = [part for part in _PARTS.findall(text) if part.casefold() not in _NO_PARTS] if kind == PERSON else []
        spellings = [text, *(part for part in parts if not part[0].islower() or text.islower())]
        known = (self._entities.get(spelling.casefold()) for spelling in (text, *parts[:1]))
        entity = next(filter(None, known), (kind, text))
        for spelling in spellings:
            self._entities.setdefault(spelling.casefold(), entity)
        self._spellings.update(form for spelling in spellings for form in (spelling, spelling.upper()))
        longest = sorted(self._spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join((_PLACEHOLDER, *map(_searched, longest))), re.IGNORECASE)

    def replaced(self, text: str) -> str:
        """`text` without keys, passwords and the personal data found or added so far."""
        view = PlainText(text)
        spans = self._data.spans(view.text)
        entities = dict[Span, tuple[str, str]]()
        for match in self._pattern.finditer(view.text) if self._pattern else ():
            entity = self._entities.get(" ".join(match[0].split()).casefold())  # None: a placeholder, which stays
            span = Span(*match.span(), "")
            if entity and span.is_apart(spans):
                entities[span] = entity
        pieces, at = list[str](), 0
        for span in sorted([*spans, *entities]):
            begin, end = view.place(span.begin, span.end)
            entity = entities.get(span, (span.kind, view.text[span.begin : span.end]))
            pieces += [text[at:begin], self._placeholder(*entity)]
            at = end
        return "".join([*pieces, text[at:]])

    def _placeholder(self, kind: str, text: str) -> str:
        if kind == forms.SECRET:
            return HIDDEN
        spelling = text.casefold() if kind in _SPELLED_AS_IS else _SEPARATORS.sub("", text).casefold()
        return self._placeholders.setdefault((kind, spelling), f"<{kind}_{self.counts[kind] + 1}>")


def _searched(words: str) -> str:
    """The pattern of a text as whole words; words of a script without spaces have no ends."""
    pattern = r"\s+".join(map(re.escape, words.split()))
    return pattern if names.is_unspaced(words) else rf"(?<![^\W_]){pattern}(?![^\W_])"


def _is_other(text: str, kind: str) -> bool:
    """Whether what looks like an address is more likely part of a program, and a number a date, a decimal or short."""
    if kind == "PHONE_NUMBER":
        short = sum(map(str.isdigit, text)) < 9 and text[0] not in "+(0"
        return short or _NO_PHONE.fullmatch(text) is not None
    return "::" in text and len(re.findall(r"[0-9a-fA-F]+", text)) < 3  # as in std::min


def _load_spacy(model: str) -> Any:
    import spacy

    try:
        return spacy.load(model)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = f"install it with python -m spacy download {model}, or give the folder of a pipeline"
        raise ConfigError(f"--spacy={model}: spaCy cannot load it ({reason}); {remedy}") from error
