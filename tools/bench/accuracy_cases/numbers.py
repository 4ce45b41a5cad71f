"""Changes of the number that a worked solution ends in, in the words of a reply."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from accuracy_cases import Case, Truth

FRAMES = (
    "The answer is {a}.",
    "So the result is {a}.",
    "Therefore, she has {a}.",
    "In total, there are {a}.",
    "**Answer: {a}**",
    "#### {a}",
    r"Thus it is \boxed{{{a}}}.",
    "My final answer: {a}",
    "Die Antwort ist {a}.",
    "La respuesta es {a}.",
    "La réponse est {a}.",
    "所以答案是{a}。",
    "答えは{a}です。",
)
OFFERS = (
    "Shall I also work out the case of {n} boxes?",
    "Let me know if you want to see it for {n} people.",
    "Next steps: try it with {n} instead.",
    "You can verify this by computing {n} - 1 + 1.",
    "Check: {n} + 0 = {n}.",
    "Let's double-check: {n} times 1 is {n}.",
    "I can also explain step {n} again.",
    "For comparison, last year it was {n}.",
    "If you had {n} boxes instead, the answer would be {n}.",
    "A good next exercise: page {n}.",
    "Möchtest du es auch mit {n} Kisten sehen?",
    "Zur Probe: {n} - 0 = {n}.",
    "¿Quieres que lo haga también con {n} cajas?",
    "需要我再算一下{n}个的情况吗？",
    "If you have any other questions, feel free to ask!",
    "Please let me know if you'd like a more detailed explanation.",
    "If you have any further questions, let me know.",
    "And let me know if anything is unclear.",
    "If you need more help, just let me know!",
    "Just let me know. Thank you!",
    "Hope this makes sense.",
    "I'm glad I could assist!",
)
CONTINUED = (  # behind a statement of n, which then is no longer the answer
    "Since we can sell each one for $2, we get {m} dollars.",
    "But we can only take a part, which leaves {m}.",
    "You can use each of them twice, so there are {m}.",
    "I can also count the last one, making it {m}.",
    "Next step: apply the discount, giving {m}.",
    "Note that both of them pay, so they pay {m} together.",
    "Remember to include the driver: {m}.",
    "I will solve it again: we obtain {m}.",
    "I would work with {m} instead.",
    "Try this: {m}.",
    "I'd be happy to help you subtract the tax, leaving you with {m}.",
    "Happy to explain why {m} is also possible.",
    "Check: f({n}) = 7, but it should be 9, so the number is {m}.",
    "Let me verify. The sum is {m}.",
    "Adding those to the {n} from yesterday makes {m}.",
    "Of these {n} some are broken, so {m} remain.",
    "Each of the {n} counts for both, {m}.",
    "Man kann das noch verdoppeln, also {m}.",
    "Podemos duplicarlo y tenemos {m}.",
    "我们可以再算一次，得到{m}。",
)
CLOSINGS = (  # replies behind an answer, which stays
    "You're welcome! If you have any other questions, feel free to ask!",
    "You're welcome! Please let me know if you need anything else.",
    "Of course! Glad I could help.",
    "Great! Good luck!",
)
RETRACTED = (  # replies behind an answer
    "You're right, glad you caught it! The tax should be subtracted.",
    "Happy to fix it: subtract the tax from the total.",
    "Good question! You would have to double it, since both of them pay.",
    "I hope this helps: divide my answer by the number of weeks.",
    "No problem, I will leave out the broken ones.",
    "You're welcome! Double it for the way back.",
    "Glad you noticed my error!",
    "Gern geschehen, aber man muss es halbieren.",
    "De nada, pero falta el impuesto.",
)
NO_ANSWERS = (
    "Let us look at page {n} first.",
    "Step {n} is to add the numbers up.",
    "You said {n} at the beginning.",
    "So you said {n}.",
    "Is it {n}?",
    r"Is it \boxed{{{n}}}?",
    "It could be {n}.",
    "If it were {n}, we would be done.",
    "It is not {n}.",
    r"It is not \boxed{{{n}}}.",
    "I first thought the answer is {n}, but that is wrong.",
    "See problem {n} of the book for a similar one.",
    "A common wrong answer is {n}.",
    "Someone might say that the answer is {n}.",
    "What would you do if the answer is {n}?",
    "The answer is {n}. Wait, that is wrong, I have to start again.",
    r"\boxed{{{n}}} No, that is wrong.",
    "Suppose the answer is {n}.",
    "The answer to your other question is {n}.",
    "The answer is unknown; {n} people were asked.",
    "The number of the exercise is {n}.",
    "The answer depends on whether {n} is prime.",
    "The wrong answer is {n}.",
    "The previous answer is {n}.",
    "Let x be {n}.",
    "So far we have {n}.",
    "So the first part is {n}.",
    "Therefore one of the factors is {n}.",
    "The year is {n}.",
    "Ist es {n}?",
    "Die Antwort ist nicht {n}.",
    "Vielleicht ist die Antwort {n}.",
    "¿Es {n}?",
    "La respuesta no es {n}.",
    "~~The answer is {n}.~~",
    r"about: \boxed{{{n}}}",
    r"I reject: \boxed{{{n}}}",
    "是{n}吗？",
    "答案不是{n}。",
    "答案可能是{n}。",
)
COMPARED = (
    *("at least {n}", "at most {n}", "more than {n}", "less than {n}", "fewer than {n}", "over {n}", "under {n}"),
    *("roughly {n}", "about {n}", "approximately {n}", "almost {n}", "nearly {n}", "up to {n}", "around {n}"),
    *("no more than {n}", "greater than {n}", "not {n}", "between {n} and {m}", "{n} or {m}", "{n} to {m}"),
    *("{n} or more", "{n} at most", "{n}-{m}", "{n}–{m}", "> {n}", "≥ {n}", "≈ {n}", "~{n}", "{n} ± 1", "{n}+"),
    *("mindestens {n}", "höchstens {n}", "mehr als {n}", "etwa {n}", "al menos {n}", "más de {n}", "unos {n}"),
    *("至少{n}", "大约{n}", "不到{n}", "au moins {n}", "environ {n}", "either {n} or {m}", "one of {n}"),
    *(
        "probably {n}",
        "maybe {n}",
        "possibly {n}",
        "I guess {n}",
        "unlikely to be {n}",
        "never {n}",
        "divisible by {n}",
    ),
)
ENLARGED = (
    *("{n}^10", "{n}^{{10}}", "{n}π", "{n}i", "{n}x", "{n}!", "{n}²", "{n}½", "{n} million", "{n} thousand", "{n}k"),
    *(
        "{n}e33",
        "{n} dozen",
        "{n} hundred",
        "{n} times 3",
        "{n} + x",
        "{n} x 2",
        "{n} * 7",
        "{n}/7",
        "{n} / 7",
        "{n}:7",
    ),
    *(
        "{n}.5",
        "{n},5",
        "{n}0",
        "{n} percent of 7",
        "x^2 + {n}",
        "√{n}",
        "2{n}",
        "{n}_7",
        "{n} base 7",
        "{n} more than x",
    ),
    *(
        "{n} Millionen",
        "{n} millones",
        "{n}万",
        "{n}亿",
        "{n} mod 7",
        "{n} pairs",
        "{n} squared",
        "{n} and a half",
        "1/{n}",
    ),
    *("the square of {n}", "the square root of {n}", "{n} plus 2", "{n} minus 2", "10 times {n}", "a third of {n}"),
    *(
        "twice {n}",
        "half of {n}",
        "a multiple of {n}",
        "{n}, {m}",
        "{n} and {m}",
        "({n}, {m})",
        "{n} × 10^3",
        "{n}·10³",
    ),
    *(
        "{n} % of it",
        "{n} less {m}",
        "{n} 1/2",
        "$\\frac{{1}}{{{n}}}$",
        "${n}\\pi$",
        "$\\sqrt{{{n}}}$",
        "${n}^2$",
        "{n}\\%",
    ),
)
NEGATED = (
    "-{n}",
    "–{n}",
    "−{n}",
    "negative {n}",
    "minus {n}",
    "- {n}",
    "－{n}",
    "minus  {n}",
    "menos {n}",
    "负{n}",
    "({n})(-1)",
)
SAME = ("{n}", "{n:,}", "{n}.0", "**{n}**", "${n}$", r"\({n}\)", " {n} ", "*{n}*", "`{n}`", r"\mathbf{{{n}}}")
AROUND_A_BOX = (  # which no more holds all of the answer
    *(
        r"at least \boxed{{{n}}}.",
        r"It is $-\boxed{{{n}}}$.",
        r"It is $\boxed{{{n}}}^2$.",
        r"It is \boxed{{{n}}} million.",
    ),
    *(r"$x^2 + \boxed{{{n}}}$", r"$2\cdot\boxed{{{n}}}$", r"$\boxed{{{n}}}\pi$", r"$\frac{{1}}{{\boxed{{{n}}}}}$"),
    *(
        r"It is negative \boxed{{{n}}}.",
        r"\boxed{{{n}}} or \boxed{{{m}}}",
        r"$\sqrt{{\boxed{{{n}}}}}$",
        r"$x > \boxed{{{n}}}$",
    ),
    *(
        r"$x \ne \boxed{{{n}}}$",
        r"$\boxed{{{n}}}!$",
        r"more than \boxed{{{n}}}",
        r"$\boxed{{{n}}}x$",
        r"$x = \boxed{{{n}}} + y$",
    ),
    *(r"$x \approx \boxed{{{n}}}$", r"$10^{{\boxed{{{n}}}}}$", r"mindestens \boxed{{{n}}}", r"至少 \boxed{{{n}}}"),
)
HEDGED_SUBJECTS = (  # and a plain statement
    "Therefore, the number of possible values of x is {a}.",
    "The number that stands on the top, not on the bottom, is {a}.",
    "Thus the probability that it may rain, times 100, is {a}.",
    "If she works every day, the total is {a}.",
    "Since he did not eat any, the answer is {a}.",
    "The guests who might come, and those who never do, together are {a}.",
    "Hence the maximum possible area is {a}.",
)
UNITS = (
    *(("{n} hours", "{n} minutes"), ("{n} a.m.", "{n} p.m."), ("{n} cm", "{n} m"), ("{n} kg", "{n} g")),
    *(("{n} days", "{n} weeks"), ("{n} km", "{n} miles"), ("{n} dollars", "{n} cents"), ("{n} feet", "{n} inches")),
    *(("{n} m/s", "{n} km/h"), ("{n} degrees", "{n} radians"), ("{n} m^2", "{n} m^3"), ("{n} liters", "{n} ml")),
    *(("${n}", "€{n}"), ("{n} apples", "{n} pears"), (r"{n}\text{{ cm}}", r"{n}\text{{ m}}"), ("{n}%", "{n}‰")),
    *((r"{n}^\circ", r"{n}\text{{ rad}}"), ("{n} square meters", "{n} meters"), ("{n} per day", "{n} per week")),
)
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
ONES += ["seventeen", "eighteen", "nineteen"]
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

Numbers = Mapping[str, int]  # n: the right number, m: a wrong one


def in_words(number: int) -> str:
    """A number from 0 to 999 in English."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return f"{ONES[number // 100]} hundred" + (f" and {in_words(number % 100)}" if number % 100 else "")


def cases(solutions: Sequence[tuple[str, int]], size: int, draw: random.Random) -> list[Case]:
    """`size` cases of solutions with their numbers, all kinds equally often.

    Half of the replies that state something begin with the work. Of numbers below 10 some changes change nothing
    (1² = 1), so they are not used.
    """
    kinds = [*CHANGES]
    pool = [(work, number) for work, number in solutions if number >= 10]
    return [_case(kinds[count % len(kinds)], *draw.choice(pool), draw) for count in range(size)]


def _case(kind: str, solution: str, number: int, draw: random.Random) -> Case:
    other = draw.choice([number + 1, number - 1, number + 10, 2 * number])
    answer, replies, truth = CHANGES[kind](draw, {"n": number, "m": other})
    work = draw.choice(("", f"{solution}\n\n")) if kind not in ("around a box", "no answer") else ""
    return Case(kind, answer, (work + replies[0], *replies[1:]), truth)


def _framed(draw: random.Random, text: str) -> str:
    return draw.choice(FRAMES).format(a=text)


def _of(texts: Sequence[str], truth: Truth) -> Callable[[random.Random, Numbers], tuple[str, tuple[str, ...], Truth]]:
    """The change that puts one of the texts in place of the number."""
    return lambda draw, n: (str(n["n"]), (_framed(draw, draw.choice(texts).format(**n)),), truth)


def _whole(
    texts: Sequence[str], truth: Truth
) -> Callable[[random.Random, Numbers], tuple[str, tuple[str, ...], Truth]]:
    """The change that makes one of the texts the reply."""
    return lambda draw, n: (str(n["n"]), (draw.choice(texts).format(**n, a=n["n"]),), truth)


def _words(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    name = draw.choice("nm")
    text = in_words(n[name]) if n[name] < 1000 else str(n[name])
    return str(n["n"]), (_framed(draw, text),), "right" if name == "n" else "wrong"


def _offer(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    stated, offered = draw.choice(("nm", "mn"))
    reply = f"{_framed(draw, str(n[stated]))}\n\n{draw.choice(OFFERS).format(n=n[offered])}"
    return str(n["n"]), (reply,), "right" if stated == "n" else "wrong"


def _chat(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    stated, other = draw.choice(("nm", "mn"))
    ends = ("You're welcome!", f"Glad to help! See you on page {n[other]}.", f"Sorry, it is {n[stated]}.", *CLOSINGS)
    end = draw.choice(ends)
    return str(n["n"]), (_framed(draw, str(n[stated])), end), "right" if stated == "n" else "wrong"


def _continued(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    first, last = draw.choice(("nm", "mn"))
    reply = f"{_framed(draw, str(n[first]))}\n{draw.choice(CONTINUED).format(n=n[first], m=n[last])}"
    return str(n["n"]), (reply,), "right" if last == "n" else "wrong"


def _retracted(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    return str(n["n"]), (_framed(draw, str(n["n"])), draw.choice(RETRACTED)), "wrong"


def _unit(draw: random.Random, n: Numbers) -> tuple[str, tuple[str, ...], Truth]:
    unit, other = (text.format(**n) for text in draw.choice(UNITS))
    reply = draw.choice((unit, other, unit.replace(str(n["n"]), str(n["m"]))))
    return unit, (_framed(draw, reply),), "right" if reply == unit else "wrong"


CHANGES: Mapping[str, Callable[[random.Random, Numbers], tuple[str, tuple[str, ...], Truth]]] = {
    "same": _of(SAME, "right"),
    "other number": _of([text.replace("{n", "{m") for text in SAME], "wrong"),
    "words": _words,
    "compared": _of(COMPARED, "open"),
    "enlarged": _of(ENLARGED, "wrong"),
    "negated": _of(NEGATED, "wrong"),
    "around a box": _whole(AROUND_A_BOX, "open"),
    "hedged subject": _whole(HEDGED_SUBJECTS, "right"),
    "no answer": _whole(NO_ANSWERS, "wrong"),
    "offer": _offer,
    "chat": _chat,
    "continued": _continued,
    "retracted": _retracted,
    "unit": _unit,
}
