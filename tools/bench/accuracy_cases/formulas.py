"""Answers as in collections of competition problems, drawn from a grammar, each with changes of it in LaTeX."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from accuracy_cases import Case, Truth, structures, values

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
GRAMMAR = values.GRAMMAR | structures.GRAMMAR


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
