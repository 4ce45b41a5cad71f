"""The answer that a conversation states, read by rules from the text of the policy's replies alone.

1. A reply is read sentence by sentence: one that asks, offers, hedges, denies, checks or sets a condition states
   nothing, and one that takes something back withdraws all that was stated before it, in earlier replies too.
2. A reply's answer is in its last box, or behind its last "####" or "answer is"; else it is in its last sentence that
   states a value, before any offer: behind the last "is" or "=", or the last one.
3. Values joined by "or" and "and" are one answer; a reason ("because …"), what stands in parentheses, an approximation
   ("or about …") and what is ruled out ("not 48") are no part of it.
4. The answer of a conversation is that of the last reply that states one.
5. It is clear where that is the last reply of all, and it names one value in a box, behind "####" or "answer is", or in
   a sentence that begins with "so", "therefore" or "in total".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


def _any_of(*phrases: str) -> re.Pattern[str]:
    """Any of the phrases, each a pattern, as whole words."""
    return re.compile("|".join(rf"\b{phrase}\b" for phrase in phrases), re.IGNORECASE)


_PLAIN = str.maketrans({"\u2212": "-", "\u2019": "'"})  # the minus sign and the apostrophe of typesetters

# What states nothing.
_ASKS = re.compile(r"\?\W*$")
_OFFERS = _any_of(
    *("let me know", "feel free", "tell me", "happy to", "shall (?:i|we)", "should (?:i|we)", "want to"),
    *("want me to", "would you", "i (?:can|could) (?:also|then|help|show|explain|draw|give you|go)"),
)
_SILENT = _any_of(
    *("maybe", "perhaps", r"possib\w+", "might", "may", "could be", "not sure", "unsure", "guess", "either"),
    *(r"depend\w*", "unknown", r"candidates?", "would(?! be)", "not", "cannot", r"\w+n't", "never", "neither"),
    *("wrong", "incorrect", "if", "unless", "suppose", "for example", "an example", "please", "we can", "we could"),
    *("let's", "good luck"),
)
_ASIDE = re.compile(r"^\W*(?:(?:to )?(?:check|verify|verification)|you (?:asked|said|wrote))\b", re.IGNORECASE)
_WITHDRAWS = _any_of(
    *("wait(?! for)", "hold on", "scratch that", "oops", "i meant", "good catch", "i forgot", "correction(?=:)"),
    *("let me (?:redo|correct|fix|recalculate)", "my mistake", "made an? (?:mistake|error)", r"apologi[sz]e"),
    *("(?:that|this|it|i) (?:is|was) (?:wrong|incorrect|mistaken|a (?:mistake|slip))", r"(?<!\w )actually"),
    "(?:that|this|it) can(?:'t|not) be right",
)

# Bounds of length keep the time linear in that of a reply. Dollars that enclose a formula touch it, as in Pandoc, which
# tells them from those of amounts.
_LONGEST = 500  # characters of a formula
_DISPLAYED = rf"\$\$.{{1,{_LONGEST}}}?\$\$|\\\[.{{1,{_LONGEST}}}?\\\]"
_FORMULA = (
    rf"{_DISPLAYED}|(?<!\\)\$(?=[^\s$^])[^$]{{1,{_LONGEST}}}?(?<=\S)\$(?!\d)|\\\(.{{1,{_LONGEST}}}?\\\)"
    r"|-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|-?\\sqrt\{[^{}]*\}"
)
_TUPLE = r"[(\[]\s*-?[\d./]+(?:\s*,\s*-?[\d./]+)+\s*[)\]]"
_NUMBER = r"(?:(?<![\w)])-)?[$€£]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\d|,\d{3})(?!(?:st|nd|rd|th)\b)"
_VALUE = re.compile(rf"{_FORMULA}|{_TUPLE}|\d+ \d+/\d+|(?<![\w.^]){_NUMBER}(?:\s?/\s?\d+)?(?:\s?\\?%)?", re.DOTALL)

# What a value stands in.
_UNBROKEN = re.compile(rf"{_DISPLAYED}|\\begin\{{(\w+\*?)\}}.{{1,{_LONGEST}}}?\\end\{{\1\}}", re.DOTALL)
_BOUNDARY = re.compile(  # of sentences, and of offers within one
    r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?][\"'\u201d)*_$\\\]]*(?P<gap>\s+)|\n|;"
    r"|[,\u2013\u2014]?\s+-{0,2}\s*(?=(?:would you|do you|want me|let me know|feel free|tell me)\b)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",\s+(?=(?:but|so|therefore|thus|hence|then)\b)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER = re.compile(
    r"####|\bfinal answer\b|\banswers?\b(?:\W{0,3}[:=]|[^.:=]{0,80}?\b(?:is|are|stays|remains)\b:?)", re.IGNORECASE
)
_CONCLUDES = re.compile(r"^\W*(?:and )?(?:so|therefore|thus|hence|altogether|in total|in all|total)\b", re.IGNORECASE)
_BE = re.compile(r"\b(?:is|are|was|were|equals)\b:?(?=\s)", re.IGNORECASE)
_OR = re.compile(r"[^.,;]{0,12},?\s+or\s+(?:maybe\s+|possibly\s+)?(?:[a-z]\s*=\s*)?")
_AND = re.compile(rf"\s*(?:,|,?\s+and)\s+|{_OR.pattern}")
_REASON = re.compile(r"(?<=\w),?\s+(?:because|since|as|where|given that)\b.*", re.IGNORECASE | re.DOTALL)
_EXCLUDED = re.compile(
    rf",?\s+(?:(?:and\s+)?not|or\s+(?:about|approximately|roughly))\s+(?:{_VALUE.pattern})"
    rf"|\bnot\s+(?:{_VALUE.pattern})\s+but\b|(?<=[\w.])\s+\([^()]*[a-z]{{3}}[^()]*\)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Stated:
    """An answer as a text that math-verify reads, and whether it is clear that it is the final one."""

    value: str
    clear: bool


def stated(replies: Sequence[str]) -> Stated | None:
    """The answer that the last of the replies states that states one, by the rules above."""
    found: Stated | None = None
    for reply in replies:
        own, withdrawn = _read(reply.translate(_PLAIN))
        if own or withdrawn:
            found = own
        elif found:
            found = replace(found, clear=False)
    return found


def as_math(answer: str) -> str:
    """An answer as math-verify reads it: a formula between dollars; numbers, and texts with words in them, bare."""
    text = answer.translate(_PLAIN).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
            break
    text = re.sub(r"(?<!\{),?\s+(?:or|and)\s+", ", ", text.rstrip(" ."))
    sides = re.split(r"(?<![<>!\\])=", text)
    if len(sides) == 2 or not re.search(r"[,;]|\\text", text):  # which stand between several equations
        text = sides[-1].strip()
    if amount := re.fullmatch(r"(-?)\\?[$€£]?(\d{1,3}(?:,\d{3})+|\d*)(\.\d+)?(?:\s?\\?(%))?", text):
        return "".join(part or "" for part in amount.groups()).replace(",", "")
    if mixed := re.fullmatch(r"(\d+) (\d+)/(\d+)", text):
        return rf"${mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}$"
    return text if has_words(re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text)) else f"${text}$"


def has_words(answer: str) -> bool:
    """Whether an answer has words that are no commands, as those of units."""
    return re.search(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", answer)) is not None


def _read(reply: str) -> tuple[Stated | None, bool]:
    """What a reply states, and whether it withdraws what was stated before it."""
    answer: Stated | None = None
    value: Stated | None = None
    withdrawn = offered = False
    for sentence in _sentences(reply):
        if taken_back := _WITHDRAWS.search(sentence):
            answer, value, withdrawn = None, None, True
            sentence = sentence[taken_back.start() :]
        offered = offered or _OFFERS.search(sentence) is not None
        if _ASKS.search(sentence):
            continue
        if boxed := _box(sentence):
            answer = Stated(as_math(boxed), True)
            continue
        for clause in _CLAUSE.split(sentence):
            clause = _EXCLUDED.sub("", clause)
            if _SILENT.search(clause) or _ASIDE.search(clause):
                continue
            clause = _REASON.sub("", clause)
            *_, mark = [None, *_ANSWER.finditer(clause)]
            if mark and (found := _behind(clause[mark.end() :])):
                answer = found
            elif not offered and (found := _last(clause)):
                value = found
    return answer or value, withdrawn


def _sentences(reply: str) -> Iterator[str]:
    """The sentences of a reply, without its marks of lists and emphasis; a label and what follows it are one."""
    text = _UNBROKEN.sub(lambda formula: " ".join(formula[0].split()), reply)
    text = re.sub(r"(?m)^[ \t]*(?:[-•*]|\d+[.)])[ \t]+(?=\S)", "", text).replace("**", "").replace("`", "")
    text = re.sub(r"(?i)(:|\banswer)[ \t]*\n\s*", r"\1 ", text)
    begin = 0
    for boundary in _BOUNDARY.finditer(text):
        yield text[begin : boundary.start("gap") if boundary["gap"] else boundary.start()]
        begin = boundary.end()
    yield text[begin:]


def _box(sentence: str) -> str | None:
    """What is in the last box that is not empty."""
    found = None
    for box in _BOX.finditer(sentence):
        depth = 1
        for at in range(box.end(), min(len(sentence), box.end() + _LONGEST)):
            depth += (sentence[at] == "{") - (sentence[at] == "}")
            if not depth:
                found = sentence[box.end() : at].strip() or found
                break
    return found


def _last(clause: str) -> Stated | None:
    """The value behind the last "is" of a clause, or else its last one; clear where that is a conclusion."""
    *_, verb = [None, *_BE.finditer(clause)]
    found = _behind(clause[verb.end() :]) if verb else None
    if found is None:
        values = [match for match in _VALUE.finditer(clause) if re.search(r"\d|\\pi|\\infty", match[0])]
        if not values:
            return None
        if len(values) > 1 and _OR.fullmatch(clause, values[-2].end(), values[-1].start()):
            return _joined(values[-2:])
        alone = len(values) == 1 or clause[: values[-1].start()].rstrip().endswith("=")
        found = Stated(as_math(values[-1][0]), alone)
    return replace(found, clear=found.clear and _CONCLUDES.search(clause) is not None)


def _behind(rest: str) -> Stated | None:
    """The first value in what follows "is", or the last of a chain of equations; clear where there is no other."""
    values = [match for match in _VALUE.finditer(rest) if re.search(r"\d|\\[a-z]", match[0])]
    if len(values) < 2:
        return Stated(as_math(values[0][0]), True) if values else None
    if _AND.fullmatch(rest, values[0].end(), values[1].start()):
        return _joined(values[:2])
    if rest[: values[-1].start()].rstrip().endswith("="):
        return Stated(as_math(values[-1][0]), True)
    return Stated(as_math(values[0][0]), False)


def _joined(values: Sequence[re.Match[str]]) -> Stated:
    return Stated(f"${', '.join(as_math(value[0]).strip('$') for value in values)}$", False)
