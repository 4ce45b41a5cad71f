from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.llm.answer import Field, MalformedAnswer, json_schema, parse

BOTH = [Field("thought", str), Field("score", float, 0.0, 1.0)]


def parse_value(kind: type, value: Any, **limits: Any) -> Any:
    """What a field of this type gets from an answer with this value."""
    return parse(json.dumps({"x": value}), [Field("x", kind, **limits)])["x"]


READ = {
    "plain": '{"thought": "ok", "score": 0.5}',
    "spaces": ' \n{ "thought" : "ok" ,\n "score" : 5e-1 } ',
    "other fields too": '{"id": [1, {"score": 9}], "thought": "ok", "score": 0.5}',
    "fence": '```json\n{"thought": "ok", "score": 0.5}\n```',
    "text around": 'Sure {as asked}! Here:\n{"thought": "ok", "score": 0.5}\nHope that helps :}',
    "thinking": '<think>{"thought": "draft", "score": 0}</think>\n{"thought": "ok", "score": 0.5}',
    "end of thinking": 'say {"thought": "draft", "score": 0}\n</think>\n{"thought": "ok", "score": 0.5}',
    "trailing comma": '{"thought": "ok", "score": 0.5,\n}',
    "lacking comma": '{"thought": "ok"\n"score": 0.5}',
    "number as text": '{"thought": "ok", "score": " 0.5 "}',
    "number without zero": '{"thought": "ok", "score": .5}',
    "number with sign": '{"thought": "ok", "score": +0.5}',
    "single quotes": "{'thought': 'ok', 'score': 0.5}",
    "no quotes around keys": '{thought: "ok", score: 0.5}',
    "curly quotes": "{“thought”: “ok”, “score”: 0.5}",
    "backticks": "{`thought`: `ok`, `score`: 0.5}",
    "triple quotes": '{"thought": """ok""", "score": 0.5}',
    "comments": '{"thought": "ok", // fine\n "score": 0.5 /* half */}',
    "python constants": "{'thought': 'ok', 'score': 0.5, 'sure': True, 'note': None}",
    "doubled braces": '{{"thought": "ok", "score": 0.5}}',
    "wrapped": '{"answer": {"thought": "ok", "score": 0.5}}',
    "list": '[{"thought": "ok", "score": 0.5}]',
    "said twice": '{"thought": "ok", "score": 0.5}\n{"score": 0.5, "thought": "ok"}',
    "another object before": 'For {"goal": "x"}: {"thought": "ok", "score": 0.5}',
    "json in json": json.dumps(json.dumps({"thought": "ok", "score": 0.5})),
    "json in json without quotes": '{\\"thought\\": \\"ok\\", \\"score\\": 0.5}',
}


@pytest.mark.parametrize("text", READ.values(), ids=READ.keys())
def test_what_models_write_is_read(text: str) -> None:
    assert parse(text, BOTH) == {"thought": "ok", "score": 0.5}


TEXTS = [
    ('{"thought": "line\nbreak", "score": 0}', "line\nbreak"),
    (r'{"thought": "a \"b\" c", "score": 0,}', 'a "b" c'),
    ('{"thought": "a "b" c", "score": 0}', 'a "b" c'),
    ("{'thought': 'it's a \"b\" c', 'score': 0}", 'it\'s a "b" c'),
    (r"{'thought': 'it\'s \xe4 \u00fc', 'score': 0}", "it's ä ü"),
    ('{"thought": "{x} and }{ and [", "score": 0,}', "{x} and }{ and ["),
    (r'{"thought": "\d+ \sum \\frac", "score": 0}', r"\d+ \sum \frac"),
    (r'{"thought": "\u00fc\ud83d\ude00", "score": 0,}', "ü😀"),
    ('{"thought": """say "hi"""", "score": 0}', 'say "hi"'),
    ('{"thought": "", "score": 0,}', ""),
    ('{"thought": "5", "score": 0}', "5"),
    ("{'thought': '5', 'score': 0}", "5"),
    ('{"thought": "null", "score": 0}', "null"),
    ('{"thought": "so: {\\"score\\": 1}", "score": 0,}', 'so: {"score": 1}'),
    ('{"thought": "</think> is a mark", "score": 0}', "</think> is a mark"),
]


@pytest.mark.parametrize(("text", "thought"), TEXTS)
def test_a_text_is_what_was_written(text: str, thought: str) -> None:
    assert parse(text, BOTH) == {"thought": thought, "score": 0.0}


