"""Python values as JSON and back: the schema of values that cross between the tests and the candidate.

Exact builtin types cross as data, their subclasses as plain data of the base, arrays and frames by `frames`; `export`
turns every other object into a handle. None, bool, str, float and small int are encoded as themselves, every other
value as [tag, fields...]. Mutable containers are numbered in the order of encoding, so that a container that is shared,
or contains itself, stays one object, and so that changes to an argument can be sent back. Decoding runs no code of the
sender: nothing is unpickled, and no name that the sender chooses is imported.
"""

from __future__ import annotations

import base64
import collections
import datetime
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any

from . import frames
from .classes import exception_type, names_of

DEPTH = 150  # of nested values
SMALL = 1 << 53  # JSON's numbers are exact up to here everywhere
NAMED_TYPES = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice, object, type),
    NoneType,
)
TYPES = {kind.__name__: kind for kind in NAMED_TYPES}
MAPPINGS = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
SEQUENCES = {"list": list, "set": set, "deque": collections.deque}
MUTABLE = (list, set, dict, bytearray, collections.deque)
# Bases of subclasses, each with a function that gives the plain value, whatever the subclass overrides.
PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__pos__),
    (float, float.__pos__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
)
# By tag: types whose values cross as text, each with its module, which is imported for the first such value.
TEXTS = {
    "decimal": ("decimal", "Decimal", "__str__", ""),
    "fraction": ("fractions", "Fraction", "__str__", ""),
    "uuid": ("uuid", "UUID", "__str__", ""),
    "path": ("pathlib", "PosixPath", "__str__", ""),
    "pure path": ("pathlib", "PurePosixPath", "__str__", ""),
    "date": ("datetime", "date", "isoformat", "fromisoformat"),
    "time": ("datetime", "time", "isoformat", "fromisoformat"),
    "datetime": ("datetime", "datetime", "isoformat", "fromisoformat"),
}
TAGS_OF_TEXTS = {place[:2]: tag for tag, place in TEXTS.items()}


class Violation(Exception):
    """A message does not follow the schema."""


