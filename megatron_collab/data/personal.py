"""Personal data in the texts of a conversation, replaced by placeholders as <EMAIL_1>, the same one in all its texts.

What has a form is found by Presidio's recognisers, with checksums where there are any; they need no model. A name has
no form. It is found where a text introduces it ("my name is …"), by a spaCy model where one is installed, or by the
model that describes the conversation, which lists the names it has read (`Placeholders.add`). Presidio's analyser is
left out: it loads a language model, and asks the network for the domains that e-mail addresses may end with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_collab.config import ConfigError
from megatron_collab.runtime.redact import redact

PERSON = "PERSON"
KINDS = {  # of what has a form, by Presidio's name
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
_LEAST = 0.4  # Presidio's score of a phone number; below are patterns that only words around them could confirm
_PLACEHOLDER = r"<[A-Z]+_\d+>"
_SPELLED_AS_IS = ("EMAIL", "URL", PERSON)  # in the others spaces, dots and brackets do not count
_SEPARATORS = re.compile(r"[\s().\-/]+")
_TITLES = r"(?:Mr|Mrs|Ms|Miss|Dr|Prof)\b\.?"
_NAME = r"[^\W\d_a-z][\w'\u2019-]+"  # begins with a capital, or a letter of a script without any
# Presidio's own pattern ends at a host within a company, and leaves what follows it. A bare main.py is a file.
_ADDRESS = (
    r"(?:\b[a-z][a-z0-9+.\-]{1,20}://|\bwww\.)[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
    r"|(?<![\w.@/])(?:[\w\-]{1,63}\.){1,8}[a-z]{2,}(?:/[^\s<>\"'`?]*)?\?[^\s<>\"'`=]+=[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
)
_INTRODUCED = re.compile(
    rf"(?:(?i:\b(?:my|full|first|last) name(?: is|'s|\u2019s|:)|\bname:|\b(?:regards|sincerely|cheers|yours),)\s+"
    rf"(?:{_TITLES}\s+)?|\b{_TITLES}[ ]+)({_NAME}(?:[ ]+(?:[a-z]{{2,3}}[ ]+)?{_NAME}){{0,2}})"
)
# In small letters only where a clause ends after it, for much else follows "my name is".
_NO_NAME = r"(?:a|already|also|an|at|in|not|no|on|still|the|this|too|wrong)\b"
_INTRODUCED_SMALL = re.compile(
    rf"\b(?:my (?:(?:full|first|last) )?name(?: is|'s|\u2019s|:)|name:)\s+(?!{_NO_NAME})"
    rf"([^\W\d_]{{2,}}(?:[ ]+(?!and\b|but\b|from\b)[^\W\d_]{{2,}})?)(?=\s*(?:[.,;:!?)\n]|\Z|(?:and|but|from)\b))",
    re.IGNORECASE,
)
_PARTS = re.compile(r"[^\W\d_]{3,}")


class Span(NamedTuple):
    """Where in a text something of a kind stands."""

    begin: int
    end: int
    kind: str


class PersonalData:
    """Finds what is personal in a text, in a process."""

    def __init__(self, spacy_model: str | None = None) -> None:
        """`spacy_model`: a package or a folder, which finds names of people. ConfigError where there is none."""
        from presidio_analyzer import Pattern  # which takes seconds
        from presidio_analyzer import predefined_recognizers as given

        class AnyEmail(given.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> None:
                """Presidio's own asks the network whether there is such a domain; one within a company counts too."""

        self._recognisers = [
            *(AnyEmail(), given.PhoneRecognizer(), given.CreditCardRecognizer(), given.IbanRecognizer()),
            *(given.UsSsnRecognizer(), given.IpRecognizer(), given.MacAddressRecognizer(), given.CryptoRecognizer()),
            given.UrlRecognizer(patterns=[Pattern("address", _ADDRESS, 0.6)]),
        ]
        self._model = _loaded(spacy_model) if spacy_model else None

    def spans(self, text: str) -> list[Span]:
        """What has a form, in order; of what overlaps the longest, and of equally long ones the surer."""
        found = [
            (each.end - each.start, each.score, Span(each.start, each.end, KINDS[each.entity_type]))
            for recogniser in self._recognisers
            for each in recogniser.analyze(text, recogniser.supported_entities, None)
            if each.score >= _LEAST and not _is_code(text[each.start : each.end])
        ]
        kept = list[Span]()
        for *_, span in sorted(found, key=lambda each: (-each[0], -each[1], each[2])):
            if all(span.end <= other.begin or other.end <= span.begin for other in kept):
                kept.append(span)
        return sorted(kept)

    def names(self, text: str) -> Iterator[str]:
        """Names of people, as far as they can be told."""
        for introduced in (_INTRODUCED, _INTRODUCED_SMALL):
            yield from (found[1] for found in introduced.finditer(text))
        if self._model:
            yield from (entity.text for entity in self._model(text).ents if entity.label_ in ("PERSON", "PER"))


