"""The candidate's process: runs the policy's code, and does with it what the tests ask for.

Nothing here is a wall. The policy's code may replace any of it, and then says of itself what it likes; the tests
believe no more of it than values that they compare themselves.
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

LOADED = b"loaded"
_MODULE = "solution"  # the tests' name of the module


def run(sources_pipe: int, reading: int, writing: int) -> NoReturn:
    """Execute the sources one after the other in one module, which has the name of each; then serve the tests."""
    sources = json.loads(read_message(sources_pipe))
    os.close(sources_pipe)
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
        self.printed: list[str | None] = []  # not sent yet: in turn a stream, and a text for it or None to flush it
        self.streams = {name: Stream(self, name) for name in ("stdin", "stdout", "stderr")}

    def describe(self, value: Any) -> list[Any]:
        able = "callable" if callable(value) else "awaitable" if hasattr(value, "__await__") else ""
        return [able, names_of(type(value))]

    def adopt(self, peer: WirePeer, number: int, *told: Any) -> Any:
        if number < 0:
            return self.found(*told)
        kind, name, can_be_called = told
        return (CallableGuest if can_be_called else Guest)(self, number, kind, name)

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
        """`WirePeer.ask`, after what was printed so far: the tests may print, or look at it."""
        self.flush()
        return self.peer.ask(act, guest, *arguments)

    def flush(self) -> None:
        """Let the tests have what was printed, at once: a message for each text would take long."""
        printed, self.printed = self.printed, []
        if printed:
            self.peer.ask("print", None, tuple(printed))
        for standard in (sys.__stdout__, sys.__stderr__):
            with suppress(Exception):  # the policy's code may have closed it
                standard.flush()  # type: ignore[union-attr]

    def names(self, wanted: tuple[str, ...]) -> dict[str, Any]:
        return {name: vars(self.module)[name] for name in wanted if name in vars(self.module)}

    def follow(self, situation: Mapping[str, Any]) -> None:
        """Take over what the tests changed around us."""
        if "streams" in situation:
            for name in self.streams:
                replaced = name in situation["streams"]
                setattr(sys, name, self.streams[name] if replaced else getattr(sys, f"__{name}__"))
        if "environment" in situation:
            os.environ.clear()
            os.environ.update(situation["environment"])
        if "folder" in situation:
            os.chdir(situation["folder"])
        if "argv" in situation:
            sys.argv = situation["argv"]
        if "random" in situation:
            importlib.import_module("random").setstate(situation["random"])
        if "numpy" in situation:
            importlib.import_module("numpy").random.set_state(situation["numpy"])

    def found(self, module: str, name: str) -> Any:
        """A module, or what it defines under a name; ours where the tests mean the candidate's."""
        here = self.module if module == _MODULE else importlib.import_module(module)
        for part in filter(None, name.split(".")):
            here = getattr(here, part)
        return here

    def patch(self, module: str, name: str, attribute: str, value: Any) -> None:
        target = self.found(module, name)
        own = attribute in vars(target)
        self.patched.setdefault((module, name, attribute), []).append((own, vars(target).get(attribute)))
        setattr(target, attribute, value)

    def unpatch(self, module: str, name: str, attribute: str) -> None:
        target = self.found(module, name)
        own, before = self.patched[module, name, attribute].pop()
        if own:
            setattr(target, attribute, before)
        else:
            delattr(target, attribute)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


class Stream(io.TextIOBase):
    """A standard stream that the tests replaced by one of their own, which gets the same calls in the same order."""

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
        object.__setattr__(self, "_told", (kind, name))

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return object.__getattribute__(self, "_told")[1]
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
        return ask(self, "truth") if self._told[0] in ("mock", "object") else True

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
    """A function of the tests, a class of theirs, or a mock."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask(self, "call", arguments, named)


def ask(guest: Guest, act: str, *arguments: Any) -> Any:
    """`Agent.ask`, of the one that adopted it."""
    return object.__getattribute__(guest, "_agent").ask(guest, act, *arguments)
