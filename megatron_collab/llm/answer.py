"""Parses the answer of a language model into the requested values, or raises MalformedAnswer with the reason.

An answer is one flat JSON object. Common slips are accepted: text around it, single, triple or missing quotes, extra or
missing commas, Python constants, comments, stray quotes inside a text. An answer that ends before its closing brace is
rejected, and so is one that can be read in two ways. json-repair 0.64.5 would close `{"score": 0.8`, which may have
been 0.85, and misreads 454 of the 10,000 answers of tools/bench/judge_parse.py.

Time is linear in the length of the text, whatever it contains: each part is matched once, possessively; comments and
the number of objects are bounded.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_collab.runtime.text import printable

Value = str | float | int | bool

_LONGEST_COMMENT, _MOST_COMMENTS = 200, 2  # characters; in a row
_COMMENT = rf"(?://[^\n]{{0,{_LONGEST_COMMENT}}}+|/\*.{{0,{_LONGEST_COMMENT}}}?\*/)"
_GAP = rf"\s*+(?:{_COMMENT}\s*+){{0,{_MOST_COMMENTS}}}+"
_QUOTED_KEY = r"[\"'`“]\w[\w ]*+[\"'`”]\s*+:"
_KEY = rf"(?:{_QUOTED_KEY}|\w++\s*+:)"
_OPEN = re.compile(rf"\{{[\s{{]*+((?={_GAP}{_KEY}))?+", re.DOTALL)  # group 1: if a key follows
_NAME = re.compile(rf"{_GAP}[\"'`“]?(\w++(?: ++\w++)*+)(?: *+[\"'`”])?\s*+:{_GAP}", re.DOTALL)
_COMMA = re.compile(rf"{_GAP},?{_GAP}", re.DOTALL)
_END = re.compile(rf"{_GAP}(?:,?{_GAP}(?:\}}|{_QUOTED_KEY})|,{_GAP}{_KEY})", re.DOTALL)  # what follows a value
_QUOTES = {'"""': '"""', "'''": "'''", '"': '"', "'": "'", "`": "`", "“": "”"}
_BARE = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|U(00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|u[0-9a-fA-F]{4}|[\"\\/bfnrt'])|[\\\"]"
)
_KINDS = {str: "string", float: "number", int: "integer", bool: "boolean"}
_LONGEST_SHOWN = 80  # characters of a wrong value in the reason
_MOST_OBJECTS = 100  # in one answer


class LlmError(RuntimeError):
    """The model gave no usable answer; the message is the reason, on one line.

    `answer`: an excerpt of its last answer that was unusable, if it gave any.
    """

    def __init__(self, reason: str, answer: str = "") -> None:
        super().__init__(reason)
        self.answer = answer


class AnswerTooLong(LlmError):
    """The answer exceeds the size limit; it is not parsed, and the request is not retried."""


class MalformedAnswer(ValueError):
    """The answer is not in the requested format; the message says what is wrong and is also sent to the model."""


@dataclass(frozen=True)
class Answer:
    """The values of a model's answer, an excerpt of its text, and the version of the model, as its provider names it.

    `text` and `version` are empty if the values are from a cache or recording of an earlier version, which did not keep
    them; `version` also if the provider names none.
    """

    values: dict[str, Any]
    text: str
    version: str = ""


@dataclass(frozen=True)
class Field:
    """One value of an answer: name, type, and range (ends included) or choices."""

    name: str
    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] | None = None
    help: str = ""

    @property
    def range(self) -> float:
        """The largest difference of two values of a number or truth value."""
        bounds = self.choices or ((0, 1) if self.kind is bool else (self.low, self.high))
        numbers = [float(bound) for bound in bounds if bound is not None]
        return max(numbers) - min(numbers) if len(numbers) > 1 else math.inf


def json_schema(fields: Sequence[Field]) -> dict[str, Any]:
    """JSON schema of an object with exactly these `fields`."""
    properties = {}
    for field in fields:
        limits: dict[str, Any] = {"minimum": field.low, "maximum": field.high, "description": field.help or None}
        limits["enum"] = field.choices and list(field.choices)
        constraints = {key: value for key, value in limits.items() if value is not None}
        properties[field.name] = {"type": _KINDS[field.kind], **constraints}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def how_to_answer(fields: Sequence[Field]) -> str:
    """The end of a prompt: the format of the answer and the meaning of its fields."""
    lines = ",\n".join(f'  "{field.name}": {_described(field)}' for field in fields)
    return f"Answer with one JSON object and nothing else:\n{{\n{lines}\n}}"


def _described(field: Field) -> str:
    if field.choices is not None:
        kind = " or ".join(map(str, field.choices))
    elif field.kind in (float, int):
        kind = f"number from {field.low:g} to {field.high:g}"
    else:
        kind = "true or false" if field.kind is bool else "string"
    return f"{kind}: {field.help}" if field.help else kind


def parse(text: str, fields: Sequence[Field]) -> dict[str, Any]:
    """Parse and check the values of `fields` in `text`. Raises MalformedAnswer with one reason.

    A number may be written as a string; a string may not be written as a number.
    """
    return checked(_find(text, [field.name for field in fields]), fields)


def checked(answer: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """The values of `fields` in `answer`, which has them all. Raises MalformedAnswer if a type or range is wrong."""
    return {field.name: _checked(answer[field.name], field) for field in fields}


def _find(text: str, names: Sequence[str]) -> dict[str, Any]:
    """The only object in `text` that has all `names`."""
    answers: list[dict[str, Any]] = []
    reason = "there is no JSON object" if text.strip() else "there is no JSON object: the text is empty"
    for answer in _objects(text):
        inner = next(iter(answer.values())) if len(answer) == 1 else None
        if isinstance(inner, dict) and not set(answer) & set(names):  # {"answer": {…}}
            answer = inner
        absent = [name for name in names if name not in answer]
        if absent:
            reason = f"the field {absent[0]!r} is missing"
        elif answer not in answers:
            answers.append(answer)
        if len(answers) > 1:
            raise MalformedAnswer("there is more than one answer")
    if not answers:
        raise MalformedAnswer(reason)
    return answers[0]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost objects in `text`. Raises MalformedAnswer at the first unreadable one: it may contain the rest."""
    try:
        decoded = _DECODER.decode(text.strip())
    except (json.JSONDecodeError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        yield decoded
        return
    if isinstance(decoded, str):  # JSON within JSON
        yield from _objects(decoded)
        return
    if re.match(r'\s*\{\s*\\"', text):  # the same, without the quotes around it
        text = _unescape(text)
    text = _after_thinking(text)
    at, objects = 0, 0
    while (first_key := _opening(text, at)) is not None:
        if (objects := objects + 1) > _MOST_OBJECTS:
            raise MalformedAnswer(f"there are more than {_MOST_OBJECTS} objects")
        try:
            value, at = _DECODER.raw_decode(text, text.rindex("{", 0, first_key))
        except RecursionError as error:
            raise MalformedAnswer("the answer is nested too deeply") from error
        except json.JSONDecodeError:
            value, at = _read_object(text, first_key)
        yield value


def _opening(text: str, at: int) -> int | None:
    """The end of the first braces after `at` that a key follows."""
    return next((braces.end() for braces in _OPEN.finditer(text, at) if braces[1] is not None), None)


def _after_thinking(text: str) -> str:
    """`text` without the model's thoughts, which may contain drafts of the answer."""
    _, mark, reply = text.rpartition("</think>")
    thinks = text.lstrip().startswith("<think>")
    if thinks and not mark:
        raise MalformedAnswer("the answer ends within <think>")
    return reply if thinks or _opening(reply, 0) is not None else text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values and values[name] != value:
            raise MalformedAnswer(f"the field {name!r} appears twice")
        values[name] = value
    return values


def _number(written: str) -> int | float:
    return int(written) if re.fullmatch(r"[+-]?[0-9]{1,400}", written) else float(written)


_DECODER = json.JSONDecoder(strict=False, parse_int=_number, object_pairs_hook=_no_duplicates)


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The object whose first key begins at `at`, and its end. Values are scalars: no objects or arrays."""
    pairs: list[tuple[str, Any]] = []
    while text[at : at + 1] != "}":
        name = _NAME.match(text, at)
        if name is None:
            raise MalformedAnswer(f"not JSON: a key should be at {short(text[at:])}")
        value, at = _read_value(text, name.end(), name.group(1))
        pairs.append((name.group(1), value))
        comma = _COMMA.match(text, at)
        at = comma.end() if comma else at
    return _no_duplicates(pairs), at + 1


def _read_value(text: str, at: int, name: str) -> tuple[Value | None, int]:
    quote = next((quote for quote in _QUOTES if text.startswith(quote, at)), None)
    if quote is not None:
        return _read_text(text, at + len(quote), quote, name)
    bare = _BARE.match(text, at)
    if bare is None or not _END.match(text, bare.end()):
        raise MalformedAnswer(f"not JSON: the value of {name!r} is cut off or not plain")
    word = bare.group()
    if word.lower() in _CONSTANTS:
        return _CONSTANTS[word.lower()], bare.end()
    if not _NUMBER.fullmatch(word):
        raise MalformedAnswer(f"not JSON: the value of {name!r} has no quotes around it")
    return _number(word), bare.end()


def _read_text(text: str, at: int, quote: str, name: str) -> tuple[str, int]:
    """The string from `at` to the first closing quote that is followed by the next key or the end of the object."""
    close = _QUOTES[quote]
    mark_or_escape = re.compile(rf"\\.|{close}(?!{close[0]})" if len(close) == 3 else rf"\\.|{close}", re.DOTALL)
    for mark in mark_or_escape.finditer(text, at):
        if mark.group()[0] != "\\" and _END.match(text, mark.end()):
            written = text[at : mark.start()]
            if not _quotes_are_paired(written, quote):
                raise MalformedAnswer(f"not JSON: the text of {name!r} holds quotes without a backslash")
            return _unescape(written), mark.end()
    raise MalformedAnswer(f"not JSON: the text of {name!r} is cut off")


def _quotes_are_paired(written: str, quote: str) -> bool:
    """Whether all unescaped quotes inside the string are paired around words, so that none of them could end it."""
    bare = re.sub(r"\\.", "", written, flags=re.DOTALL)
    if quote == "“":
        return bare.count("“") == bare.count("”")
    if len(quote) == 3:
        return quote not in bare
    if quote == "'":
        bare = re.sub(r"(?<=\w)'(?=\w)", "", bare)
    pair = rf"(?<!\w){quote}(?!\s)[^{quote}]++(?<!\s){quote}(?!\w)"
    return re.fullmatch(rf"[^{quote}]*+(?:{pair}[^{quote}]*+)*+", bare) is not None


def _unescape(written: str) -> str:
    """Resolve JSON and Python escapes; a backslash that escapes nothing stays."""

    def as_json(mark: re.Match[str]) -> str:
        code = mark[1] or mark[2]
        if code:
            return json.dumps(chr(int(code, 16)))[1:-1]
        return {"\\'": "'", "\\": "\\\\", '"': '\\"'}.get(mark[0], mark[0])

    return json.loads(f'"{_ESCAPE.sub(as_json, written)}"', strict=False)


def _checked(value: Any, field: Field) -> Value:
    typed = _typed(value, field.kind)
    if typed is None:
        raise MalformedAnswer(f"the field {field.name!r} has to be a {_KINDS[field.kind]}, but is {short(value)}")
    if field.choices is not None and typed not in field.choices:
        choices = ", ".join(map(str, field.choices))
        raise MalformedAnswer(f"the field {field.name!r} is {short(value)}; choose one of {choices}")
    if field.low is not None and typed < field.low:
        raise MalformedAnswer(f"the field {field.name!r} is {short(value)}, below {field.low:g}")
    if field.high is not None and typed > field.high:
        raise MalformedAnswer(f"the field {field.name!r} is {short(value)}, above {field.high:g}")
    return typed


def _typed(value: Any, kind: type) -> Any:
    """`value` converted to `kind`; None if it is another type, or a string with lone surrogates (not valid UTF-8)."""
    if kind is str:
        return value if isinstance(value, str) and not re.search("[\ud800-\udfff]", value) else None
    if kind is bool:
        value = _CONSTANTS.get(value.strip().lower()) if isinstance(value, str) else value
        return value if isinstance(value, bool) else None
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = _number(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None  # the comparison is false for NaN, too
    if kind is int:
        return int(value) if value == int(value) else None
    return float(value)


def short(value: Any) -> str:
    """JSON of `value` for a message, cut if it is long."""
    encoded = printable(json.dumps(value, ensure_ascii=False))
    return encoded if len(encoded) <= _LONGEST_SHOWN else f"{encoded[:_LONGEST_SHOWN]}…"
