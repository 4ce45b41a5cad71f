"""Answers as in collections of competition problems with several parts: equations, points, matrices, sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from accuracy_cases import Gold, pair, signed_sum, whole


def _line(draw: random.Random) -> Gold:
    (a, b), c = pair(draw), whole(draw)

    def line(a: int, b: int, c: int) -> str:
        return signed_sum((a, "x"), (b, "y"), (c, "")) + " = 0"

    right: tuple[str, ...] = (
        line(2 * a, 2 * b, 2 * c),
        line(-a, -b, -c),
        "0 = " + signed_sum((a, "x"), (b, "y"), (c, "")),
    )
    right += (f"{signed_sum((a, 'x'), (b, 'y'))} = {-c}", f"{signed_sum((a, 'x'))} = {signed_sum((-b, 'y'), (-c, ''))}")
    wrong = (line(b, a, c), line(a, -b, c), line(a, b, -c), line(a + 11, b, c), "q^7+123 = 0", "x = 0", "0", "0 = 0")
    return Gold(line(a, b, c), right, wrong)


def _function(draw: random.Random) -> Gold:
    m, b = pair(draw)
    side = signed_sum((m, "x"), (b, ""))
    right = (
        f"y={side}",
        side + " = y",
        f"{signed_sum((m, 'x'), (-1, 'y'), (b, ''))} = 0",
        f"y = {signed_sum((b, ''), (m, 'x'))}",
    )
    wrong: tuple[str, ...] = (
        f"y = {signed_sum((-m, 'x'), (b, ''))}",
        f"y = {signed_sum((m, 'x'), (-b, ''))}",
        f"q^7+123 = {side}",
        f"2y = {side}",
    )
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
    a = whole(draw)
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
    a, b = pair(draw)
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
    return Gold(f"({a}, {b})", right, wrong, (f"[{a}, {b}]", rf"\{{{a}, {b}\}}", f"(y, x) = ({a}, {b})"))


def _triple(draw: random.Random) -> Gold:
    a, b, c = draw.sample(range(-9, 10), 3)
    wrong = (f"({b}, {a}, {c})", f"({a + 1}, {b}, {c})", f"({a}, {b + 1}, {c})", f"({a}, {b}, {c + 1})", f"({a}, {b})")
    return Gold(f"({a}, {b}, {c})", (f"({a},{b},{c})", rf"\left({a},{b},{c}\right)"), (*wrong, f"{c}"))


def _vector(draw: random.Random) -> Gold:
    a, b = pair(draw)

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
    a, b = pair(draw)
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
    opening, closing = draw.choice("[("), draw.choice("])")
    other = {"[": "(", "(": "[", "]": ")", ")": "]"}
    same = f"{opening}{a}, {b}{closing}"
    less = {"[": r"\le", "(": "<", "]": r"\le", ")": "<"}
    right = (
        same.replace(" ", ""),
        rf"x \in {same}",
        rf"\left{opening}{a},{b}\right{closing}",
        f"{a} {less[opening]} x {less[closing]} {b}",
    )
    wrong: tuple[str, ...] = (
        f"{other[opening]}{a}, {b}{closing}",
        f"{opening}{a}, {b}{other[closing]}",
        f"{opening}{a - 1}, {b}{closing}",
    )
    wrong += (
        f"{opening}{a}, {b + 1}{closing}",
        f"{b}",
        f"{a}, {b}",
        f"{a} {less[other[opening]]} x {less[closing]} {b}",
    )
    return Gold(same, right, wrong)


def _ray(draw: random.Random) -> Gold:
    a = whole(draw)
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

    def union(closing: str, opening: str) -> str:
        return rf"(-\infty, {a}{closing} \cup {opening}{b}, \infty)"

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
    a = whole(draw)
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


GRAMMAR: Mapping[str, Callable[[random.Random], Gold]] = {
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
}