REFUSED = {
    "": "no JSON object",
    "0.5": "no JSON object",
    "score: 0.5": "no JSON object",
    '["ok", 0.5]': "no JSON object",
    '{"thought": "ok"}': "the field 'score' is missing",
    '{"thought": "ok", "score": null}': "'score' has to be a number, but is null",
    '{"thought": "ok", "score": true}': "'score' has to be a number, but is true",
    '{"thought": "ok", "score": [0.5]}': r"'score' has to be a number, but is \[0.5\]",
    '{"thought": "ok", "score": "high"}': "'score' has to be a number, but is \"high\"",
    '{"thought": "ok", "score": "0,5"}': "has to be a number",
    '{"thought": "ok", "score": NaN}': "has to be a number, but is NaN",
    '{"thought": "ok", "score": -Infinity}': "has to be a number",
    '{"thought": "ok", "score": 1e999}': "has to be a number",
    f'{{"thought": "ok", "score": {"9" * 5000}}}': "has to be a number",
    '{"thought": "ok", "score": 1.01}': "the field 'score' is 1.01, above 1",
    '{"thought": "ok", "score": "-1"}': "the field 'score' is \"-1\", below 0",
    '{"thought": 5, "score": 1}': "the field 'thought' has to be a string, but is 5",
    '{"thought": {"a": 1}, "score": 1}': "has to be a string",
    '{"thought": "\\ud83d", "score": 1}': "has to be a string",
    '{"thought": "ok", "score": 0.8': "the value of 'score' is cut off",
    '{"thought": "ok", "score": ': "the value of 'score' is cut off",
    '{"thought": "ok", "sco': "the text of 'thought' is cut off",
    '{"thought": "ok", 3': "the text of 'thought' is cut off",
    '{"score": 0.5, "thought": "ok", ]}': "the text of 'thought' is cut off",
    "{'score': 0.5, ]}": "the value of 'score' is cut off",
    "{'score': 0.5, 'a' 'b': 1}": "the value of 'score' is cut off",
    '{"thought": "the user is not sat': "the text of 'thought' is cut off",
    '{"score": 0.5, "thought": "ok"': "the text of 'thought' is cut off",  # maybe the first quote of: "ok" is a word
    "```json\n{'thought': 'ok', 'score': 0.8\n```": "the value of 'score' is cut off",
    '<think>{"thought": "draft", "score": 0}': "ends within <think>",
    '{"thought": "ok", "score": 4/5}': "the value of 'score' is cut off or not plain",
    '{"thought": "ok", "score": 1,000}': "the value of 'score' is cut off or not plain",
    "{thought: ok, score: 1}": "no quotes around it",
    '{"thought": "a "yes", "no": b", "score": 1}': "holds quotes without a backslash",
    '{"thought": "use {"a": "b"} now", "score": 1}': "holds quotes without a backslash",
    "{'thought': 'the dogs' {'b'}', 'score': 1}": "holds quotes without a backslash",
    "{“thought”: “use {“a”} now”, “score”: 1}": "holds quotes without a backslash",
    '{"thought": "ok", "score": 0.2} or {"thought": "ok", "score": 0.3}': "more than one answer",
    '{"thought": "ok", "score": 0.2, "score": 0.3}': "'score' appears twice",
    "{'thought': 'ok', 'score': 0.2, 'score': 0.3}": "'score' appears twice",
    "{'thought': 'ok', 'first': {'score': 0.1}, 'second': 0.2}": "cut off or not plain",
    '{"a":' * 5000: "nested too deeply|cut off",
    "[" * 100_000: "no JSON object",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=[text[:40] for text in REFUSED])
def test_what_cannot_be_relied_on_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(MalformedAnswer, match=reason):
        parse(text, BOTH)


def test_values_are_of_their_fields_type() -> None:
    for kind, value, expected in [
        (float, 3, 3.0),
        (float, "1e-3", 0.001),
        (int, 3.0, 3),
        (int, " -3 ", -3),
        (int, "3.0", 3),
        (bool, "True", True),
        (bool, False, False),
        (str, "3", "3"),
    ]:
        parsed = parse_value(kind, value)
        assert (parsed, type(parsed)) == (expected, kind)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, 3.5), (int, "3.5"), (int, True), (float, "٣"), (float, ""), (bool, 1), (bool, "yes"), (str, True), (str, 3)],
)
def test_another_type_is_refused(kind: type, value: Any) -> None:
    with pytest.raises(MalformedAnswer, match="the field 'x' has to be a"):
        parse_value(kind, value)


