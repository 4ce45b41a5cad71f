"""Whether two answers are surely equal or surely different, as far as their texts decide it; else formulas.py does.

Answers are brought into one notation. Numbers are compared exactly, and words such as option letters as texts. Another
unit and a rounded number are unclear.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple


class Verdict(StrEnum):
    """Result of a comparison; no_truth: the task's answer is nothing that can be compared, e.g. a sentence."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNCLEAR = "unclear"
    NO_TRUTH = "no_truth"


LONGEST = 500  # characters of an answer; longer ones are not compared

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SIGNS = {
    **{sign: "-" for sign in "\u2212\u2013\u2014\uff0d\ufe63"},
    **{"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi "},
    **{"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\neq ", "\u221e": r"\infty ", "\u222a": r"\cup "},
    **{"\u2229": r"\cap ", "\u2208": r"\in ", "\u00b0": r"^\circ", "\u2019": "'", "\u00b1": r"\pm "},
}
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~(?! *\d)|\\q?quad(?![a-zA-Z])|\s+")
_STYLES = re.compile(r"\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])")
_FONT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{\s*([^{}]*?)\s*\}")
_SHORT = re.compile(r"\w|[-\d.,]*|\d+ [a-z]+")
_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("*", "*"), ("`", "`"))
_NUMBER = r"[-+]?(?:\d{1,3}(?:(?:,\d{3})+| \d{3}(?: \d{3})*)(?!\d)|\d+)?(?:\.\d+)?"
_PLAIN = re.compile(_NUMBER)
SCIENTIFIC = re.compile(rf"({_NUMBER})[eE]([-+]?\d{{1,4}})")
_CURRENCY = re.compile(r"(-?)\\?([$€£])\s*(?=[\d.])")
_WITH_UNIT = re.compile(
    rf"(?=[-+.\d])(?P<number>{_NUMBER})\s*(?P<unit>(?:[a-zA-Z%\u2030^]|\\(?:text|[%\u2030])).*)"
    rf"|(?P<formula>.*?[^\s^_])\s*(?P<named>(?:\\text\{{|\^\{{?\\circ).*)",
    re.DOTALL,
)
_UNIT = re.compile(
    r"\\text\{[^{}]+\}(?:\^\{?-?\d\}?)?|\^\{?\\circ\}?(?:\\text\{[CF]\})?|\\?[%\u2030]"
    r"|[a-zA-Z.]+(?:[ /^][a-zA-Z0-9.]+)*"
)
_NO_UNIT = re.compile(  # words and letters that change the number before them, or make it part of a formula
    r"(?i)\b(?:thousand|million|billion|trillion|hundred|dozen|score|pairs?|squared|cubed|times|plus|minus|more"
    r"|less|or|and|of|to|than|mod|base|in|per|sin|cos|tan|ln|log|exp|sqrt|pi|factorial|is|not"
    r"|[kKxyznabcdefijpqrtuvwE])\b"
)
_SENTENCE = re.compile(r"(?<![\\a-zA-Z{])[^\W\d_]{3,}")  # a word that is no command of LaTeX
_BELOW_20 = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_BELOW_100 = {word: value for value, word in enumerate(_BELOW_20)}
_BELOW_100 |= {word: 10 * tens for tens, word in enumerate(_TENS, 2)}
_BELOW_100 |= {f"{word}-{_BELOW_20[unit]}": _BELOW_100[word] + unit for word in _TENS for unit in range(1, 10)}
_SMALL = "|".join(sorted(_BELOW_100, key=len, reverse=True))
_SPELLED = re.compile(rf"(?i)(?:({_SMALL}) hundred\b(?:(?: and)? (?={_SMALL}))?)?({_SMALL})?(?![\w-])")
_BEHIND_MATH = re.compile(r"(?:\$([^$]+)\$|\\\(([^$]+?)\\\)) ([^\W\d][^$\\{}]*)")  # words, e.g. of a unit
_SAME_UNITS = {"dollar": "$", "dollars": "$", "usd": "$", "euro": "€", "euros": "€", "pounds": "£"}
_SAME_UNITS |= {r"\%": "%", "percent": "%", "degrees": r"^\circ", "units": "", "squareunits": ""}


