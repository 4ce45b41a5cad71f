"""Jinja templates with bounded renderings: prompts (prompt.py) and the chat templates of models.

A rendering is bounded in CPU time, which every round of a loop and every call of a macro checks, and in the sizes of
its output, of every value that it computes, and of all of them together. Formats have their widths as numbers, not as
arguments.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import partial, reduce, wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.visitor import NodeTransformer

LONGEST = 1 << 20  # characters of a rendered text, besides four times those of its values
SECONDS = 5.0  # CPU time of a rendering
_LARGEST = 1 << 24  # characters of a value, all its entries together; bits of a number
# Characters of all values that a rendering computes, since any number of them may be kept: 2000 messages of 400
# characters, collected in one text, are 0.8e9.
_MOST = 1 << 30
_POINTER = 8  # bytes of an entry in a list
# Filters and methods whose numbers, but the value itself, are widths or counts.
_WIDTHS = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "truncate", "wordwrap", "batch"}
_WIDTHS |= {"slice"}
_FIELD = re.compile(r"[-+ #0]*(?:\*|[0-9]*)(?:\.(?:\*|[0-9]*))?[hlL]?")


class TemplateLimit(ValueError):
    """A template takes more time or space than a rendering may."""


class BoundedTemplate:
    """`source` as a template of `environment`, which `bounded` has made. Raises TemplateSyntaxError."""

    def __init__(self, environment: SandboxedEnvironment, source: str, file: str | None = None) -> None:
        self._clock = "_clock"
        while self._clock in source:  # a name that the template does not have
            self._clock += "_"
        tree = _Instrumented(self._clock).visit(environment.parse(source, filename=file)).set_environment(environment)
        code = environment.compile(tree.set_lineno(1), filename=file)
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(self, values: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateLimit, and whatever the template raises for these values."""
        room = LONGEST + 4 * sum(len(str(value)) for value in values.values())
        pieces, clock = list[str](), _Clock()
        token = _CLOCK.set(clock)
        try:
            for piece in self._template.generate({**values, self._clock: clock}):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise TemplateLimit("gives too many characters")
        finally:
            _CLOCK.reset(token)
        return "".join(pieces)


def bounded(environment: SandboxedEnvironment) -> SandboxedEnvironment:
    """An environment with the syntax, filters and globals of `environment`, for BoundedTemplate."""
    copy = _Environment(
        trim_blocks=environment.trim_blocks,
        lstrip_blocks=environment.lstrip_blocks,
        extensions=list(map(type, environment.extensions.values())),
        undefined=environment.undefined,
        finalize=_bounded,
    )
    copy.filters = {name: wraps(filter)(_checked(filter, name)) for name, filter in environment.filters.items()}
    copy.globals = {name: value for name, value in environment.globals.items() if name != "lipsum"}  # unbounded
    return copy


class _Environment(ImmutableSandboxedEnvironment):
    """Computes no values above _LARGEST."""

    intercepted_binops = frozenset({"*", "**", "%"})  # + is in _Instrumented

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        if operator == "%" and isinstance(first, str):
            _limit(_formatted(_percent_fields(first), [second] if isinstance(second, dict) else []))
        elif operator in ("*", "**"):  # the size is known before it is computed
            value, times = (first, second) if isinstance(second, int) else (second, first)
            if isinstance(times, int) and isinstance(value, int) == (operator == "**"):
                _limit(_size(value) * times)
        return _bounded(super().call_binop(context, operator, first, second))

    def call(self, context: Any, obj: Any, /, *args: Any, **options: Any) -> Any:
        if isinstance(obj, _Clock):  # in every round, so without the checks of a call
            return obj(*args)
        method = partial(super().call, context, obj)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps str.format
        return _checked(method, getattr(obj, "__name__", ""), owner)(*args, **options)


class _Instrumented(NodeTransformer):
    """Makes every round of a loop and call of a macro look at the clock, and `~`, `+` and slices bound their results.

    A round or call also counts the constant text in it, of which a block or macro makes a value.
    """

    def __init__(self, clock: str) -> None:
        self._clock = clock

    def _call(self, *args: Any) -> Any:
        return nodes.Call(nodes.Name(self._clock, "load"), list(args), [], None, None)

    def visit_For(self, node: Any) -> Any:
        constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(self._call(nodes.List([]), nodes.Const(constant))))
        if getattr(node, "test", None):  # of a loop that leaves elements out
            node.test = nodes.And(nodes.Not(self._call()), node.test)
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return self._call(nodes.List(node.nodes))

    def visit_Add(self, node: Any) -> Any:
        """A sum of several is one value: those on the way to it are kept by nothing."""
        terms = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            terms.append(node.right)
        terms = [self.visit(term) for term in (node.left, *reversed(terms))]
        return self._call(nodes.List(terms), nodes.Const(0), nodes.Const(True))

    def visit_Getitem(self, node: Any) -> Any:
        """A slice is a new value, which Jinja computes past the environment."""
        self.generic_visit(node)
        return self._call(nodes.List([node]), nodes.Const(0), nodes.Const(True)) if _is_slice(node) else node


