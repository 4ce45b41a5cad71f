"""The candidate's process: runs the policy's code and carries out what the tests request.

Nothing here is a security boundary. The policy's code may replace any of it and send any answer; the tests trust only
values that they compare themselves.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from .classes import names_of
from .wire import ACTS, Remote, WirePeer, read_message, write_message

BEGIN, LOADED = b"begin", b"loaded"
_MODULE = "solution"  # the module's name in the tests


def run(sources_pipe: int, reading: int, writing: int) -> NoReturn:
    """Execute the sources in order in one module, which takes the name of each; then serve the tests.

    It waits until the tests are known to be sound, so that no source can have an influence on that.
    """
    sources = json.loads(read_message(sources_pipe))
    os.close(sources_pipe)
    if read_message(reading) != BEGIN:
        leave(1)
    sys.argv = [""]
    module = types.ModuleType(_MODULE)
    try:
        for name, source in sources.items():
            sys.modules[name] = module
            vars(module)["__name__"] = name
            exec(compile(source, f"<{name}>", "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        sys.__excepthook__(*sys.exc_info())
        leave(1)
    write_message(writing, LOADED)
    Agent(module, reading, writing).peer.serve()
    leave(0)


def leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


class Agent:
    """The `WireHost` of the candidate."""

    def __init__(self, module: types.ModuleType, reading: int, writing: int) -> None:
        self.module = module
        self.patched: dict[tuple[str, str, str], list[Any]] = {}
        self.peer = WirePeer(reading, writing, self, lambda error: leave(0))
        self.printed: list[str | None] = []  # not sent yet: alternately a stream name and its text, or None to flush
        self.streams = {name: Stream(self, name) for name in ("stdin", "stdout", "stderr")}

    def describe(self, value: Any) -> list[Any]:
        ability = "callable" if callable(value) else "awaitable" if hasattr(value, "__await__") else ""
        return [ability, names_of(type(value))]

    def adopt(self, peer: WirePeer, number: int, *description: Any) -> Any:
        if number < 0:
            return self.resolve(*description)
        kind, name, is_callable = description
        return (CallableGuest if is_callable else Guest)(self, number, kind, name)

    def do(self, act: str, target: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            if act == "call":
                positional, named = arguments
                return target(*positional, **named)
            if act == "await":
                return importlib.import_module("asyncio").run(_awaited(target))
            if act in ("names", "follow", "patch", "unpatch"):
                return getattr(self, act)(*arguments)
            return ACTS[act](target, *arguments)
        finally:
            self.flush()

    def ask(self, guest: Guest | None, act: str, *arguments: Any) -> Any:
        """`WirePeer.ask`, after sending the printed text: the tests may print too, or read it."""
        self.flush()
        return self.peer.ask(act, guest, *arguments)

    def flush(self) -> None:
        """Send the printed text to the tests in one message; one message per text would be slow."""
        printed, self.printed = self.printed, []
        if printed:
            self.peer.ask("print", None, tuple(printed))
        for standard in (sys.__stdout__, sys.__stderr__):
            with suppress(Exception):  # the policy's code may have closed it
                standard.flush()  # type: ignore[union-attr]

    def names(self, requested: tuple[str, ...]) -> dict[str, Any]:
        return {name: vars(self.module)[name] for name in requested if name in vars(self.module)}

    def follow(self, changes: Mapping[str, Any]) -> None:
        """Apply to this process what the tests changed in theirs."""
        if "streams" in changes:
            for name in self.streams:
                replaced = name in changes["streams"]
                setattr(sys, name, self.streams[name] if replaced else getattr(sys, f"__{name}__"))
        if "environment" in changes:
            os.environ.clear()
            os.environ.update(changes["environment"])
        if "folder" in changes:
            os.chdir(changes["folder"])
        if "argv" in changes:
            sys.argv = changes["argv"]
        if "random" in changes:
            importlib.import_module("random").setstate(changes["random"])
        if "numpy" in changes:
            importlib.import_module("numpy").random.set_state(changes["numpy"])

    def resolve(self, module: str, name: str) -> Any:
        """A module, or the object of this name in it; `solution` is the candidate's module."""
        target = self.module if module == _MODULE else importlib.import_module(module)
        for part in filter(None, name.split(".")):
            target = getattr(target, part)
        return target

    def patch(self, module: str, name: str, attribute: str, value: Any) -> None:
        target = self.resolve(module, name)
        existed = attribute in vars(target)
        self.patched.setdefault((module, name, attribute), []).append((existed, vars(target).get(attribute)))
        setattr(target, attribute, value)

    def unpatch(self, module: str, name: str, attribute: str) -> None:
        target = self.resolve(module, name)
        existed, before = self.patched[module, name, attribute].pop()
        if existed:
            setattr(target, attribute, before)
        else:
            delattr(target, attribute)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


class Stream(io.TextIOBase):
    """Stands for a standard stream that the tests replaced; forwards all calls to it, in order."""

    def __init__(self, agent: Agent, name: str) -> None:
        self._agent, self._name = agent, name

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"string argument expected, got {type(text).__name__!r}")
        self._agent.printed += (self._name, text)
        return len(text)

    def flush(self) -> None:
        self._agent.printed += (self._name, None)

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self._agent.ask(None, "read line")

    def read(self, size: int | None = -1) -> str:
        return self._agent.ask(None, "read")

    def readable(self) -> bool:
        return self._name == "stdin"

    def writable(self) -> bool:
        return self._name != "stdin"


class Guest(Remote):
    """Stands for an object of the tests."""

    def __init__(self, agent: Agent, number: int, kind: str, name: str) -> None:
        super().__init__(agent.peer, number)
        object.__setattr__(self, "_agent", agent)
        object.__setattr__(self, "_description", (kind, name))

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return object.__getattribute__(self, "_description")[1]
        if name.startswith("_"):
            raise AttributeError(name)
        return ask(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "set attribute", name, value)

    def __getitem__(self, key: Any) -> Any:
        return ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        ask(self, "delete item", key)

    def __len__(self) -> int:
        return ask(self, "length")

    def __iter__(self) -> Iterator[Any]:
        return ask(self, "iterate")

    def __next__(self) -> Any:
        return ask(self, "next")

    def __contains__(self, item: Any) -> bool:
        return ask(self, "contains", item)

    def __bool__(self) -> bool:
        return ask(self, "truth") if object.__getattribute__(self, "_description")[0] in ("mock", "object") else True

    def __str__(self) -> str:
        return ask(self, "text")

    def __repr__(self) -> str:
        return ask(self, "representation")

    def __int__(self) -> int:
        return ask(self, "int")

    def __float__(self) -> float:
        return ask(self, "float")

    def __enter__(self) -> Any:
        return ask(self, "enter")

    def __exit__(self, *raised: object) -> None:
        ask(self, "exit")


class CallableGuest(Guest):
    """Stands for a function, a class or a mock of the tests."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask(self, "call", arguments, named)


def ask(guest: Guest, act: str, *arguments: Any) -> Any:
    """`Agent.ask` of the agent that adopted the guest."""
    return object.__getattribute__(guest, "_agent").ask(guest, act, *arguments)
