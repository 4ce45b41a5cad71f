"""Answers that are equal, different, or neither surely."""

from __future__ import annotations

import pytest

from megatron_collab.reward.metrics.equality import Verdict, of_texts
from megatron_collab.reward.metrics.formulas import verdict

MATRIX = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
EQUAL = [
    ("1250", "1,250"),
    ("1250", r"\$1,250.00"),
    ("1250", "**1250**."),
    ("0.5", "½"),
    ("3.5", "3½"),
    ("1e-05", "0.00001"),
    ("1e+16", "10000000000000000"),
    ("12", "\uff11\uff12"),
    ("-5", "\u22125"),
    ("3 hours", "3 hours."),
    ("10 a.m.", "10 a.m."),
    ("18", "$18"),
    (r"5\text{ cm}", r"5\,\mathrm{cm}"),
    (r"60^\circ", "60°"),
    ("B", "(B)"),
    (r"\text{(B)}", "B"),
    (r"\text{Friday}", "Friday."),
    ("2:3", "2 : 3"),
    ("2516_8", "2516_{8}"),
    ("2 1/2", "5/2"),
    ("12500", "12 500"),
    ("12500", r"12\,500"),
    ("-5", "negative 5"),
    ("18", "eighteen."),
    ("3 hours", "three hours"),
    ("-42", "minus forty-two"),
    ("240", "two hundred and forty"),
    (r"25\%", "25 percent"),
    (r"60^\circ", "60 degrees"),
    ("18", r"\text{18 dollars}"),
    ("5 km", "$5$ km."),
    (r"40\text{ cm}^2", r"40 \text{cm²}"),
]
EQUAL_FORMULAS = [
    ("1e+22", "$10^{22}$"),
    ("6.02e23", r"6.02 \times 10^{23}"),
    ("300000", "3\u00d710^5"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"9\pi", "9π"),
    ("x^2", "x²"),
    ("y = 2x + 3", "2x - y + 3 = 0"),
    ("y = 2x + 3", "2x + 3"),
    ("x - 2y + 5 = 0", "2x + 10 = 4y"),
    ("2x + 3", "f(x) = 3 + 2x"),
    ("10", "4 + 6 = 10"),
    ("c + 2m", "c + m + 1m"),
    (r"3\sqrt{13}", r"\sqrt{117} \text{ units}"),
    ("3, 5, 7", "3, 5, and 7."),
    ("18", r"$9 \times 2 = 18$ dollars"),
    (MATRIX, r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1, 2", r"\{2, 1\}"),
    ("3, -3", r"x = 3 \text{ or } x = -3"),
    ("[1, 3)", r"1 \le x < 3"),
    ("(2, 3)", "(x, y) = (2, 3)"),
    (r"\frac{1}{2}x", r"1/2 \cdot x"),
    (r"\frac{1}{2} \lt x", r"1/2 \lt x"),  # an operator is no factor
    ("1/2x + 1/2x", "2/2x"),  # in either reading
    (r"\frac{\ln 3}{\ln 2}", r"\frac{\log 3}{\log 2}"),  # of any base
    (r"\log_{10} 100", "2"),
    (r"1-\frac{1}{\mathrm{e}}", r"\frac{e-1}{e}"),
]
DIFFERENT = [
    ("1250", "1251"),
    ("0.0000001", "0.0000002"),
    ("0.001", "0.002"),
    ("3 hours", "4 hours"),
    ("1024", "-1024"),
    ("B", "C"),
    ("5", "negative 5"),
    ("12", "twelve hundred"),
]
DIFFERENT_FORMULAS = [
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    ("5", "5²"),
    ("2", "2π"),
    (MATRIX, r"\begin{pmatrix} 7 \\ 2 \end{pmatrix}"),
    (r"\{1, 2\}", r"\{1, 3\}"),
    ("(1, 2, 3)", "(1, 2, 4)"),
    ("[1, 3)", "[1, 3]"),
    ("x^2 + 1", "x^2 - 1"),
    ("1/2x", "3/2x"),
    (r"\ln 2", r"\log 3"),
]
UNCLEAR = [
    ("5", "at least 5"),
    ("5", "5 million"),
    ("5", "five thousand"),
    ("5", "five or six"),
    ("1", "one third"),
    ("5", "5 minutes"),
    ("3 hours", "3 minutes"),
    ("10 a.m.", "10 p.m."),
    ("25%", "0.25"),
    ("25", "25%"),
    ("18", "18.5"),
    ("\u20ac5", "$5"),
    (r"\text{Friday}", "Monday"),
    ("18", "x" * 501),
    ("1500", "1.500"),  # the separators of other languages
    ("1234567", "1.234.567"),
    ("1.5", "1,5"),
    ("1.5", "1{,}5"),
    ("12500.5", "12.500,50"),
    *(("42", answer) for answer in ("42个苹果", "42แสน", "42ไหม", "ประมาณ42", "42 apples")),
]
UNCLEAR_FORMULAS = [
    ("5", "x^2 + 5"),
    ("5", "5i"),
    ("5", "~5"),
    ("5", "1\u20135"),
    ("5", "5!"),
    ("5", "5 or 6"),
    ("2516_8", "2516_9"),
    ("2:3", "3:2"),
    ("x - 2y + 5 = 0", "3x + y - 7 = 0"),
    ("x - 2y + 5 = 0", "q^7 + 123 = 0"),
    ("x = 5", "y = 5"),
    ("y = 2x + 3", "z = 2x + 3"),
    (MATRIX, "2"),
    ("(1, 2)", r"\{1, 2\}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),  # which math-verify calls equal
    ("7r + t", "7r + T"),
    *(("42", answer) for answer in ("42ล้าน", "42หรือ43", "42 บาท", "42万", "42以上")),
    ("(2, 3)", "(y, x) = (2, 3)"),
    # what is below the slash, or in the exponent, and to which base
    *((r"y = \frac{1}{2}x + 3", f"y = {answer} + 3") for answer in ("1/2x", "1/2 x")),
    *(("y = 1/2x + 3", answer) for answer in (r"\frac{1}{2}x + 3", r"\frac{1}{2x} + 3")),
    *((r"\frac{4}{3}\pi r^3", "4/3 π r^3"), (r"\frac{2}{3}\pi", "2/3 π"), (r"\frac{1}{2}gt^2", "1/2 g t^2")),
    *(
        (r"\sqrt{x}", "x^1/2"),
        ("e^{2x}", "e^2x"),
        (r"\frac{1}{2}\lambda", r"1/2\lambda"),
        (r"\frac{x}{2}|y|", "x/2|y|"),
    ),
    *((r"\ln(2)", r"\log 2"), (r"x\ln x - x + C", r"x\log x - x + C"), (r"\log 100", "2")),
    ("5", r"5 + garbage \foo"),
    ("18", "9^{9^{9^{9}}}"),
]


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        *((*pair, Verdict.EQUAL) for pair in EQUAL),
        *((*pair, Verdict.DIFFERENT) for pair in DIFFERENT),
        *((*pair, Verdict.UNCLEAR) for pair in UNCLEAR),
        *((truth, "5", Verdict.NO_TRUTH) for truth in ("", "Paris", "know it", "several apples")),
        *((unit * 5000, "5", Verdict.NO_TRUTH) for unit in ("9", "1 m^2 ", r"\frac{1}{")),
        *(("5", unit * 5000, Verdict.UNCLEAR) for unit in ("9", "1 m^2 ", r"\frac{1}{")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_texts_are_compared_without_sympy(truth: str, answer: str, expected: Verdict) -> None:
    assert of_texts(truth, answer) is expected


@pytest.mark.processes
def test_formulas_are_compared_as_wholes() -> None:
    """In one test, since the first formula imports sympy."""
    for expected, pairs in (
        (Verdict.EQUAL, EQUAL_FORMULAS),
        (Verdict.DIFFERENT, DIFFERENT_FORMULAS),
        (Verdict.UNCLEAR, UNCLEAR_FORMULAS),
    ):
        for truth, answer in pairs:
            assert (truth, answer, verdict(truth, answer)) == (truth, answer, expected)