class Measured(NamedTuple):
    """A value and its unit, empty if there is none."""

    value: str
    unit: str


def of_texts(truth: str, answer: str) -> Verdict | None:
    """The verdict if it needs no formula: of plain numbers with units, of texts, and of what cannot be compared."""
    if not readable(truth):
        return Verdict.NO_TRUTH
    if len(answer) > LONGEST:
        return Verdict.UNCLEAR
    if (text := normal(truth)) == normal(answer):
        return Verdict.EQUAL
    if (words := _words(text)) is not None:
        return _of_words(words, _plain_text(normal(answer)))
    expected, stated = measured(truth), measured(answer)
    if not _comparable(expected.unit, stated.unit):
        return Verdict.UNCLEAR
    a, b = number(expected.value), number(stated.value)
    if b is None and _SENTENCE.search(stated.value):
        return Verdict.UNCLEAR
    if a == b and a is not None:
        return Verdict.EQUAL
    if a is not None and a == _continental(stated.value):
        return Verdict.UNCLEAR
    if a is None or b is None:
        return None
    if _rounded(expected.value, stated.value, abs(a - b)) or (expected.unit and not stated.unit):
        return Verdict.UNCLEAR
    return Verdict.DIFFERENT


def readable(truth: str) -> bool:
    """Whether an answer can be compared: a number, a letter, a formula, or words that LaTeX marks as text."""
    text = normal(truth) if len(truth) <= LONGEST else ""
    if not text or (_words(text) is not None and not re.fullmatch(r"\(?[a-zA-Z]\)?|.*\\text\{.*", text)):
        return False
    value = measured(truth).value
    return number(value) is not None or _words(value) is not None or not _SENTENCE.search(value)


def normal(text: str) -> str:
    """An answer in one notation: signs of Unicode as LaTeX, no styles, spaces or dollars; units keep \\text."""
    text = text.strip()
    if behind := _BEHIND_MATH.fullmatch(text):
        text = rf"{behind[1] or behind[2]}\text{{{behind[3]}}}"
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda power: f"^{{{power[0].translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_SIGNS.get(sign) or _fraction(sign) or sign for sign in text)
    text = re.sub(r"√\s*(?:(\d+|[a-z])|\(([^()]*)\))", lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    text = unicodedata.normalize("NFKC", text)
    text = _in_digits(_FONT.sub(lambda font: font[1] if _plain(font[1]) else rf"\text{{{font[1]}}}", text))
    text = re.sub(r",?\s*\\text\{(?:and|or)\}\s*|,?\s+(?:and|or)\s+(?=[-\d\\a-z]+(?:\s*=|\.?$))", ", ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", _STYLES.sub("", text).replace(r"\dbinom", r"\binom"))
    text = text.replace(r"\leq", r"\le").replace(r"\geq", r"\ge").replace(r",\!", ",").replace("{,}", ",")
    text = re.sub(r"\\le(?=slant)|\\ge(?=slant)", "", text)
    text = _SPACES.sub(" ", text).strip(" ")
    while (inner := _unwrapped(text.rstrip(" .,;。"))) != text:
        text = inner
    text = re.sub(r"([_^])\{ ?(\w) ?\}", r"\1\2", text.replace(r" \text{", r"\text{"))
    text = re.sub(r" ?, ", ", ", text)
    return re.sub(r" ?([-+=<>()\[\]{}^_/&:]) ?", r"\1", re.sub(r"(?<=[a-zA-Z])\.(?=[a-zA-Z]|$|\})", "", text))


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPED:
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            return text if opening in inner else inner.strip()
    return text[:-1] if re.search(r"[^\w\s!)}]!$", text) else text


def _plain(text: str) -> bool:
    """Whether a font changes nothing of the text: a sign, a number, one with a unit, or a number as a word."""
    return bool(_SHORT.fullmatch(text) or _SPELLED.fullmatch(text))


def _in_digits(text: str) -> str:
    """A text whose number at the beginning is written in digits: English words below 100, hundreds, "minus"."""
    sign = re.match("(?i)-|(?:minus|negative) |", text)
    assert sign is not None
    digits = text[sign.end() :]
    spelled = _SPELLED.match(digits)
    if spelled and spelled[0]:
        hundreds, small = (_BELOW_100[(word or "zero").lower()] for word in spelled.groups())
        digits = f"{100 * hundreds + small}{digits[spelled.end() :]}"
    return ("-" if sign[0] else "") + digits if digits[:1].isdigit() else text


def _fraction(sign: str) -> str | None:
    """A sign such as ½ as a LaTeX fraction; the digits before it make a mixed number."""
    if unicodedata.category(sign) != "No" or "\u2044" not in (parts := unicodedata.normalize("NFKC", sign)):
        return None
    over, _, under = parts.partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}"