def test_choices_and_ranges_include_their_ends() -> None:
    assert parse_value(str, "B", choices=("A", "B")) == "B"
    assert parse_value(int, "2", choices=(1, 2)) == 2
    assert (parse_value(int, 1, low=1, high=3), parse_value(int, 3, low=1, high=3)) == (1, 3)
    with pytest.raises(MalformedAnswer, match="'x' is \"C\"; choose one of A, B"):
        parse_value(str, "C", choices=("A", "B"))


def test_the_schema_says_what_is_parsed() -> None:
    fields = [
        *BOTH,
        Field("count", int, low=1),
        Field("sure", bool),
        Field("kind", str, choices=("a", "b"), help="which"),
    ]
    schema = json_schema(fields)
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {"thought": "", "score": 0.5, "count": 2, "sure": True, "kind": "b"}
    bad = [{**good, "score": 2}, {**good, "count": 0}, {**good, "kind": "c"}, {**good, "sure": 1}, {**good, "more": 1}]
    jsonschema.validate(good, schema)
    assert parse(json.dumps(good), fields) == good
    for answer in [*bad, {key: good[key] for key in ("thought", "score")}]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(answer, schema)
    assert schema["properties"]["kind"]["description"] == "which"


# (beginning, unit): the unit repeated is a long answer, for which a scan that starts again at each brace, quote or
# comment takes quadratic time.
LONG = [
    ("", "{"),
    ("", "{ \n"),
    ("", "{/*"),
    ("", "{//"),
    ("", "{a:1}"),
    ("", '{"a b '),
    ("", '{"a":['),
    ('{"thought": "', '"/*'),
    ('{"thought": "', '"//'),
    ('{"thought": "', '/*"/**/'),
    ('{"thought": "', '", "a'),
    ('{"thought": ', "9"),
    ('{"thought": "a", "', "b "),
    ("{'thought': '", "'a'"),
    ("<think>", "</think>{"),
    ('{\\"thought\\": ', '\\"'),
]


def seconds_of(text: str) -> float:
    """The least time of this thread, out of three, in which `text` is refused."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(MalformedAnswer):
            parse(text, BOTH)
        times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.processes
@pytest.mark.parametrize(("beginning", "unit"), LONG)
def test_the_time_for_an_answer_is_linear_in_its_length(beginning: str, unit: str) -> None:
    once = beginning + unit * (40_000 // len(unit))
    four_times = beginning + 4 * once[len(beginning) :]
    assert seconds_of(four_times) < 8 * seconds_of(once) + 0.02, "a quadratic scan takes 16 times as long"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{a: 1}" * 101, "more than 100 objects"),
        ('{"score": 0.1, "thought": ""}' * 101, "more than 100 objects"),
        ('{"thought": "a", ' + "/* x */" * 3 + '"score": 1}', "the text of 'thought' is cut off"),
        (f'{{"thought": "a", /* {"x" * 300} */ "score": 1}}', "the text of 'thought' is cut off"),
        (" \n", "there is no JSON object: the text is empty"),
    ],
    ids=["objects", "equal objects", "comments", "comment", "blank"],
)
def test_what_is_read_of_an_answer_is_bounded(text: str, reason: str) -> None:
    with pytest.raises(MalformedAnswer, match=reason):
        parse(text, BOTH)


@given(st.text(alphabet="{}[]\"'`“”:,.\\/ \n01eNatruhosc<>_-*", max_size=60))
def test_nonsense_is_refused_and_breaks_nothing(text: str) -> None:
    for framed in (text, '{"thought": "' + text, '{"thought": "ok", "score": 0.5' + text):
        try:
            answer = parse(framed, BOTH)
        except MalformedAnswer as error:
            assert str(error)
        else:
            assert [type(value) for value in answer.values()] == [str, float]
            assert 0 <= answer["score"] <= 1


@given(st.text(max_size=40), st.floats(0, 1), st.data())
def test_half_an_answer_is_never_taken_for_a_whole_one(thought: str, score: float, data: st.DataObject) -> None:
    answer = {"thought": thought, "score": score} if data.draw(st.booleans()) else {"score": score, "thought": thought}
    text = json.dumps(answer, ensure_ascii=data.draw(st.booleans()))
    with pytest.raises(MalformedAnswer):
        parse(text[: data.draw(st.integers(0, len(text) - 1))], BOTH)


@given(st.text(max_size=60), st.floats(0, 1))
def test_python_writes_the_same_answer(thought: str, score: float) -> None:
    assert parse(repr({"thought": thought, "score": score}), BOTH) == {"thought": thought, "score": score}
