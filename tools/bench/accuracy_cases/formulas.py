"""Answers as in collections of competition problems, drawn from a grammar, each with changes of it in LaTeX."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from accuracy_cases import Case, Truth

FRAMES = (
    r"Therefore \boxed{{{a}}}.",
    r"We simplify and get $\boxed{{{a}}}$.",
    "Adding up:\n\n\\[\n\\boxed{{{a}}}\n\\]",
    "The answer is ${a}$.",
    "After 3 steps, the final answer is \\({a}\\).",
    "**Final Answer**\n\n$${a}$$",
    "We use 2 lemmas and 1 theorem.\n#### {a}",
    r"Die Antwort ist $\boxed{{{a}}}$.",
    r"La respuesta es ${a}$.",
    r"所以答案是 $\boxed{{{a}}}$。",
)


class Gold(NamedTuple):
    """An answer and changes of it."""

    answer: str
    right: Sequence[str]
    wrong: Sequence[str]
    open: Sequence[str] = ()


def cases(size: int, draw: random.Random) -> list[Case]:
    """`size` cases, all kinds of answers equally often, half of them right."""
    kinds = [*GRAMMAR]
    return [_case(kinds[count % len(kinds)], draw) for count in range(size)]


def _case(kind: str, draw: random.Random) -> Case:
    gold = GRAMMAR[kind](draw)
    changes: Mapping[Truth, Sequence[str]] = {
        "right": (gold.answer, *gold.right),
        "wrong": gold.wrong,
        "open": gold.open or gold.wrong,
    }
    truth = draw.choices(("right", "wrong", "open"), (5, 4, 1))[0]
    text = draw.choice(changes[truth])
    truth = "wrong" if truth == "open" and not gold.open else truth
    return Case(kind, gold.answer, (draw.choice(FRAMES).format(a=text),), truth)


def _whole(draw: random.Random) -> int:
    return draw.choice([number for number in range(-9, 10) if abs(number) > 1])


def _pair(draw: random.Random) -> tuple[int, int]:
    """Two numbers whose size differs."""
    a, b = draw.sample(range(2, 12), 2)
    return a * draw.choice((1, -1)), b * draw.choice((1, -1))


def _sum(*terms: tuple[int, str]) -> str:
    """A sum of terms with coefficients other than 0."""
    text = "".join(f"{'+' if k > 0 else '-'}{'' if abs(k) == 1 and name else abs(k)}{name}" for k, name in terms)
    return text.removeprefix("+")


def _fraction(draw: random.Random) -> Gold:
    p, q = draw.choice([(p, q) for p in range(1, 12) for q in range(2, 12) if math.gcd(p, q) == 1 and p != q])
    right = (rf"\dfrac{{{p}}}{{{q}}}", rf"{p}/{q}", rf"\frac{{{2 * p}}}{{{2 * q}}}", rf"x = \frac{{{p}}}{{{q}}}")
    wrong = (rf"\frac{{{q}}}{{{p}}}", rf"\frac{{{p + q}}}{{{q}}}", rf"-\frac{{{p}}}{{{q}}}", rf"\frac{{{p}}}{{{q}}}\pi")
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
    b, c = _pair(draw)
    same = _sum((1, "x^2"), (b, "x"), (c, ""))
    right = (_sum((c, ""), (b, "x"), (1, "x^2")), f"f(x) = {same}", f"y = {same}", same.replace("+", " + "))
    wrong = (_sum((1, "x^2"), (-b, "x"), (c, "")), _sum((1, "x^2"), (b, "x"), (-c, "")), _sum((1, "x^2"), (b, "x")))
    wrong += (_sum((2, "x^2"), (b, "x"), (c, "")), _sum((1, "x^3"), (b, "x"), (c, "")), str(c), f"({same})^2")
    return Gold(same, right, (*wrong, same.replace("x", "y") + "+x"))


def _factors(draw: random.Random) -> Gold:
    a, b = _pair(draw)
    factor = [f"({_sum((1, 'x'), (k, ''))})" for k in (a, b, -a, -b)]
    wrong = (factor[2] + factor[1], factor[0] + factor[3], factor[0], factor[0] * 2, factor[0] + "+" + factor[1])
    return Gold(factor[0] + factor[1], (factor[1] + factor[0], rf"{factor[0]}\cdot {factor[1]}"), wrong)


def _line(draw: random.Random) -> Gold:
    (a, b), c = _pair(draw), _whole(draw)

    def line(a: int, b: int, c: int) -> str:
        return _sum((a, "x"), (b, "y"), (c, "")) + " = 0"

    right = (line(2 * a, 2 * b, 2 * c), line(-a, -b, -c), "0 = " + _sum((a, "x"), (b, "y"), (c, "")))
    right += (f"{_sum((a, 'x'), (b, 'y'))} = {-c}", f"{_sum((a, 'x'))} = {_sum((-b, 'y'), (-c, ''))}")
    wrong = (line(b, a, c), line(a, -b, c), line(a, b, -c), line(a + 11, b, c), "q^7+123 = 0", "x = 0", "0", "0 = 0")
    return Gold(line(a, b, c), right, wrong)


def _function(draw: random.Random) -> Gold:
    m, b = _pair(draw)
    side = _sum((m, "x"), (b, ""))
    right = (f"y={side}", side + " = y", f"{_sum((m, 'x'), (-1, 'y'), (b, ''))} = 0", f"y = {_sum((b, ''), (m, 'x'))}")
    wrong = (f"y = {_sum((-m, 'x'), (b, ''))}", f"y = {_sum((m, 'x'), (-b, ''))}", f"q^7+123 = {side}", f"2y = {side}")
    wrong += (f"y^2 = {side}", f"x = {side.replace('x', 'y')}", f"y > {side}", rf"y \le {side}", f"y = {b}")
    return Gold(f"y = {side}", right, wrong, (f"z = {side}",))


def _ellipse(draw: random.Random) -> Gold:
    a, b = draw.sample(range(2, 10), 2)

    def ellipse(a: int, b: int, sign: str = "+", value: int = 1) -> str:
        return rf"\frac{{x^2}}{{{a * a}}}{sign}\frac{{y^2}}{{{b * b}}} = {value}"

    right = (ellipse(a, b).replace(" ", ""), f"{b * b}x^2 + {a * a}y^2 = {a * a * b * b}", rf"1 = {ellipse(a, b)[:-4]}")
    wrong = (ellipse(b, a), ellipse(a, b, "-"), ellipse(a, b, value=2), ellipse(a + 1, b), "q^7+123 = 1", "1", "x = 1")
    return Gold(ellipse(a, b), right, wrong)


def _circle(draw: random.Random) -> Gold:
    a, b = draw.sample(range(1, 10), 2)
    r = draw.randint(2, 9)
    same = f"(x-{a})^2 + (y-{b})^2 = {r * r}"
    right = (
        f"(y-{b})^2+(x-{a})^2={r * r}",
        rf"({a}-x)^2 + (y-{b})^2 = {r * r}",
        f"{r * r} = {same.partition(' =')[0]}",
    )
    wrong = (
        f"(x+{a})^2 + (y-{b})^2 = {r * r}",
        f"(x-{a})^2 + (y-{b})^2 = {r}",
        f"(x-{b})^2 + (y-{a})^2 = {r * r}",
        f"{r * r}",
    )
    return Gold(same, right, (*wrong, f"(x-{a})^2 - (y-{b})^2 = {r * r}", f"x^2+y^2 = {r * r}", f"y = {r * r}"))


def _assigned(draw: random.Random) -> Gold:
    a = _whole(draw)
    wrong = (
        f"x = {a + 1}",
        f"x = {-a}",
        f"x > {a}",
        f"2x = {a}",
        f"x^2 = {a}",
        rf"x \neq {a}",
        f"x + {a}",
        rf"x \ge {a}",
    )
    return Gold(f"x = {a}", (f"{a}", f"x={a}", f"{a} = x"), (*wrong, f"x = {a}y", f"x={a}, x={a + 1}"), (f"y = {a}",))


def _point(draw: random.Random) -> Gold:
    a, b = _pair(draw)
    wrong = (
        f"({b}, {a})",
        f"({a + 1}, {b})",
        f"({a}, {b + 1})",
        f"{b}",
        f"({-a}, {b})",
        f"({a}, {b}, 0)",
        f"({a})",
        f"{a}",
    )
    right = (f"({a},{b})", rf"\left({a}, {b}\right)", rf"( {a} , {b} )", rf"(x, y) = ({a}, {b})")
    return Gold(f"({a}, {b})", right, wrong, (f"[{a}, {b}]", rf"\{{{a}, {b}\}}"))


def _triple(draw: random.Random) -> Gold:
    a, b, c = draw.sample(range(-9, 10), 3)
    wrong = (f"({b}, {a}, {c})", f"({a + 1}, {b}, {c})", f"({a}, {b + 1}, {c})", f"({a}, {b}, {c + 1})", f"({a}, {b})")
    return Gold(f"({a}, {b}, {c})", (f"({a},{b},{c})", rf"\left({a},{b},{c}\right)"), (*wrong, f"{c}"))


def _vector(draw: random.Random) -> Gold:
    a, b = _pair(draw)

    def vector(*entries: object, kind: str = "pmatrix", between: str = r" \\ ") -> str:
        return rf"\begin{{{kind}}} {between.join(map(str, entries))} \end{{{kind}}}"

    right = (vector(a, b).replace(" ", ""), vector(a, b, kind="bmatrix"), rf"\vec{{v}} = {vector(a, b)}")
    wrong = (
        vector(b, a),
        vector(a + 1, b),
        vector(a, b + 1),
        vector(-a, b),
        vector(b),
        f"{b}",
        f"{a}",
        vector(a, b, 0),
    )
    return Gold(vector(a, b), right, (*wrong, rf"2{vector(a, b)}", vector(rf"\frac{{{a}}}{{7}}", b)))


def _matrix(draw: random.Random) -> Gold:
    entries = draw.sample(range(-9, 10), 4)

    def matrix(a: int, b: int, c: int, d: int) -> str:
        return rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}"

    a, b, c, d = entries
    changed = [matrix(*(k + (place == spot) for spot, k in enumerate(entries))) for place in range(4)]
    right = (
        matrix(a, b, c, d).replace(" ", ""),
        matrix(a, b, c, d).replace("pmatrix", "bmatrix"),
        f"A = {matrix(a, b, c, d)}",
    )
    return Gold(
        matrix(a, b, c, d), right, (*changed, matrix(a, c, b, d), f"{d}", matrix(-a, b, c, d) if a else f"{a}{b}")
    )


def _set(draw: random.Random) -> Gold:
    a, b, c = draw.sample(range(-12, 13), 3)
    wrong = (
        rf"\{{{a}, {b}\}}",
        rf"\{{{a + 30}, {b}, {c}\}}",
        rf"\{{{a}, {b + 30}, {c}\}}",
        rf"\{{{a}, {b}, {c + 30}\}}",
    )
    right = (rf"\{{{c}, {a}, {b}\}}", rf"\left\{{{b},{a},{c}\right\}}", f"{a}, {b}, {c}")
    return Gold(rf"\{{{a}, {b}, {c}\}}", right, (*wrong, rf"\{{{a}, {b}, {c}, 77\}}", f"{c}", rf"\{{{a}\}}"))


def _roots(draw: random.Random) -> Gold:
    a, b = _pair(draw)
    right = (
        f"{b}, {a}",
        rf"{a} \text{{ and }} {b}",
        f"x = {a}, x = {b}",
        rf"x = {b} \text{{ or }} x = {a}",
        rf"\{{{a}, {b}\}}",
    )
    return Gold(
        f"{a}, {b}",
        right,
        (f"{a}", f"{b}", f"{a}, {b + 30}", f"{a + 30}, {b}", f"{-a}, {b}", f"{a}, {b}, 77", f"x = {b}"),
    )


def _interval(draw: random.Random) -> Gold:
    a, b = sorted(draw.sample(range(-9, 10), 2))
    left, right_end = draw.choice("[("), draw.choice("])")
    other = {"[": "(", "(": "[", "]": ")", ")": "]"}
    same = f"{left}{a}, {b}{right_end}"
    less = {"[": r"\le", "(": "<", "]": r"\le", ")": "<"}
    right = (
        same.replace(" ", ""),
        rf"x \in {same}",
        rf"\left{left}{a},{b}\right{right_end}",
        f"{a} {less[left]} x {less[right_end]} {b}",
    )
    wrong = (f"{other[left]}{a}, {b}{right_end}", f"{left}{a}, {b}{other[right_end]}", f"{left}{a - 1}, {b}{right_end}")
    wrong += (f"{left}{a}, {b + 1}{right_end}", f"{b}", f"{a}, {b}", f"{a} {less[other[left]]} x {less[right_end]} {b}")
    return Gold(same, right, wrong)


def _ray(draw: random.Random) -> Gold:
    a = _whole(draw)
    right = (rf"(-\infty,{a})", rf"\left(-\infty, {a}\right)", f"x < {a}", rf"x \in (-\infty, {a})")
    wrong = (
        rf"(-\infty, {a}]",
        rf"({a}, \infty)",
        rf"(\infty, {a})",
        f"{a}",
        f"x > {a}",
        rf"x \le {a}",
        rf"(-\infty, {a + 1})",
    )
    return Gold(rf"(-\infty, {a})", right, wrong)


def _union(draw: random.Random) -> Gold:
    a, b = sorted(draw.sample(range(-9, 10), 2))

    def union(left: str, right: str) -> str:
        return rf"(-\infty, {a}{left} \cup {right}{b}, \infty)"

    wrong = (
        union("]", "("),
        union(")", "["),
        rf"(-\infty, {a})",
        rf"({b}, \infty)",
        rf"({a}, {b})",
        union(")", "(").replace("cup", "cap"),
    )
    right = (rf"({b}, \infty) \cup (-\infty, {a})", union(")", "(").replace(" ", "").replace("cup", "cup "))
    return Gold(union(")", "("), right, (*wrong, rf"(-\infty, {a - 1}) \cup ({b}, \infty)"))


def _inequality(draw: random.Random) -> Gold:
    a = _whole(draw)
    wrong = (
        f"x < {a}",
        rf"x \ge {a}",
        rf"x \le {a + 1}",
        f"x = {a}",
        f"{a}",
        rf"x \le {-a}",
        rf"y^2 \le {a}",
        f"x > {a}",
    )
    return Gold(rf"x \le {a}", (rf"x \leq {a}", rf"{a} \ge x", rf"x\le {a}", rf"(-\infty, {a}]"), wrong)


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
    a, b = _pair(draw)
    same = _sum((a, ""), (b, "i"))
    wrong = (
        _sum((a, ""), (-b, "i")),
        _sum((-a, ""), (b, "i")),
        _sum((a, ""), (b, "")),
        _sum((b, ""), (a, "i")),
        f"{a}",
        f"{b}i",
    )
    return Gold(same, (_sum((b, "i"), (a, "")), f"z = {same}", same.replace("i", " i")), (*wrong, f"|{same}|"))


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
    "line": _line,
    "function": _function,
    "ellipse": _ellipse,
    "circle": _circle,
    "assigned": _assigned,
    "point": _point,
    "triple": _triple,
    "vector": _vector,
    "matrix": _matrix,
    "set": _set,
    "roots": _roots,
    "interval": _interval,
    "ray": _ray,
    "union": _union,
    "inequality": _inequality,
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
    "trigonometric": _trigonometric,
    "symbols": _symbols,
}