def number(text: str) -> Fraction | None:
    """The value of a plain number, also in scientific notation, a fraction or a mixed number of digits; exactly."""
    text = text.strip()
    if mixed := re.fullmatch(r"(-?)(?:(\d+) )?(\d+)/(\d+)|(-?)(\d+)?\\frac\{?(\d+)\}?\{(\d+)\}", text):
        minus, whole, over, under = mixed.groups()[:4] if mixed[4] else mixed.groups()[4:]
        value = (int(whole or 0) + Fraction(int(over), int(under))) if int(under) else None
        return -value if minus and value is not None else value
    if scientific := SCIENTIFIC.fullmatch(text):
        mantissa = number(scientific[1])
        return None if mantissa is None else mantissa * Fraction(10) ** int(scientific[2])
    if not re.search(r"\d", text) or not _PLAIN.fullmatch(text):
        return None
    return Fraction(re.sub("[, ]", "", text))


def _continental(text: str) -> Fraction | None:
    """The value of a number with a decimal comma, or with points or spaces between thousands."""
    if not re.fullmatch(r"[-+]?(?:\d{1,3}(?:[. ]\d{3})+|\d+)(?:,\d+)?", text):
        return None
    return Fraction(re.sub("[. ]", "", text).replace(",", "."))


def measured(answer: str) -> Measured:
    """An answer without its unit and currency, and these."""
    text = normal(answer)
    if _CURRENCY.match(text):
        currency = _CURRENCY.match(text)
        assert currency is not None
        amount = text[currency.end() :]
        return Measured(currency[1] + amount, currency[2])
    if parts := _WITH_UNIT.fullmatch(text):
        value, unit = (parts["number"], parts["unit"]) if parts["unit"] else (parts["formula"], parts["named"])
        if value.strip(" -+") and _UNIT.fullmatch(unit) and not _NO_UNIT.search(unit.replace(r"\text", "")):
            plain = re.sub(r"\\text|[{}\s.]", "", unit)
            return Measured(value.strip(), _SAME_UNITS.get(plain.lower(), plain))
    return Measured(text, "")


def _comparable(expected: str, stated: str) -> bool:
    """Whether two units are the same, or one of them is left out; an amount of money may have its sign."""
    return stated == expected or (not stated and expected != "%") or (not expected and stated == "$")


def _rounded(text: str, other: str, difference: Fraction) -> bool:
    """Whether one of two numbers with unlike decimals may be the other, rounded to its last place."""
    decimals = [len(side.partition(".")[2]) if "." in side or side.isdigit() else 99 for side in (text, other)]
    return decimals[0] != decimals[1] and difference <= Fraction(1, 10 ** min(decimals))


def _words(text: str) -> str | None:
    """A text of words alone, e.g. an option's letter, in lower case; None if it is a formula."""
    plain = _plain_text(text)
    words = len(plain) == 1 or (re.match(r"[^\W\d_]{2}", plain) and (len(plain) > 2 or r"\text{" in text))
    return plain if words and re.fullmatch(r"[^\W\d_][^\W\d_' \-.,]*", plain) else None


def _plain_text(text: str) -> str:
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return " ".join(re.sub(r"^\((\w)\)$", r"\1", plain.strip()).lower().split())


def _of_words(expected: str, stated: str) -> Verdict:
    if expected == stated:
        return Verdict.EQUAL
    return Verdict.DIFFERENT if re.fullmatch(r"[a-z],[a-z]", f"{expected},{stated}") else Verdict.UNCLEAR
