"""Parses 10,000 malformed answers of judges: how many are read, and whether they are read as meant.

`python tools/bench/judge_parse.py` makes answers from truths (a text, a number, a count, a yes or no; seeded, by
hypothesis), writes each in one of the forms in which models get JSON wrong, and parses it. Values:

- crashes: errors other than MalformedAnswer; must be 0.
- wrong_type: values that are not of their field's type or range; must be 0.
- wrong_value: answers that were read as something else than their truth; must be 0. `nonsense` has no truth.
- recovered: share read as their truth, of the forms that contain all of it (neither `truncated` nor `nonsense`);
  by_form: the same by form.

--smoke: 200 answers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_collab.llm.answer import Field, MalformedAnswer, parse

ANSWERS, SMOKE_ANSWERS = 10_000, 200
FIELDS = [Field("thought", str), Field("score", float, 0.0, 1.0), Field("count", int, 0, 9), Field("sure", bool)]
LOST = ("truncated", "nonsense")  # forms without all of the truth
PHRASES = [
    "The user wanted 4 seats, got 5.",
    'the assistant said "yes" twice',
    "it's what they'd asked for",
    "the users' wishes",
    "score: 0.3",
    "use {x} and {y}",
    'as in {"a": [1, 2]}',
    "f'{name}'",
    "```python\nprint('hi')\n```",
    "// no comment",
    "C:\\temp\\new",
    "\\frac{1}{2}",
    "ü, é, 漢, 😀",
    "a\nb",
    "**bold** (see [1])",
    "50 %",
    "null",
    "5",
    "",
]

Truth = dict[str, Any]
Draw = Callable[[Any], Any]

texts = st.one_of(st.lists(st.sampled_from(PHRASES), min_size=1, max_size=3).map(" ".join), st.text(max_size=40))
truths = st.fixed_dictionaries(
    {
        "thought": texts,
        "score": st.floats(0, 1).map(lambda score: round(score, 2)),
        "count": st.integers(0, 9),
        "sure": st.booleans(),
    }
)
prose = st.sampled_from(["Here is my judgment:", "Sure! I looked at {it}.", "Let me know.", "**Answer**\n\n", ""])


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def pairs(truth: Truth, draw: Draw, quote: Callable[[str], str] = dumps, key: str = '"', comma: str = ", ") -> str:
    """An object written by hand: `quote` writes the text, `key` is put around keys."""
    written = {**{name: dumps(value) for name, value in truth.items()}, "thought": quote(truth["thought"])}
    names = draw(st.permutations(list(truth)))
    return "{" + comma.join(f"{key}{name}{key}: {written[name]}" for name in names) + "}"


def nonsense(truth: Truth, draw: Draw) -> str:
    """A good answer with a piece taken out or put in, or no answer at all."""
    text, piece = dumps(truth), draw(st.text(alphabet="{}[]\"'`,:\\ \n0a“”<>", max_size=6))
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 8))
    return draw(st.sampled_from([text[:start] + piece + text[start + length :], piece, truth["thought"]]))


def truncated(truth: Truth, draw: Draw) -> str:
    text = draw(st.sampled_from([dumps, repr]))(truth)
    return text[: draw(st.integers(0, len(text) - 1))]


FORMS: dict[str, Callable[[Truth, Draw], str]] = {
    "fence": lambda truth, draw: f"```{draw(st.sampled_from(['json', 'JSON', '']))}\n{dumps(truth)}\n```",
    "trailing_comma": lambda truth, draw: pairs(truth, draw)[:-1] + draw(st.sampled_from([",}", ",\n}", " , }"])),
    "lacking_comma": lambda truth, draw: pairs(truth, draw, comma="\n"),
    "python": lambda truth, draw: repr(truth),
    "single_quotes": lambda truth, draw: pairs(
        truth, draw, lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'", "'"
    ),
    "single_quotes_bare": lambda truth, draw: pairs(
        truth, draw, lambda text: "'" + text.replace("\\", "\\\\") + "'", "'"
    ),
    "double_quotes_bare": lambda truth, draw: pairs(truth, draw, lambda text: '"' + text.replace("\\", "\\\\") + '"'),
    "triple_quotes": lambda truth, draw: pairs(
        truth, draw, lambda text: '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '"""'
    ),
    "curly_quotes": lambda truth, draw: pairs(truth, draw, lambda text: "“" + text.replace("\\", "\\\\") + "”"),
    "unquoted_keys": lambda truth, draw: pairs(truth, draw, key=""),
    "text_around": lambda truth, draw: f"{draw(prose)} {pairs(truth, draw)} {draw(prose)}",
    "thinking": lambda truth, draw: f"<think>{dumps({**truth, 'score': 0.5})}, no.</think>{pairs(truth, draw)}",
    "doubled_braces": lambda truth, draw: "{" + pairs(truth, draw) + "}",
    "wrapped": lambda truth, draw: dumps({"answer": truth}),
    "json_in_json": lambda truth, draw: dumps(dumps(truth)),
    "unicode_escapes": lambda truth, draw: json.dumps(truth)[:-1] + ",}",
    "raw_newlines": lambda truth, draw: pairs(
        truth, draw, lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    ),
    "numbers_as_text": lambda truth, draw: dumps(
        {name: value if isinstance(value, str | bool) else str(value) for name, value in truth.items()}
    ),
    "comments": lambda truth, draw: pairs(truth, draw, comma=", // as asked\n"),
    "truncated": truncated,
    "nonsense": nonsense,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few answers: shows that it runs, no figures")
    answers = SMOKE_ANSWERS if parser.parse_args().smoke else ANSWERS
    counts: Counter[str] = Counter()
    generated: Counter[str] = Counter()
    read: Counter[str] = Counter()

    @settings(
        max_examples=answers,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(list(FORMS)), truths, st.data())
    def judge(form: str, truth: Truth, data: st.DataObject) -> None:
        text = FORMS[form](truth, data.draw)
        generated[form] += 1
        try:
            parsed = parse(text, FIELDS)
        except MalformedAnswer:
            return
        except Exception as error:
            counts["crashes"] += 1
            print(f"crash: {form}: {text!r}: {error!r}")
            return
        if not is_typed(parsed):
            counts["wrong_type"] += 1
            print(f"wrong type: {form}: {text!r}: {parsed}")
        if parsed == truth:
            read[form] += 1
        elif form != "nonsense":
            counts["wrong_value"] += 1
            print(f"wrong value: {form}: {text!r}: {parsed}")

    judge()
    complete_forms = [form for form in FORMS if form not in LOST and generated[form]]
    by_form = {form: round(read[form] / generated[form], 4) for form in complete_forms}
    recovered = sum(read[form] for form in complete_forms) / sum(generated[form] for form in complete_forms)
    errors = {name: counts[name] for name in ("crashes", "wrong_type", "wrong_value")}
    print(f"{sum(generated.values())} answers; read as their truth:")
    for form, share in by_form.items():
        print(f"  {form:20} {share:.4f} of {generated[form]}")
    values = {**errors, "recovered": round(recovered, 4), "answers": sum(generated.values())}
    print(json.dumps({"name": "judge_parse", "values": values, "by_form": by_form}))


def is_typed(values: Truth) -> bool:
    """Whether every value is of its field's type and range."""
    kinds = [type(values[field.name]) is field.kind for field in FIELDS]
    return all(kinds) and 0 <= values["score"] <= 1 and 0 <= values["count"] <= 9


if __name__ == "__main__":
    main()
