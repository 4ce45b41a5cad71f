"""The answer that a conversation states, extracted by rules from the text of the policy's replies.

1. A reply is read sentence by sentence. A sentence that asks, offers, hedges, denies, checks or sets a condition states
   nothing; one that takes something back withdraws everything stated before it, also in earlier replies.
2. A reply's answer is in its last box, or after its last "####" or "answer is". Without these it is in the last
   sentence that states a value, before any offer: the value after the last "is" or "=", else the last value.
3. Values joined by "or" and "and" are one answer. A reason ("because …"), text in parentheses, an approximation
   ("or about …") and an excluded value ("not 48") are not part of it.
4. The answer of a conversation is that of the last reply that states one.
5. It is clear if that reply is the conversation's last and it names one value in a box, after "####" or "answer is", or
   in a sentence that begins with "so", "therefore" or "in total".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_collab.data.answers import LONGEST, boxed, marked_line


def _any_of(*phrases: str) -> re.Pattern[str]:
    """Matches any of the phrases (patterns) as whole words."""
    return re.compile("|".join(rf"\b{phrase}\b" for phrase in phrases), re.IGNORECASE)


_PLAIN = str.maketrans({"\u2212": "-", "\u2019": "'"})  # the minus sign and the apostrophe of typesetters

# Sentences that state nothing.
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

# Length limits keep the time linear in the reply's length. Dollars that enclose a formula touch it, as in Pandoc;
# this distinguishes them from the dollars of amounts.
_DISPLAYED = rf"\$\$.{{1,{LONGEST}}}?\$\$|\\\[.{{1,{LONGEST}}}?\\\]"
_FORMULA = (
    rf"{_DISPLAYED}|(?<!\\)\$(?=[^\s$^])[^$]{{1,{LONGEST}}}?(?<=\S)\$(?!\d)|\\\(.{{1,{LONGEST}}}?\\\)"
    r"|-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}|-?\\sqrt\{[^{}]*\}"
)
_TUPLE = r"[(\[]\s*-?[\d./]+(?:\s*,\s*-?[\d./]+)+\s*[)\]]"
_NUMBER = r"(?:(?<![\w)])-)?[$€£]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\d|,\d{3})(?!(?:st|nd|rd|th)\b)"
_VALUE = re.compile(rf"{_FORMULA}|{_TUPLE}|\d+ \d+/\d+|(?<![\w.^]){_NUMBER}(?:\s?/\s?\d+)?(?:\s?\\?%)?", re.DOTALL)

# What surrounds a value.
_UNBROKEN = re.compile(rf"{_DISPLAYED}|\\begin\{{(\w+\*?)\}}.{{1,{LONGEST}}}?\\end\{{\1\}}", re.DOTALL)
_BOUNDARY = re.compile(  # of sentences, and of offers within one
    r"(?<!e\.g)(?<!i\.e)(?<!vs)[.!?][\"'\u201d)*_$\\\]]*(?P<gap>\s+)|\n|;"
    r"|[,\u2013\u2014]?\s+-{0,2}\s*(?=(?:would you|do you|want me|let me know|feel free|tell me)\b)",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",\s+(?=(?:but|so|therefore|thus|hence|then)\b)", re.IGNORECASE)
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
class StatedAnswer:
    """An answer as text that math-verify reads, and whether it is clearly the final one."""

    value: str
    clear: bool


def stated_answer(replies: Sequence[str]) -> StatedAnswer | None:
    """The answer of the last reply that states one, by the rules above."""
    final: StatedAnswer | None = None
    for reply in replies:
        answer, withdrawn = _read(reply.translate(_PLAIN))
        if answer or withdrawn:
            final = answer
        elif final:
            final = replace(final, clear=False)
    return final


def as_math(answer: str) -> str:
    """An answer as math-verify reads it: formulas between dollars, numbers and texts with words without dollars."""
    text = answer.translate(_PLAIN).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            text = text[len(opening) : -len(closing)].strip()
            break
    text = re.sub(r"(?<!\{),?\s+(?:or|and)\s+", ", ", text.rstrip(" ."))
    sides = re.split(r"(?<![<>!\\])=", text)
    if len(sides) == 2 or not re.search(r"[,;]|\\text", text):  # these separate several equations
        text = sides[-1].strip()
    if amount := re.fullmatch(r"(-?)\\?[$€£]?(\d{1,3}(?:,\d{3})+|\d*)(\.\d+)?(?:\s?\\?(%))?", text):
        return "".join(part or "" for part in amount.groups()).replace(",", "")
    if mixed := re.fullmatch(r"(\d+) (\d+)/(\d+)", text):
        return rf"${mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}$"
    return text if has_words(re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", text)) else f"${text}$"


def has_words(answer: str) -> bool:
    """Whether an answer has words, e.g. units, other than LaTeX commands."""
    return re.search(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", answer)) is not None


def _read(reply: str) -> tuple[StatedAnswer | None, bool]:
    """The answer that a reply states, and whether the reply withdraws earlier answers."""
    answer: StatedAnswer | None = None
    value: StatedAnswer | None = None
    withdrawn = offered = False
    for sentence in _sentences(reply):
        if withdrawal := _WITHDRAWS.search(sentence):
            answer, value, withdrawn = None, None, True
            sentence = sentence[withdrawal.start() :]
        offered = offered or _OFFERS.search(sentence) is not None
        if _ASKS.search(sentence):
            continue
        if text := boxed(sentence) or _hashed(sentence):
            answer = StatedAnswer(as_math(text), True)
            continue
        for clause in _CLAUSE.split(sentence):
            clause = _EXCLUDED.sub("", clause)
            if _SILENT.search(clause) or _ASIDE.search(clause):
                continue
            clause = _REASON.sub("", clause)
            *_, mark = [None, *_ANSWER.finditer(clause)]
            if mark and (marked := _first(clause[mark.end() :])):
                answer = marked
            elif not offered and (last := _last(clause)):
                value = last
    return answer or value, withdrawn


def _hashed(sentence: str) -> str | None:
    """The line after `####` if it has neither words, as a heading has, nor an aside in parentheses."""
    line = marked_line(sentence) if sentence.lstrip().startswith("####") else None
    return None if line is None or has_words(line) or " (" in line else line


def _sentences(reply: str) -> Iterator[str]:
    """The sentences of a reply, without list and emphasis markup; a label and the line after it are one sentence."""
    text = _UNBROKEN.sub(lambda formula: " ".join(formula[0].split()), reply)
    text = re.sub(r"(?m)^[ \t]*(?:[-•*]|\d+[.)])[ \t]+(?=\S)", "", text).replace("**", "").replace("`", "")
    text = re.sub(r"(?i)(:|\banswer|####)[ \t]*\n\s*", r"\1 ", text)
    begin = 0
    for boundary in _BOUNDARY.finditer(text):
        yield text[begin : boundary.start("gap") if boundary["gap"] else boundary.start()]
        begin = boundary.end()
    yield text[begin:]


def _last(clause: str) -> StatedAnswer | None:
    """The value after the last "is" of a clause, else its last value; clear if the clause is a conclusion."""
    *_, verb = [None, *_BE.finditer(clause)]
    answer = _first(clause[verb.end() :]) if verb else None
    if answer is None:
        values = [match for match in _VALUE.finditer(clause) if re.search(r"\d|\\pi|\\infty", match[0])]
        if not values:
            return None
        if len(values) > 1 and _OR.fullmatch(clause, values[-2].end(), values[-1].start()):
            return _joined(values[-2:])
        unambiguous = len(values) == 1 or clause[: values[-1].start()].rstrip().endswith("=")
        answer = StatedAnswer(as_math(values[-1][0]), unambiguous)
    return replace(answer, clear=answer.clear and _CONCLUDES.search(clause) is not None)


def _first(text: str) -> StatedAnswer | None:
    """The first value of the text after "is", or the last of a chain of equations; clear if it is the only value."""
    values = [match for match in _VALUE.finditer(text) if re.search(r"\d|\\[a-z]", match[0])]
    if len(values) < 2:
        return StatedAnswer(as_math(values[0][0]), True) if values else None
    if _AND.fullmatch(text, values[0].end(), values[1].start()):
        return _joined(values[:2])
    if text[: values[-1].start()].rstrip().endswith("="):
        return StatedAnswer(as_math(values[-1][0]), True)
    return StatedAnswer(as_math(values[0][0]), False)


def _joined(values: Sequence[re.Match[str]]) -> StatedAnswer:
    return StatedAnswer(f"${', '.join(as_math(value[0]).strip('$') for value in values)}$", False)
