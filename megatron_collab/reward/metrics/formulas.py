"""Whether two formulas are surely equal or surely different.

Two opinions must agree, that of math-verify and an evaluation at random points: math-verify rounds (1e-7 equals 2e-7),
solves equations, and reads a part of what it cannot parse. Whatever this leaves is unclear, e.g. a rounded number or
an equation that is no multiple of the other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from megatron_collab.reward.metrics.equality import SCIENTIFIC, Measured, Verdict, measured, of_texts

_DIGITS = 60  # of an evaluation
_POINTS = 3  # at which formulas with symbols are evaluated
_ROUNDED = 0.01  # relative difference of two values of which one may be the other, rounded
_NAME = r"\\vec\s*\{\w\}|[a-zA-Z](?:_\{?\w+\}?)?'*(?:\([a-zA-Z](?:,\s*[a-zA-Z])*\))?|\([a-zA-Z](?:,\s*[a-zA-Z])+\)"
_NAMED = re.compile(rf"({_NAME})\s*(?:=|\\in(?![a-zA-Z]))\s*([^=]+)")
_EQUALS = re.compile(r"(?<![<>!\\:])=")
# What the parser of math-verify drops or takes for something else: digits with an index, ranges, a list of numbers that
# looks like thousands, times, ratios, words; and towers of powers, which fill the memory.
_UNREAD = re.compile(
    r"\d\s*_|~|^[\d.,]+!$|^\d+(?:[.,]\d+)*-\d+(?:[.,]\d+)*$|(?<=[({\[,])-?\d{1,3},\d{3}(?!\d)|:|'|%"
    r"|\d\s*\^\{\d+\s*\^|\\(?:text|overline|bar|approx|sim|l?dots|mid|circ|hat|tilde|underline|pmod|mod)\b|[\u0080-\uffff]"
)
_FACTOR = (  # the beginning of one: a letter, a bracket, or a command that is no operator
    r"[a-zA-Z(]|\|(?=[a-zA-Z])"
    r"|\\(?!(?:cdot|times|div|le|ge|neq?|lt|gt|pm|mp|cup|cap|setminus|land|lor|wedge|vee|in|to|right|text|end)"
    r"(?![a-zA-Z]))[a-zA-Z]"
)
_TWO_READINGS = (  # notations that the parser reads in one way and many writers mean in another one
    (re.compile(rf"(/(?:\d+(?:\.\d+)?|[a-zA-Z]|\\pi|\([^()]*\))(?:\^\w)?) ?(?={_FACTOR})"), r"\1\\cdot "),  # 1/2x
    (re.compile(r"\^(1/\w+|(?<=e\^)\d+[a-zA-Z])"), r"^{\1}"),  # x^1/2 and e^2x
    (re.compile(r"\\log(?![_a-zA-Z])"), r"\\ln "),
)


def verdict(truth: str, answer: str) -> Verdict:
    """Whether `answer` equals `truth`. The first formula imports sympy, which takes seconds; any may take forever."""
    from math_verify.errors import TimeoutException

    if (decided := of_texts(truth, answer)) is not None:
        return decided
    try:
        return _of_formulas(*map(measured, (truth, answer)))
    except TimeoutException:
        raise
    except Exception:  # sympy raises errors of all types for what it cannot evaluate
        return Verdict.UNCLEAR


def _of_formulas(expected: Measured, stated: Measured) -> Verdict:
    """The verdict of formulas with comparable units."""
    values = _digits(expected.value), _digits(stated.value)
    if any(_UNREAD.search(value) for value in values):
        return Verdict.UNCLEAR
    readings = {values}
    for notation, meant in _TWO_READINGS:
        readings |= {(notation.sub(meant, truth), notation.sub(meant, answer)) for truth, answer in readings}
    verdicts = {_of_values(*reading) for reading in readings}
    result = verdicts.pop() if len(verdicts) == 1 else Verdict.UNCLEAR
    certain = result is Verdict.EQUAL or stated.unit or not expected.unit
    return result if certain else Verdict.UNCLEAR


def _of_values(expected: str, stated: str) -> Verdict:
    """The verdict of formulas without units, as the parser reads them."""
    pair = _aligned(expected, stated)
    if pair is None or _brackets(pair[0]) != _brackets(pair[1]):
        return Verdict.UNCLEAR
    truth, answer = map(_parsed, pair)
    if truth is None or answer is None:
        return Verdict.UNCLEAR
    from math_verify import verify

    equal = any(verify(*sides, timeout_seconds=None) for sides in ((truth, answer), (answer, truth)))
    evaluated = _same(truth, answer)
    if equal and evaluated:
        return Verdict.EQUAL
    return Verdict.DIFFERENT if evaluated is False and not equal else Verdict.UNCLEAR


def _digits(text: str) -> str:
    """A number in scientific notation as a formula: the parser takes its e for the base of logarithms."""
    return re.sub(r"(?<=\d)[eE]\+?(-?)0*(\d+)$", r"\\times 10^{\1\2}", text) if SCIENTIFIC.fullmatch(text) else text


def _aligned(expected: str, stated: str) -> tuple[str, str] | None:
    """Both sides without names of the value, as in y = 2x or f(x) = 2x; None if these names differ.

    Of a calculation such as 4 + 6 = 10 the last side counts, if all sides are equal numbers.
    """
    (name, value), (other_name, other) = _named(expected), _named(stated)
    if name and other_name:
        return (value, other) if name == other_name else None
    letters = re.findall(r"\w+", name + other_name)
    if (name + other_name).startswith("(") and letters != sorted(letters):
        return None  # (y, x) = (2, 3) has another order than (2, 3) may have
    if name and not _EQUALS.search(stated):
        return value, other
    if other_name and not _EQUALS.search(expected):
        return value, other
    if _EQUALS.search(stated) and not _EQUALS.search(expected):
        sides = [_parsed(side) for side in _EQUALS.split(stated)]
        equal = all(side is not None and _same(side, sides[-1]) and not side.free_symbols for side in sides)
        return (expected, _EQUALS.split(stated)[-1]) if equal else None
    return expected, stated


def _named(text: str) -> tuple[str, str]:
    """The name of a value and the value: y and 2x of y = 2x, also the other way round; no name if there is none.

    Several values of one name, as in x = 1, x = 2, are a list.
    """
    members = [_NAMED.fullmatch(member.strip()) for member in text.split(",")]
    if len(members) > 1 and len({member and member[1] for member in members}) == 1 and members[0]:
        return members[0][1], ",".join(member[2] for member in members if member)
    if named := _NAMED.fullmatch(text):
        return re.sub(r"\s", "", named[1]), named[2].strip()
    sides = _EQUALS.split(text)
    if len(sides) == 2 and re.fullmatch(_NAME, sides[1].strip()):
        return re.sub(r"\s", "", sides[1]), sides[0].strip()
    return "", text


def _brackets(text: str) -> str:
    """The kind of brackets around a list of values: none and braces both make a set, an inequality an interval."""
    if re.search(r"[<>]|\\[lg]e(?![a-zA-Z])", text) or r"\cup" in text or r"\cap" in text:
        return "interval"
    if re.search(r"\\begin\{[pbv]?matrix\}", text):
        return "matrix"
    outer = re.fullmatch(r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])|(\\\{).*\\\}", text, re.DOTALL)
    if not outer or outer[3]:
        return ""
    pair = outer[1] + outer[2]
    return "interval" if pair != "()" or r"\infty" in text else "()"


def _parsed(text: str) -> Any:
    """The formula in sympy, with signs and case of letters kept; None unless the parser reads all of it."""
    from antlr4 import CommonTokenStream, InputStream, Token
    from antlr4.error.ErrorStrategy import BailErrorStrategy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.errors import TimeoutException

    try:
        latex = normalize_latex(text, NormalizationConfig(boxed="none", nits=True, malformed_operators=True))
        parser = PSParser(CommonTokenStream(PSLexer(InputStream(latex))))
        parser.removeErrorListeners()
        parser._errHandler = BailErrorStrategy()
        parser.math()
        if parser.getCurrentToken().type != Token.EOF:
            return None
        config = ConversionConfig(lowercase_symbols=False)
        return latex2sympy(latex, is_real=True, normalization_config=None, conversion_config=config)
    except TimeoutException:
        raise
    except Exception:  # the parser and sympy raise errors of all types for what they cannot read
        return None


def _same(truth: Any, answer: Any) -> bool | None:
    """Whether two objects of sympy have the same value, by evaluation; None if they cannot be compared so."""
    import sympy
    from latex2sympy2_extended.logic import And

    truth, answer = map(_as_set, (truth, answer))
    matrices = [side.doit() if isinstance(side, sympy.MatrixExpr) else side for side in (truth, answer)]
    if all(isinstance(side, sympy.MatrixBase) for side in matrices):
        if matrices[0].shape != matrices[1].shape:
            return None if matrices[0].shape == matrices[1].shape[::-1] else False
        return _all(_same(a, b) for a, b in zip(*matrices, strict=True))
    if all(isinstance(side, sympy.Interval) for side in (truth, answer)):
        if (truth.left_open, truth.right_open) != (answer.left_open, answer.right_open):
            return False
        return _all(_same(a, b) for a, b in ((truth.start, answer.start), (truth.end, answer.end)))
    for kind, ordered in ((sympy.Tuple, True), (sympy.FiniteSet, False), (sympy.Union, False), (And, True)):
        if all(isinstance(side, kind) for side in (truth, answer)):
            return _same_members(truth.args, answer.args, ordered)
    if all(isinstance(side, sympy.core.relational.Relational) for side in (truth, answer)):
        return _same_relation(truth, answer)
    if all(isinstance(side, sympy.Expr) for side in (truth, answer)):
        return _same_value(truth, answer)
    return True if truth == answer and not truth.free_symbols else None


def _as_set(side: Any) -> Any:
    """The set that an inequality of one symbol describes."""
    import sympy
    from latex2sympy2_extended.logic import And

    parts = side.args if isinstance(side, And) else [side]
    orders = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)
    if len(side.free_symbols) == 1 and all(isinstance(part, orders) for part in parts):
        return sympy.Intersection(*(part.as_set() for part in parts))
    return side


def _all(results: Any) -> bool | None:
    """False if any is, else None if any is."""
    listed = list(results)
    return False if False in listed else None if None in listed else True


def _same_members(truth: Sequence[Any], answer: Sequence[Any], ordered: bool) -> bool | None:
    if len(truth) != len(answer):
        return False
    if ordered:
        return _all(map(_same, truth, answer))
    unmatched, unclear = list(answer), False
    for member in truth:
        results = [_same(member, candidate) for candidate in unmatched]
        if True not in results:
            unclear = unclear or None in results
            if not unclear:
                return False
            continue
        del unmatched[results.index(True)]
    return None if unclear else True


def _same_relation(truth: Any, answer: Any) -> bool | None:
    """True if one is a multiple of the other; else None, as equations may be equivalent in many other ways."""
    import sympy

    flipped = {sympy.StrictGreaterThan: sympy.StrictLessThan, sympy.GreaterThan: sympy.LessThan}
    kinds = [flipped.get(type(side), type(side)) for side in (truth, answer)]
    differences = [
        (side.lhs - side.rhs) * (-1 if type(side) in flipped else 1)
        for side in (truth, answer)
        if isinstance(side.lhs, sympy.Expr) and isinstance(side.rhs, sympy.Expr)
    ]
    if kinds[0] != kinds[1] or len(differences) < 2 or truth.free_symbols != answer.free_symbols:
        return None
    ratios = [a / b for a, b in _values(differences[0], differences[1]) if b]
    if len(ratios) < _POINTS or any(abs(ratio - ratios[0]) > abs(ratios[0]) * 10.0**-30 for ratio in ratios):
        return None
    either_sign = kinds[0] in (sympy.Eq, sympy.Ne)
    return True if ratios[0] and (either_sign or (ratios[0].is_real and ratios[0] > 0)) else None


def _same_value(truth: Any, answer: Any) -> bool | None:
    """Whether two expressions of the same symbols agree at all points; None if they nearly do, as rounded numbers."""
    import sympy

    if truth.free_symbols != answer.free_symbols:
        return None
    if any(side in (sympy.oo, -sympy.oo) for side in (truth, answer)):
        return bool(truth == answer)
    pairs = list(_values(truth, answer))
    scale = [max(abs(a), abs(b)) for a, b in pairs]
    if any(not size.is_finite for size in scale) or not pairs:
        return None
    if all(abs(a - b) <= size * 10.0**-40 for (a, b), size in zip(pairs, scale, strict=True)):
        return True
    rounded = truth.has(sympy.Float) or answer.has(sympy.Float)
    near = all(
        abs(a - b) <= size * (_ROUNDED if rounded else 10.0**-9) for (a, b), size in zip(pairs, scale, strict=True)
    )
    return None if near else False


def _values(*sides: Any) -> list[list[Any]]:
    """Values of the expressions at random points, to _DIGITS digits; decimals are exact, i is the imaginary unit."""
    import sympy

    draw = random.Random(0)
    symbols = sorted({symbol for side in sides for symbol in side.free_symbols}, key=str)
    sides = tuple(
        side.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in side.atoms(sympy.Float)}) for side in sides
    )
    points = []
    for _ in range(_POINTS if symbols else 1):
        point: dict[Any, Any] = {symbol: sympy.Rational(draw.randint(101, 999), 101) for symbol in symbols}
        point |= {symbol: sympy.I for symbol in symbols if str(symbol) == "i"}
        points.append([sympy.N(side.subs(point) if point else side, _DIGITS) for side in sides])
    return [values for values in points if all(value.is_number for value in values)]
