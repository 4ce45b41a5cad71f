"""Answers as in collections of competition problems with one value: numbers, expressions, words, units."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from accuracy_cases import Gold, pair, signed_sum


def _fraction(draw: random.Random) -> Gold:
    p, q = draw.choice([(p, q) for p in range(1, 12) for q in range(2, 12) if math.gcd(p, q) == 1 and p != q])
    right = (rf"\dfrac{{{p}}}{{{q}}}", rf"{p}/{q}", rf"\frac{{{2 * p}}}{{{2 * q}}}", rf"x = \frac{{{p}}}{{{q}}}")
    wrong: tuple[str, ...] = (
        rf"\frac{{{q}}}{{{p}}}",
        rf"\frac{{{p + q}}}{{{q}}}",
        rf"-\frac{{{p}}}{{{q}}}",
        rf"\frac{{{p}}}{{{q}}}\pi",
    )
    wrong += (
        rf"\left(\frac{{{p}}}{{{q}}}\right)^2",
        f"{p}",
        f"{q}",
        rf"\frac{{{p}}}{{{q}}}x",
        rf"\sqrt{{\frac{{{p}}}{{{q}}}}}",
    )
    return Gold(rf"\frac{{{p}}}{{{q}}}", right, wrong)


def _small(draw: random.Random) -> Gold:
    k, zeros = draw.randint(1, 9), draw.randint(2, 9)
    power = rf"{k} \times 10^{{-{zeros + 1}}}"
    wrong = (f"0.{'0' * zeros}{k + 1}", f"0.{'0' * (zeros + 1)}{k}", rf"{k} \times 10^{{{zeros + 1}}}", "0", f"{k}")
    return Gold(f"0.{'0' * zeros}{k}", (power, f"0.{'0' * zeros}{k}0", rf"\frac{{{k}}}{{1{'0' * (zeros + 1)}}}"), wrong)


def _root(draw: random.Random) -> Gold:
    a, b = draw.randint(2, 9), draw.choice((2, 3, 5, 6, 7, 10))
    right = (rf"\sqrt{{{a * a * b}}}", rf"{a}\cdot\sqrt{{{b}}}", rf"{a} \sqrt {b}" if b < 10 else rf"{a}\sqrt{{{b}}}")
    wrong = (rf"\sqrt{{{a * b}}}", rf"{a}\sqrt{{{b + 1}}}", rf"{a}\sqrt[3]{{{b}}}", rf"{a + 1}\sqrt{{{b}}}", f"{a}")
    return Gold(rf"{a}\sqrt{{{b}}}", right, (*wrong, rf"-{a}\sqrt{{{b}}}", rf"{a}+\sqrt{{{b}}}", rf"\sqrt{{{b}}}"))


def _pi(draw: random.Random) -> Gold:
    a = draw.randint(2, 40)
    wrong = (f"{a}", rf"{a + 1}\pi", rf"{a}\pi^2", rf"{a}+\pi", rf"\frac{{{a}}}{{\pi}}", rf"{a}\pi r", rf"-{a}\pi")
    return Gold(rf"{a}\pi", (rf"{a} \pi", rf"{a}\cdot\pi", rf"\pi \cdot {a}", rf"A = {a}\pi", f"{a}π"), wrong)


def _power(draw: random.Random) -> Gold:
    b, k = draw.choice((2, 3, 5)), draw.randint(20, 300)
    wrong = (rf"{b}^{{{k - 1}}}", rf"{b}^{{{k}}}+1", rf"{b + 1}^{{{k}}}", rf"{k}^{{{b}}}", f"{b}{k}", rf"{b}\cdot{k}")
    return Gold(rf"{b}^{{{k}}}", (rf"{b}\cdot {b}^{{{k - 1}}}", rf"{b} ^ {{{k}}}"), wrong)


def _tiny(draw: random.Random) -> Gold:
    b, k = draw.choice((2, 3, 5)), draw.randint(20, 300)
    wrong = (
        rf"\frac{{1}}{{{b}^{{{k - 1}}}}}",
        rf"\frac{{2}}{{{b}^{{{k}}}}}",
        "0",
        rf"{b}^{{{k}}}",
        rf"-\frac{{1}}{{{b}^{{{k}}}}}",
    )
    return Gold(rf"\frac{{1}}{{{b}^{{{k}}}}}", (rf"{b}^{{-{k}}}", rf"\dfrac{{1}}{{{b}^{{{k}}}}}"), wrong)


def _euler(draw: random.Random) -> Gold:
    a = draw.randint(2, 9)
    wrong = (rf"{a}+\frac{{1}}{{e}}", rf"{a}+\frac{{1}}{{\mathrm{{e}}}}", f"{a}", rf"{a}-\frac{{1}}{{e^2}}", rf"{a}-e")
    return Gold(rf"{a}-\frac{{1}}{{\mathrm{{e}}}}", (rf"{a}-\frac{{1}}{{e}}", rf"{a}-e^{{-1}}"), wrong)


def _quadratic(draw: random.Random) -> Gold:
    b, c = pair(draw)
    same = signed_sum((1, "x^2"), (b, "x"), (c, ""))
    right = (signed_sum((c, ""), (b, "x"), (1, "x^2")), f"f(x) = {same}", f"y = {same}", same.replace("+", " + "))
    wrong: tuple[str, ...] = (
        signed_sum((1, "x^2"), (-b, "x"), (c, "")),
        signed_sum((1, "x^2"), (b, "x"), (-c, "")),
        signed_sum((1, "x^2"), (b, "x")),
    )
    wrong += (
        signed_sum((2, "x^2"), (b, "x"), (c, "")),
        signed_sum((1, "x^3"), (b, "x"), (c, "")),
        str(c),
        f"({same})^2",
    )
    return Gold(same, right, (*wrong, same.replace("x", "y") + "+x"))


def _factors(draw: random.Random) -> Gold:
    a, b = pair(draw)
    factor = [f"({signed_sum((1, 'x'), (k, ''))})" for k in (a, b, -a, -b)]
    wrong = (factor[2] + factor[1], factor[0] + factor[3], factor[0], factor[0] * 2, factor[0] + "+" + factor[1])
    return Gold(factor[0] + factor[1], (factor[1] + factor[0], rf"{factor[0]}\cdot {factor[1]}"), wrong)


def _base(draw: random.Random) -> Gold:
    digits = draw.randint(111, 666)
    digits = int("".join(str(min(int(digit), 6)) for digit in str(digits)))
    wrong = (
        f"{digits}_9",
        f"{digits + 1}_8",
        f"{digits}",
        f"{int(str(digits), 8)}_8",
        f"{digits}_{{16}}",
        f"{digits}^8",
        rf"{digits}\cdot 8",
    )
    return Gold(f"{digits}_8", (f"{digits}_{{8}}", rf"{digits}_{{ 8 }}", f"{int(str(digits), 8)}"), wrong)


def _complex(draw: random.Random) -> Gold:
    a, b = pair(draw)
    same = signed_sum((a, ""), (b, "i"))
    wrong = (
        signed_sum((a, ""), (-b, "i")),
        signed_sum((-a, ""), (b, "i")),
        signed_sum((a, ""), (b, "")),
        signed_sum((b, ""), (a, "i")),
        f"{a}",
        f"{b}i",
    )
    return Gold(same, (signed_sum((b, "i"), (a, "")), f"z = {same}", same.replace("i", " i")), (*wrong, f"|{same}|"))


def _mixed(draw: random.Random) -> Gold:
    a, (p, q) = draw.randint(2, 9), draw.choice(((1, 2), (1, 3), (2, 3), (1, 4), (3, 4)))
    wrong = (
        rf"{a}\cdot\frac{{{p}}}{{{q}}}",
        rf"\frac{{{a * p}}}{{{q}}}",
        f"{a}",
        rf"\frac{{{p}}}{{{q}}}",
        rf"{a + 1}\frac{{{p}}}{{{q}}}",
    )
    return Gold(
        rf"{a}\frac{{{p}}}{{{q}}}",
        (rf"\frac{{{a * q + p}}}{{{q}}}", rf"{a}+\frac{{{p}}}{{{q}}}", f"{a * q + p}/{q}"),
        wrong,
    )


def _ratio(draw: random.Random) -> Gold:
    a, b = draw.choice([(2, 3), (3, 5), (4, 7), (5, 9), (1, 6)])
    return Gold(f"{a}:{b}", (f"{a} : {b}",), (f"{b}:{a}", f"{a}:{b + 1}", f"{a}", f"{b}", f"{a}:{b}:1", f"{a}{b}"))


def _clock(draw: random.Random) -> Gold:
    hour, minute = draw.randint(1, 12), draw.randint(13, 59)
    wrong = (
        f"{hour}:{minute - 1}",
        f"{hour % 12 + 1}:{minute}",
        f"{hour}",
        f"{minute}",
        rf"{hour}:{minute}\text{{ p.m.}}",
    )
    return Gold(rf"{hour}:{minute}\text{{ a.m.}}", (rf"{hour}:{minute} \text{{ a.m.}}",), wrong)


def _text(draw: random.Random) -> Gold:
    words = draw.sample(("even", "odd", "Friday", "Monday", "Paris", "Rome", "yes", "no", "red", "blue"), 2)
    right = (words[0], rf"\text{{ {words[0]} }}", rf"\textbf{{{words[0]}}}", rf"\mathrm{{{words[0]}}}")
    return Gold(rf"\text{{{words[0]}}}", right, (rf"\text{{{words[1]}}}", words[1], rf"\text{{not {words[0]}}}", "5"))


def _letter(draw: random.Random) -> Gold:
    a, b = draw.sample("ABCDE", 2)
    return Gold(
        a,
        (rf"\text{{{a}}}", rf"\text{{({a})}}", f"({a})"),
        (b, rf"\text{{({b})}}", f"{a}, {b}", f"{a}{b}", "5", rf"\text{{not }}{a}"),
    )


def _with_unit(draw: random.Random) -> Gold:
    a, (unit, other) = (
        draw.randint(2, 40),
        draw.choice((("cm", "m"), ("hours", "minutes"), ("kg", "g"), ("m/s", "km/h"))),
    )
    right = (rf"{a}\,\text{{{unit}}}", rf"{a} \mathrm{{ {unit}}}", rf"{a}\ \text{{{unit}}}", rf"{a}")
    wrong = (
        rf"{a}\text{{ {other}}}",
        rf"{a + 1}\text{{ {unit}}}",
        rf"-{a}\text{{ {unit}}}",
        rf"{a}\,\mathrm{{{other}}}",
        f"{a + 1}",
    )
    return Gold(
        rf"{a}\text{{ {unit}}}", right, (*wrong, rf"{a}\text{{ {unit}}}^2", rf"\text{{over }}{a}\text{{ {unit}}}")
    )


def _angle(draw: random.Random) -> Gold:
    a = draw.randint(2, 179)
    wrong = (rf"{a + 1}^\circ", rf"{a}\text{{ rad}}", rf"{a}^{{2}}", rf"-{a}^\circ", rf"{a}\pi", rf"{a}'")
    return Gold(rf"{a}^\circ", (rf"{a}^{{\circ}}", rf"{a} ^\circ", f"{a}°", rf"x = {a}^\circ", f"{a}"), wrong)


def _percent(draw: random.Random) -> Gold:
    a = draw.randint(2, 99)
    wrong = (rf"{a + 1}\%", rf"0.{a:02}\%", rf"{a}00\%", rf"-{a}\%", rf"{a}.5\%")
    return Gold(rf"{a}\%", (rf"{a} \%", f"{a}%", rf"{a}\,\%"), wrong, (f"{a}00", rf"{a}\text{{ cm}}"))


def _large(draw: random.Random) -> Gold:
    a, k = draw.randint(2, 9), draw.randint(8, 40)
    wrong = (
        rf"{a} \times 10^{{{k + 1}}}",
        rf"{a}.1 \times 10^{{{k}}}",
        rf"{a}",
        rf"{a} \times 10^{{-{k}}}",
        rf"{a} \times {10 * k}",
    )
    right = (rf"{a} \cdot 10^{{{k}}}", rf"{a}.0 \times 10^{{{k}}}", f"{a}{'0' * k}", rf"{a}0 \times 10^{{{k - 1}}}")
    return Gold(rf"{a} \times 10^{{{k}}}", right, wrong)


def _choose(draw: random.Random) -> Gold:
    n, k = draw.randint(8, 12), draw.randint(2, 3)
    wrong = (
        rf"\binom{{{n}}}{{{k + 1}}}",
        rf"\binom{{{n + 1}}}{{{k}}}",
        f"{n}",
        rf"\frac{{{n}}}{{{k}}}",
        f"{math.comb(n, k) + 1}",
        f"{n}!",
    )
    return Gold(
        rf"\binom{{{n}}}{{{k}}}", (f"{math.comb(n, k)}", rf"\dbinom{{{n}}}{{{k}}}", rf"\binom{{{n}}}{{{n - k}}}"), wrong
    )


def _logarithm(draw: random.Random) -> Gold:
    a, b = draw.choice(((2, 3), (3, 5), (2, 7), (5, 3)))
    wrong = (
        rf"\log_{{{b}}} {a}",
        rf"\log_{{{a}}} {b + 1}",
        rf"\ln {b}",
        f"{b}",
        rf"-\log_{{{a}}} {b}",
        rf"2\log_{{{a}}} {b}",
    )
    return Gold(rf"\log_{{{a}}} {b}", (rf"\log_{a} {b}", rf"\frac{{\ln {b}}}{{\ln {a}}}", rf"\log_{{{a}}}({b})"), wrong)


def _natural(draw: random.Random) -> Gold:
    a, k = draw.randint(2, 30), draw.randint(2, 9)
    right = (rf"\ln({a}) \cdot {k}", rf"{k}\ln({a})")
    wrong = (rf"{k}\ln {a + 1}", rf"{k}\log_2 {a}", rf"-{k}\ln {a}", rf"{k + 1}\ln {a}")
    return Gold(rf"{k}\ln {a}", right, wrong, (rf"{k}\log {a}", rf"{k}\log({a})"))


def _grouping(draw: random.Random) -> Gold:
    p, q = draw.choice([(p, q) for p in range(1, 12) for q in range(2, 12) if math.gcd(p, q) == 1])
    c = draw.randint(1, 9)
    right = (rf"\frac{{{p}x}}{{{q}}} + {c}", rf"{c} + \frac{{{p}}}{{{q}}}x")
    wrong = (rf"\frac{{{p}}}{{{q}x}} + {c}", rf"-\frac{{{p}}}{{{q}}}x + {c}", rf"\frac{{{p}}}{{{q}}}x - {c}")
    return Gold(rf"\frac{{{p}}}{{{q}}}x + {c}", right, wrong, (f"{p}/{q}x + {c}", f"{p}/{q} x + {c}"))


def _trigonometric(draw: random.Random) -> Gold:
    k = draw.randint(2, 9)
    wrong = (
        rf"{k}\cos x",
        rf"\sin {k}x",
        rf"{k}\sin 2x",
        rf"{k + 1}\sin x",
        rf"-{k}\sin x",
        rf"{k}\sin y",
        rf"{k}\sin^2 x",
    )
    return Gold(rf"{k}\sin x", (rf"{k}\sin(x)", rf"{k} \sin x", rf"{k}\cdot\sin x"), wrong)


def _symbols(draw: random.Random) -> Gold:
    a, b = draw.sample("abcmnpqrt", 2)
    k = draw.randint(2, 9)
    wrong = (
        f"{k}{a} - {b}",
        f"{k}{b} + {a}",
        f"{k}{a}{b}",
        f"{k}{a} + z",
        f"{k}{a}",
        f"{k + 1}{a} + {b}",
        f"{k}{a}^2 + {b}",
        f"{k}{a.upper()} + {b}",
    )
    return Gold(f"{k}{a} + {b}", (f"{b} + {k}{a}", f"{k}{a}+{b}", f"{a}+{b}+{k - 1}{a}"), wrong)


GRAMMAR: Mapping[str, Callable[[random.Random], Gold]] = {
    "fraction": _fraction,
    "small": _small,
    "root": _root,
    "pi": _pi,
    "power": _power,
    "tiny": _tiny,
    "euler": _euler,
    "quadratic": _quadratic,
    "factors": _factors,
    "base": _base,
    "complex": _complex,
    "mixed": _mixed,
    "ratio": _ratio,
    "clock": _clock,
    "text": _text,
    "letter": _letter,
    "unit": _with_unit,
    "angle": _angle,
    "percent": _percent,
    "large": _large,
    "choose": _choose,
    "logarithm": _logarithm,
    "natural logarithm": _natural,
    "grouping": _grouping,
    "trigonometric": _trigonometric,
    "symbols": _symbols,
}