class Placeholders:
    """Those of one conversation: what was found in any of its texts is replaced in all of them."""

    def __init__(self, data: PersonalData, known: Iterable[str] = ()) -> None:
        """`known`: what the person is called in the log."""
        self._data = data
        self._placeholders: dict[tuple[str, str], str] = {}  # by kind and spelling
        self._told: dict[str, tuple[str, str]] = {}  # what is looked for word by word: kind and whole name by spelling
        self._pattern: re.Pattern[str] | None = None
        for text in known:
            self.add(text)

    @property
    def counts(self) -> Mapping[str, int]:
        """By kind how many were needed so far."""
        return Counter(kind for kind, _ in self._placeholders)

    def read(self, text: str) -> None:
        """Note the names in a text."""
        for name in self._data.names(text):
            self.add(name)

    def add(self, text: str, kind: str = PERSON) -> None:
        """Replace `text` from now on wherever it stands as whole words, in any case; of a person also parts of the
        name."""
        text = " ".join(re.sub(_PLACEHOLDER, " ", text).split()).strip(".,;:!?\"'()")
        if len(text) < 2:
            return
        parts = _PARTS.findall(text) if kind == PERSON else []
        spellings = [text, *(part for part in parts if part[0].isupper() or text.islower())]
        known = (self._told.get(spelling.casefold()) for spelling in (text, *parts[:1]))
        whole = next(filter(None, known), (kind, text))
        for spelling in spellings:
            self._told.setdefault(spelling.casefold(), whole)
        longest = sorted(self._told, key=len, reverse=True)
        looks = "|".join(r"\s+".join(map(re.escape, each.split())) for each in longest)
        self._pattern = re.compile(rf"{_PLACEHOLDER}|(?<![^\W_])(?:{looks})(?![^\W_])", re.IGNORECASE)

    def replaced(self, text: str) -> str:
        """`text` without API keys and what is personal in it, as far as it was found or told."""
        text, pieces, at = redact(text), list[str](), 0
        for span in self._data.spans(text):
            pieces += [text[at : span.begin], self._placeholder(span.kind, text[span.begin : span.end])]
            at = span.end
        found = "".join([*pieces, text[at:]])
        return self._pattern.sub(self._of_match, found) if self._pattern else found

    def _of_match(self, match: re.Match[str]) -> str:
        whole = self._told.get(" ".join(match[0].split()).casefold())
        return self._placeholder(*whole) if whole else match[0]  # a placeholder stays

    def _placeholder(self, kind: str, text: str) -> str:
        spelling = text.casefold() if kind in _SPELLED_AS_IS else _SEPARATORS.sub("", text).casefold()
        return self._placeholders.setdefault((kind, spelling), f"<{kind}_{self.counts[kind] + 1}>")


def _is_code(text: str) -> bool:
    """Whether an address of IPv6 has so few parts that it is rather a word of a program, as in std::min."""
    return "::" in text and len(re.findall(r"[0-9a-fA-F]+", text)) < 3


def _loaded(model: str) -> Any:
    import spacy

    try:
        return spacy.load(model)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        out = f"install it with python -m spacy download {model}, or give the folder of a pipeline"
        raise ConfigError(f"--spacy={model}: spaCy cannot load it ({reason}); {out}") from error
