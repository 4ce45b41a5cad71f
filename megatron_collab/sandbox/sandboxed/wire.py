"""Calls between two processes: JSON messages over pipes, with handles for objects that are not data.

A `WirePeer` asks the other side to perform an act on one of its objects, and serves the other side's requests while it
waits for the answer, so calls may nest. The `WireHost` that holds an object decides which acts the other side may
perform on it.
"""

from __future__ import annotations

import json
import os
from _thread import RLock
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .values import Decoder, Encoder, Violation, same, snapshot

LARGEST = 64 << 20  # bytes of a message
NESTED = 40  # calls within calls
_read, _write = os.read, os.write  # the code that runs here may replace them


class Closed(Exception):
    """The other side has ended."""


class Unjudged(Exception):
    """The tests need something that cannot be judged from another process; the message says what."""


class WireHost(Protocol):
    """The requests of the other side that a process serves."""

    def describe(self, value: Any) -> list[Any]:
        """Description, for the other side, of an object that stays here. Raises Unjudged if it must not be reached."""

    def adopt(self, peer: WirePeer, number: int, *description: Any) -> Any:
        """A stand-in here for an object of the other side, from its `describe`. Raises Violation."""

    def do(self, act: str, target: Any, arguments: tuple[Any, ...]) -> Any:
        """Perform an act that the other side requests."""


def read_message(descriptor: int) -> bytes:
    """The next message of a pipe: four bytes of length, then the content. Raises Closed, Violation."""
    size = int.from_bytes(_read_exactly(descriptor, 4), "big")
    if size > LARGEST:
        raise Violation(f"a message of {size} bytes is too large")
    return _read_exactly(descriptor, size)


def _read_exactly(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        part = _read(descriptor, min(size, 1 << 20))
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def packed(message: Any) -> bytes:
    """The message as JSON. Raises ValueError if it is too long."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        raise ValueError(f"more than {LARGEST >> 20} MiB at once")
    return text


def write_message(descriptor: int, message: bytes) -> None:
    """Write a message to a pipe. Raises BrokenPipeError if the reader has closed it."""
    remaining = memoryview(len(message).to_bytes(4, "big") + message)
    while remaining:
        remaining = remaining[_write(descriptor, remaining) :]


class WirePeer:
    """One end of two pipes. If the other side ends or breaks the protocol, `lost` is called and must not return."""

    def __init__(self, reading: int, writing: int, host: WireHost, lost: Callable[[Exception], Any]) -> None:
        self._reading, self._writing, self._host, self._lost = reading, writing, host, lost
        self._objects: list[Any] = []  # exported to the other side, by number
        self._numbers: dict[int, int] = {}
        self._adopted: dict[int, Any] = {}
        self._waiting = RLock()
        self._depth = 0

    def ask(self, act: str, target: Any, *arguments: Any) -> Any:
        """Have the other side perform an act on one of its objects; an exception there is raised here.

        Changes to mutable arguments are applied here. Raises ValueError if a value is nested too deep or too long.
        """
        encoder = Encoder(self._export)
        try:
            message = packed(["ask", act, *(encoder.encode(value) for value in (target, arguments))])
        except Unjudged as error:
            if self._depth:  # in a callback: whether it comes to this is the candidate's choice
                raise TypeError(str(error)) from error
            self._lost(error)
        with self._waiting:
            self._send(message)
            kind, *fields = self._await()
        try:
            decoder = Decoder(self._adopt, encoder.shared)
            value, changes = fields
            value = decoder.decode(value)
            for number, contents in changes:
                decoder.refill(encoder.shared[number], contents)
        except Exception as error:
            self._lost(Violation(str(error)))
        if kind == "raise":
            raise value if isinstance(value, BaseException) else Exception("not an exception")
        return value

    def serve(self) -> None:
        """Serve the other side's requests until it ends."""
        while True:
            with self._waiting:
                message = self._receive()
                self._answer(message)

    def _await(self) -> list[Any]:
        while True:
            message = self._receive()
            if message[0] in ("return", "raise"):
                return message
            self._answer(message)

    def _answer(self, message: list[Any]) -> None:
        self._depth += 1
        try:
            kind, act, *body = message
            if kind != "ask" or type(act) is not str or self._depth > NESTED:
                raise Violation("an invalid request, or nested too deeply")
            decoder = Decoder(self._adopt)
            target, arguments = (decoder.decode(part) for part in body)
            if type(arguments) is not tuple:
                raise Violation("arguments are not a tuple")
        except Exception as error:
            self._lost(Violation(str(error)))
        before = snapshot(decoder.shared)
        kind, value = self._done(act, target, arguments)
        try:
            reply = self._reply(kind, value, decoder.shared, before)
        except BaseException as error:  # too deep, too long, or not readable
            reply = self._reply("raise", ValueError(f"the result cannot be sent: {type(error).__name__}"), [], [])
        self._send(reply)
        self._depth -= 1

    def _done(self, act: str, target: Any, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            return "return", self._host.do(act, target, arguments)
        except (Violation, Closed):
            raise
        except BaseException as error:
            return "raise", error

    def _reply(self, kind: str, value: Any, shared: Sequence[Any], before: Sequence[Any]) -> bytes:
        encoder = Encoder(self._export, shared)
        encoded = encoder.encode(value)
        changes = [
            [number, encoder.contents(container)]
            for number, (container, old) in enumerate(zip(shared, before, strict=True))
            if not same(old, container)
        ]
        return packed([kind, encoded, changes])

    def _send(self, message: bytes) -> None:
        try:
            write_message(self._writing, message)
        except BrokenPipeError as error:
            self._lost(error)

    def _receive(self) -> list[Any]:
        try:
            message = json.loads(read_message(self._reading))
            if type(message) is not list or not message:
                raise Violation("an invalid message")
        except (Closed, Violation, ValueError, RecursionError, MemoryError) as error:
            self._lost(error)
        return message

    def _export(self, value: Any) -> list[Any]:
        if isinstance(value, Remote) and object.__getattribute__(value, "_peer") is self:
            return ["yours", object.__getattribute__(value, "_number")]
        description = self._host.describe(value)
        if description[0] == "import":
            return description
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["mine", self._numbers[id(value)], *description]

    def _adopt(self, tag: str, *fields: Any) -> Any:
        if tag == "yours":
            (number,) = fields
            if type(number) is not int or number < 0:
                raise Violation("not a valid number")
            return self._objects[number]
        if tag == "import":
            return self._host.adopt(self, -1, *fields)
        if tag != "mine" or type(fields[0]) is not int:
            raise Violation(f"unknown tag {tag}")
        number, *description = fields
        if number not in self._adopted:
            self._adopted[number] = self._host.adopt(self, number, *description)
        return self._adopted[number]


class Remote:
    """Stands for an object of the other side."""

    def __init__(self, peer: WirePeer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)


ACTS: Mapping[str, Callable[..., Any]] = {
    "attribute": getattr,
    "set attribute": setattr,
    "item": lambda target, key: target[key],
    "set item": lambda target, key, value: target.__setitem__(key, value),
    "delete item": lambda target, key: target.__delitem__(key),
    "length": len,
    "iterate": iter,
    "next": next,
    "truth": bool,
    "text": str,
    "representation": repr,
    "int": int,
    "float": float,
    "contains": lambda target, item: item in target,
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    "is one": lambda target, value: isinstance(value, target),
}