class _Clock:
    """Raises TemplateLimit once the rendering has taken SECONDS, or has computed more than _MOST characters."""

    def __init__(self) -> None:
        self._deadline, self._room = time.thread_time() + SECONDS, _MOST

    def __call__(self, parts: Sequence[Any] = (), constant: int = 0, added: bool = False) -> Any:
        """The text of `parts`, or their sum if they are `added`; `constant`: characters that the template writes."""
        self.look()
        size = sum(map(_new_size, parts)) if added else _size(parts)
        _limit(size)
        self.count(size + constant)
        return reduce(operator.add, parts) if added else "".join(map(str, parts))

    def look(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimit(f"takes more than {SECONDS:g} s")

    def count(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise TemplateLimit(f"computes more than {_MOST} characters")


_CLOCK: ContextVar[_Clock | None] = ContextVar("clock", default=None)  # of the rendering; None in compilation


def _checked(function: Callable[..., Any], name: str, *owner: Any) -> Callable[..., Any]:
    """The filter or method `name` of `owner`, with bounded arguments, widths among them, and a bounded result."""

    def call(*args: Any, **options: Any) -> Any:
        args = tuple(_listed(value) if isinstance(value, Generator) else value for value in args)
        values = (*owner, *args, *options.values())
        for value in values:
            _limit(_size(value))
        for width in values[1:] if name in _WIDTHS else ():
            _limit(width if isinstance(width, int) else 0)
        if owner and isinstance(owner[0], str) and name in ("format", "format_map"):
            _limit(_formatted([spec or "" for _, _, spec, _ in Formatter().parse(owner[0])], values[1:]))
        else:
            widths = [value for value in values if isinstance(value, int)]
            _limit(_inserted(name, [value for value in values if isinstance(value, Sized)], max([1, *widths])))
        return _bounded(function(*args, **options))

    return call


def _listed(generator: Iterable[Any]) -> list[Any]:
    """The values of a generator, bounded as they are computed."""
    values, size = list[Any](), 0
    for value in generator:
        values.append(value)
        size += 1 + _size(value)
        _limit(size)
    return values


def _inserted(name: str, values: Sequence[Any], width: int) -> int:
    """The most characters that a filter or method inserts at all places; each of `values` is bounded by itself."""
    longest = max([width, *map(_size, values[1:])])
    match name, values:
        case "replace", [str() as text, str() as before, str() as after, *_]:
            return text.count(before) * len(after)
        case "join", [first, second, *_]:
            return len(first) * len(second)
        case "format", [str() as text, *arguments]:
            return _formatted(_percent_fields(text), arguments)
        case "expandtabs", [str() as text]:
            return text.count("\t") * width
        case "indent", [str() as text, *_]:
            return (1 + text.count("\n")) * longest
        case "urlize", [str() as text, *_]:
            return text.count(".") * longest
        case "translate" | "wordwrap", [str() as text, *arguments]:
            return len(text) * max(map(_size, arguments), default=0)
        case "tojson" | "pprint", [value, *_]:
            return _levels(value) * width
    return 0


def _levels(value: Any) -> int:
    """The sum of the depths of all entries in a value, each of which is indented by as many levels."""
    levels, depth, parts = 0, 1, [value]
    while parts := [part for part in parts if isinstance(part, dict | list | tuple)]:
        parts = [entry for part in parts for entry in (part.values() if isinstance(part, dict) else part)]
        levels, depth = levels + depth * len(parts), depth + 1
    return levels


def _percent_fields(text: str) -> list[str]:
    """Flags, width and precision of each field of a format with `%`, as Python reads them."""
    fields, start = list[str](), text.find("%")
    while start >= 0:
        match = _FIELD.match(text, _after_name(text, start + 1))
        assert match  # it matches everywhere
        fields.append(match[0])
        start = text.find("%", match.end() + 1)  # behind the conversion, which may be another %
    return fields


def _after_name(text: str, start: int) -> int:
    """The place behind the name in parentheses that may begin at `start` and have others in it."""
    depth, end = 0, start
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth <= 0:
            break
    return end + 1 if end > start else start


def _formatted(fields: Sequence[str], values: Sequence[Any]) -> int:
    """The most characters of a format: the numbers in its fields, and any of `values` in each of them."""
    numbers = list[str]()
    for field in fields:
        if "*" in field or "{" in field:
            raise TemplateLimit("has a format whose width is an argument")
        numbers += re.findall(r"\d+", field)
    return sum(map(int, numbers)) + len(fields) * max(map(_size, values), default=0)


def _bounded(value: Any) -> Any:
    _limit(size := _size(value))
    if clock := _CLOCK.get():
        clock.count(size)
    return value


def _size(value: Any) -> int:
    """Characters of the texts in `value`, and bits of its numbers; counting ends above _LARGEST."""
    size, parts, clock = 0, [value], _CLOCK.get()
    while parts and size <= _LARGEST:
        part = parts.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, int):
            size += part.bit_length()
        elif isinstance(part, dict | list | tuple):
            if clock:  # those that have each other as entries take long to count
                clock.look()
            size += len(part)
            parts += part
            parts += part.values() if isinstance(part, dict) else ()
    return size


def _is_slice(node: Any) -> bool:
    return isinstance(node.arg, nodes.Slice)


def _new_size(value: Any) -> int:
    """What a term adds to a sum: a list shares its entries with the sum of lists."""
    return len(value) * _POINTER if isinstance(value, list | tuple) else _size(value)


def _limit(size: int) -> None:
    if size > _LARGEST:
        raise TemplateLimit(f"computes a value of more than {_LARGEST} characters")
