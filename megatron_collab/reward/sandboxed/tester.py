"""The tests' process, which decides. It has never run a line of the candidate's code."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from . import demands, mirror
from .candidate import LOADED
from .guests import Guests
from .handles import subject
from .values import Violation
from .wire import Closed, Unjudged, WirePeer, read_message

_leave, _write = os._exit, os.write


class Tester:
    """`verdict`: the pipe into which how it ended is written, once, as JSON; `candidate`: the process of it."""

    def __init__(self, verdict: int, candidate: int, limits: Mapping[str, Any]) -> None:
        self._verdict, self._candidate, self._limits = verdict, candidate, limits

    def run(self, tests_pipe: int, reading: int, writing: int) -> NoReturn:
        """Run the tests of a job: JSON of `prompt`, `tests`, `entry` and `cases`, whether there must be unittest's."""
        sys.argv = [""]
        job = json.loads(read_message(tests_pipe))
        os.close(tests_pipe)
        try:
            tree, prompt = ast.parse(job["tests"], "<tests>"), parsed(job["prompt"])
            needs = demands.demands(tree, prompt, job["entry"])
            if why := demands.refusal(tree) or demands.derived_from_candidate(tree, needs.candidate):
                raise Unjudged(why)
            module = task_module(prompt, needs)
            for name in ("unittest", "numpy"):  # many milliseconds, for those alone who need them
                if name in job["tests"]:
                    importlib.import_module(name)
        except (SyntaxError, Unjudged) as error:
            self.conclude(missing=str(error) if isinstance(error, Unjudged) else f"its tests do not parse: {error}")
        peer = WirePeer(reading, writing, Guests(), self.lost)
        try:
            if read_message(reading) != LOADED:
                raise Violation("not a word of ours")
        except (Closed, Violation) as error:
            self.lost(error)
        sys.addaudithook(_refuse_code_in_data)
        try:
            take_names(peer, module, needs)
            mirror.begin()
            if "seed" in job["tests"]:
                mirror.follow_seeds()
            if "mock" in job["tests"]:
                mirror.follow_patches(peer, {module: "solution"})
            exec(compile(tree, "<tests>", "exec", dont_inherit=True), vars(module))
            run_cases(vars(module), job["cases"])
        except BaseException:
            sys.__excepthook__(*sys.exc_info())
            self.conclude("exit 1")
        self.conclude("")

    def conclude(self, why: str = "", missing: str = "") -> NoReturn:
        """Say how it ended, and end."""
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream:
                stream.flush()
        _write(self._verdict, json.dumps({"why": why, "missing": missing}).encode())
        _leave(0)

    def lost(self, error: Exception) -> NoReturn:
        """The candidate has ended, or its process breaks the rules: its own doing, and no exception that tests see."""
        if isinstance(error, Unjudged):
            self.conclude(missing=str(error))
        if not isinstance(error, Closed | BrokenPipeError):
            print(f"the candidate's process sent what is no value: {error}", file=sys.__stderr__)
            self.conclude("exit 1")
        _, status, used = os.wait4(self._candidate, 0)
        self.conclude(ending(status, used, self._limits["cpu"]) or "exit 0")


def ending(status: int, used: Any, cpu: int) -> str:
    """How a process ended, "" for exit code 0. `used`: its resources; the kernel counts them by samples."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and used.ru_utime + used.ru_stime > 0.5 * cpu:
        return "time"
    return f"signal {-code}" if code < 0 else f"exit {code}" if code else ""


def parsed(prompt: str) -> ast.Module:
    """What a prompt defines, even where it ends with the head of a function; nothing where it is no code."""
    for text in (prompt, f"{prompt}\n    pass\n"):
        try:
            return ast.parse(text, "<prompt>")
        except SyntaxError:
            continue
    return ast.Module([], [])


def task_module(prompt: ast.Module, needs: demands.Demands) -> types.ModuleType:
    """The module in which tests run, with what the prompt defines. Raises Unjudged where the prompt does not run."""
    module = types.ModuleType("tests")
    vars(module)["__name__"] = "prompt"
    sys.modules["prompt"] = module
    try:
        exec(compile(prompt, "<prompt>", "exec", dont_inherit=True), vars(module))
        for name, place in needs.imports.items():
            where, _, attribute = place.partition(":")
            found = importlib.import_module(where)
            vars(module)[name] = getattr(found, attribute) if attribute else found
    except Exception as error:
        raise Unjudged(f"what its prompt or its tests need does not run: {type(error).__name__}: {error}") from error
    vars(module)["__name__"] = "tests"
    sys.modules["tests"] = sys.modules["__main__"] = module
    return module


def take_names(peer: WirePeer, module: types.ModuleType, needs: demands.Demands) -> None:
    """Give the tests the candidate's names; those of no other may be had by `from solution import`."""

    def named(name: str) -> Any:
        found = peer.ask("names", None, (name,))
        if type(found) is not dict or name not in found:
            raise AttributeError(f"the candidate has no {name}")
        return subject(found[name])

    found = peer.ask("names", None, needs.candidate)
    if type(found) is not dict or not set(found) <= set(needs.candidate):
        raise Violation("other names than were asked for")
    vars(module).update((name, subject(value)) for name, value in found.items())
    for name in set(needs.candidate) - set(found):
        vars(module).pop(name, None)
    solution = types.ModuleType("solution")
    vars(solution)["__getattr__"] = named
    sys.modules["solution"] = solution


def run_cases(namespace: dict[str, Any], must: bool) -> None:
    """Run the unittest cases that the tests define. AssertionError where one fails, is skipped, or none is there."""
    if "unittest" not in sys.modules:
        assert not must, "no test has run"
        return
    import unittest

    kinds = [kind for kind in list(namespace.values()) if isinstance(kind, type) and kind.__module__ == "tests"]
    cases = [kind for kind in kinds if issubclass(kind, unittest.TestCase)]
    suites = map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)
    result = unittest.TextTestRunner().run(unittest.TestSuite(suites))
    assert result.wasSuccessful() and not result.skipped
    assert result.testsRun or (not must and not cases), "no test has run"


def _refuse_code_in_data(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("pickle.find_class", "sqlite3.enable_load_extension"):
        raise PermissionError(f"{event}: files that the candidate can write must run no code here")