class Encoder:
    """Encodes values to JSON; `shared`: mutable containers that the other side has already, by number."""

    def __init__(self, export: Callable[[Any], list[Any]], shared: Sequence[Any] = ()) -> None:
        self.export = export
        self.shared = list(shared)
        self.numbers = {id(container): number for number, container in enumerate(shared)}

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON. Raises ValueError if values are nested deeper than DEPTH."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -SMALL < value < SMALL else ["int", hex(value)]
        if depth > DEPTH:
            raise ValueError(f"values are nested more than {DEPTH} deep")
        if id(value) in self.numbers:
            return ["shared", self.numbers[id(value)]]
        if isinstance(value, MUTABLE):
            return [self._tag(value), *self._extra(value, depth), self.number(value).contents(value, depth)]
        return self._immutable(kind, value, depth)

    def number(self, container: Any) -> Encoder:
        """Number a container that is about to be encoded."""
        self.numbers[id(container)] = len(self.shared)
        self.shared.append(container)
        return self

    def _tag(self, value: Any) -> str:
        if isinstance(value, collections.defaultdict):
            return "default"
        tags = ((tag, kind) for tag, kind in (MAPPINGS | SEQUENCES | {"bytearray": bytearray}).items())
        return [tag for tag, kind in tags if isinstance(value, kind)][-1]  # a subclass comes after its base

    def _extra(self, value: Any, depth: int) -> list[Any]:
        if isinstance(value, collections.defaultdict):
            return [self.encode(value.default_factory, depth + 1)]
        return [value.maxlen] if isinstance(value, collections.deque) else []

    def contents(self, value: Any, depth: int = 0) -> Any:
        """Encoded elements of a mutable container, read by its base type's methods."""
        if isinstance(value, bytearray):
            return base64.b64encode(value).decode()
        if not isinstance(value, MUTABLE):  # an array
            return frames.contents(self, value, depth)
        return [self.encode(item, depth + 1) for item in elements(value)]

    def _immutable(self, kind: type, value: Any, depth: int) -> Any:
        if kind in (tuple, frozenset):
            return [kind.__name__, [self.encode(item, depth + 1) for item in value]]
        if kind is bytes:
            return ["bytes", base64.b64encode(value).decode()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (range, slice):
            return [kind.__name__, *(self.encode(field, depth + 1) for field in (value.start, value.stop, value.step))]
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind is datetime.timezone:
            return ["timezone", value.utcoffset(None).total_seconds()]
        if tag := TAGS_OF_TEXTS.get((kind.__module__, kind.__qualname__)):
            return [tag, getattr(kind, TEXTS[tag][2])(value)]
        if kind is type and value in NAMED_TYPES:
            return ["type", value.__name__]
        if isinstance(value, BaseException):
            return self.exception(value, depth)
        if kind is type and issubclass(value, BaseException):
            return ["exception type", names_of(value)]
        if (encoded := frames.encode(self, value, depth + 1)) is not None:
            return encoded
        fields = getattr(kind, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            items = [self.encode(item, depth + 1) for item in tuple.__iter__(value)]
            return ["named tuple", kind.__name__, list(map(str, fields)), items]
        for base, plain in PLAIN:
            if isinstance(value, base):
                return self.encode(plain(value), depth)
        return self.export(value)

    def exception(self, error: BaseException, depth: int = 0) -> list[Any]:
        attributes = [item for name, value in vars(error).items() for item in (name, self.encode(value, depth + 1))]
        arguments = [self.encode(argument, depth + 1) for argument in error.args]
        return ["exception", names_of(type(error)), arguments, str(error), attributes]


class Decoder:
    """Decodes JSON to values. Every method raises Violation if its input does not follow the schema."""

    def __init__(self, adopt: Callable[..., Any], shared: Sequence[Any] = ()) -> None:
        self.adopt = adopt
        self.shared = list(shared)

    def decode(self, wire: Any, depth: int = 0) -> Any:
        if wire is None or type(wire) in (bool, int, float, str):
            return wire
        if type(wire) is not list or not wire or type(wire[0]) is not str or depth > DEPTH + 1:
            raise Violation("an invalid value, or nested too deeply")
        try:
            return self._tagged(depth + 1, *wire)
        except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, AttributeError) as error:
            raise Violation(f"{wire[0]}: {error}") from error

    def _tagged(self, depth: int, tag: str, *fields: Any) -> Any:
        if tag in MAPPINGS or tag in SEQUENCES or tag in ("bytearray", "default"):
            return self._container(depth, tag, *fields)
        if tag in TEXTS:
            module, name, _, reader = TEXTS[tag]
            kind = getattr(importlib.import_module(module), name)
            return (getattr(kind, reader) if reader else kind)(*map(str.__str__, fields))
        if tag.startswith(("numpy", "pandas")):
            return frames.decode(self, depth, tag, *fields)
        return getattr(self, f"_{tag.replace(' ', '_')}")(depth, *fields) if tag in _TAGS else self.adopt(tag, *fields)

    def _container(self, depth: int, tag: str, *fields: Any) -> Any:
        *extra, contents = fields
        if tag == "default":
            factory = self.decode(extra[0], depth)
            empty: Any = collections.defaultdict(factory if factory in NAMED_TYPES else None)
        else:
            empty = (MAPPINGS | SEQUENCES | {"bytearray": bytearray})[tag](*([(), *extra] if extra else []))
        self.shared.append(empty)
        self.refill(empty, contents, depth)
        return empty

    def refill(self, container: Any, contents: Any, depth: int = 0) -> None:
        """Replace the contents of a mutable container in place."""
        if isinstance(container, bytearray):
            container[:] = base64.b64decode(contents, validate=True)
            return
        if not isinstance(container, MUTABLE):  # an array
            container[...] = frames.filled(self, container.dtype, container.shape, contents, depth)
            return
        values = [self.decode(item, depth) for item in _array(contents)]
        container.clear()
        if isinstance(container, dict):
            for key, value in zip(values[::2], values[1::2], strict=True):
                dict.__setitem__(container, key, value)
        else:
            (container.update if isinstance(container, set) else container.extend)(values)

    def _shared(self, depth: int, number: int) -> Any:
        if type(number) is not int or number < 0:
            raise Violation("not a valid number")
        return self.shared[number]

    def _int(self, depth: int, digits: str) -> int:
        return int(digits, 16)

    def _bytes(self, depth: int, text: str) -> bytes:
        return base64.b64decode(text, validate=True)

    def _complex(self, depth: int, real: float, imag: float) -> complex:
        return complex(float(real), float(imag))

    def _tuple(self, depth: int, items: Any) -> tuple[Any, ...]:
        return tuple(self.decode(item, depth) for item in _array(items))

    def _frozenset(self, depth: int, items: Any) -> frozenset[Any]:
        return frozenset(self.decode(item, depth) for item in _array(items))

    def _range(self, depth: int, *fields: Any) -> range:
        return range(*(self.decode(field, depth) for field in fields))

    def _slice(self, depth: int, *fields: Any) -> slice:
        return slice(*(self.decode(field, depth) for field in fields))

    def _timedelta(self, depth: int, *fields: int) -> datetime.timedelta:
        return datetime.timedelta(*map(int, fields))

    def _timezone(self, depth: int, seconds: float) -> datetime.timezone:
        return datetime.timezone(datetime.timedelta(seconds=float(seconds)))

    def _type(self, depth: int, name: str) -> type:
        return TYPES[name]

    def _named_tuple(self, depth: int, name: str, fields: Any, items: Any) -> Any:
        kind = _named_tuple(str.__str__(name), tuple(map(str.__str__, _array(fields))))
        return kind(*(self.decode(item, depth) for item in _array(items)))

    def _exception_type(self, depth: int, names: Any) -> type[BaseException]:
        return exception_type([(str.__str__(module), str.__str__(name)) for module, name in _array(names)])

    def _exception(self, depth: int, names: Any, args: Any, text: str, attributes: Any) -> BaseException:
        kind = self._exception_type(depth, names)
        arguments = [self.decode(argument, depth) for argument in _array(args)]
        message = str.__str__(text)
        try:
            error = kind(*arguments) if kind.__module__ == "builtins" else kind.__new__(kind, *arguments)
            if str(error) != message:  # the sender's class overrides __str__
                kind = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__str__": lambda self: message})
                error = kind.__new__(kind, *arguments)
        except Exception:  # the constructor takes other arguments than error.args
            error = Exception(message)
        for name, value in zip(attributes[::2], attributes[1::2], strict=True):
            if not str.startswith(name, "_"):
                vars(error)[name] = self.decode(value, depth)
        return error


_TAGS = {"shared", "int", "bytes", "complex", "tuple", "frozenset", "range", "slice", "timedelta", "timezone", "type"}
_TAGS |= {"named tuple", "exception", "exception type"}


@cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def elements(container: Any) -> Iterator[Any]:
    """The elements of a mutable container, alternately keys and values for a dict; the bytes of an array."""
    if isinstance(container, dict):
        return (element for item in dict.items(container) for element in item)
    kinds: tuple[Any, ...] = (list, set, collections.deque, bytearray)
    for kind in kinds:
        if isinstance(container, kind):
            return kind.__iter__(container)
    return iter([container.tobytes()])


def snapshot(containers: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The elements of the containers, for `same` to detect later changes."""
    return [tuple(elements(container)) for container in containers]


def same(before: tuple[Any, ...], container: Any) -> bool:
    now = tuple(elements(container))
    return len(before) == len(now) and all(map(_same, before, now))


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) is bytes and before == now)


def _array(wire: Any) -> list[Any]:
    if type(wire) is not list:
        raise Violation("not a list")
    return wire
