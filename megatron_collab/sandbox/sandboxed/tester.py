"""The tests' process, which gives the verdict. It never runs the candidate's code."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from . import demands, mirror
from .candidate import BEGIN, LOADED
from .guests import Guests
from .handles import mark_subject
from .values import Violation
from .wire import Closed, Unjudged, WirePeer, read_message, write_message

_leave, _write = os._exit, os.write


class Tester:
    """`verdict`: the pipe for the result, written once, as JSON; `candidate`: id of the candidate's process."""

    def __init__(self, verdict: int, candidate: int, limits: Mapping[str, Any]) -> None:
        self._verdict, self._candidate, self._limits = verdict, candidate, limits

    def run(self, tests_pipe: int, reading: int, writing: int) -> NoReturn:
        """Run the tests of a job: JSON of `prompt`, `tests`, `entry` and `cases` (whether unittest cases must run)."""
        sys.argv = [""]
        job = json.loads(read_message(tests_pipe))
        os.close(tests_pipe)
        try:
            tree, prompt = ast.parse(job["tests"], "<tests>"), parsed(job["prompt"])
            demanded = demands.demands(tree, prompt, job["entry"])
            why = demands.refusal(tree) or demands.derived_from_candidate(tree, demanded.candidate)
            if why := why or (job["tests"] and demands.never_run(tree, demanded.functions)):
                raise Unjudged(why)
            module = task_module(prompt, demanded)
            write_message(writing, BEGIN)
        except (SyntaxError, Unjudged) as error:
            self.conclude(missing=str(error) if isinstance(error, Unjudged) else f"its tests do not parse: {error}")
        for name in ("unittest", "numpy"):  # slow to import, so only if needed
            if name in job["tests"]:
                importlib.import_module(name)
        peer = WirePeer(reading, writing, Guests(), self.lost)
        try:
            if read_message(reading) != LOADED:
                raise Violation("unexpected handshake")
        except (Closed, Violation) as error:
            self.lost(error)
        sys.addaudithook(_refuse_code_in_data)
        try:
            take_names(peer, module, demanded)
            mirror.begin()
            if "seed" in job["tests"]:
                mirror.follow_seeds()
            if "mock" in job["tests"]:
                mirror.follow_patches(peer, {module: "solution"})
            exec(compile(tree, "<tests>", "exec", dont_inherit=True), vars(module))
            run_tests(vars(module), demanded.functions, job["cases"])
        except BaseException:
            sys.__excepthook__(*sys.exc_info())
            self.conclude("exit 1")
        self.conclude("")

    def conclude(self, why: str = "", missing: str = "") -> NoReturn:
        """Write the result and exit."""
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream:
                stream.flush()
        _write(self._verdict, json.dumps({"why": why, "missing": missing}).encode())
        _leave(0)

    def lost(self, error: Exception) -> NoReturn:
        """Conclude if the candidate's process ended or broke the protocol: it fails, and the tests see no exception."""
        if isinstance(error, Unjudged):
            self.conclude(missing=str(error))
        if not isinstance(error, Closed | BrokenPipeError):
            print(f"the candidate's process sent invalid data: {error}", file=sys.__stderr__)
            self.conclude("exit 1")
        _, status, used = os.wait4(self._candidate, 0)
        self.conclude(ending(status, used, self._limits["cpu"]) or "exit 0")


def ending(status: int, used: Any, cpu: int) -> str:
    """How a process ended, "" for exit code 0. `used`: its resource usage, which the kernel samples."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and used.ru_utime + used.ru_stime > 0.5 * cpu:
        return "time"
    return f"signal {-code}" if code < 0 else f"exit {code}" if code else ""


def parsed(prompt: str) -> ast.Module:
    """The syntax tree of a prompt, which may end with the head of a function; empty if the prompt is not code."""
    for text in (prompt, f"{prompt}\n    pass\n"):
        try:
            return ast.parse(text, "<prompt>")
        except SyntaxError:
            continue
    return ast.Module([], [])


def task_module(prompt: ast.Module, demanded: demands.Demands) -> types.ModuleType:
    """The module in which tests run, with the prompt's definitions. Raises Unjudged if the prompt does not run."""
    module = types.ModuleType("tests")
    vars(module)["__name__"] = "prompt"
    sys.modules["prompt"] = module
    try:
        exec(compile(prompt, "<prompt>", "exec", dont_inherit=True), vars(module))
        for name, path in demanded.imports.items():
            source, _, attribute = path.partition(":")
            imported = importlib.import_module(source)
            vars(module)[name] = getattr(imported, attribute) if attribute else imported
    except Exception as error:
        raise Unjudged(f"its prompt or an import of its tests fails: {type(error).__name__}: {error}") from error
    vars(module)["__name__"] = "tests"
    sys.modules["tests"] = sys.modules["__main__"] = module
    return module


def take_names(peer: WirePeer, module: types.ModuleType, demanded: demands.Demands) -> None:
    """Define the candidate's names in the tests' module; `from solution import` gives further ones."""

    def get_name(name: str) -> Any:
        values = peer.ask("names", None, (name,))
        if type(values) is not dict or name not in values:
            raise AttributeError(f"the candidate has no {name}")
        return mark_subject(values[name])

    values = peer.ask("names", None, demanded.candidate)
    if type(values) is not dict or not set(values) <= set(demanded.candidate):
        raise Violation("unrequested names")
    vars(module).update((name, mark_subject(value)) for name, value in values.items())
    for name in set(demanded.candidate) - set(values):
        vars(module).pop(name, None)
    solution = types.ModuleType("solution")
    vars(solution)["__getattr__"] = get_name
    sys.modules["solution"] = solution


def run_tests(namespace: dict[str, Any], functions: Sequence[str], required: bool) -> None:
    """Run the tests' functions and unittest cases. Raises AssertionError if a case fails, or if none has run.

    Every case must run to the end of its method: unittest counts no failure for an exception that it swallows.
    """
    for name in functions:
        namespace[name]()
    if "unittest" not in sys.modules:
        assert functions or not required, "no test has run"
        return
    import unittest

    kinds = [kind for kind in list(namespace.values()) if issubclass(type(kind), type) and kind.__module__ == "tests"]
    cases = [kind for kind in dict.fromkeys(kinds) if issubclass(kind, unittest.TestCase)]
    tests = [test for kind in cases for test in unittest.defaultTestLoader.loadTestsFromTestCase(kind)]
    identities, ended = sorted(map(id, tests)), list[int]()
    for test in tests:
        _note_end(test, ended)
    result = unittest.TextTestRunner().run(unittest.TestSuite(tests))
    assert result.wasSuccessful() and not (result.skipped or result.expectedFailures), "a test did not pass"
    assert sorted(ended) == identities, "a test did not run to its end"
    assert tests or functions or (not required and not cases), "no test has run"


def _note_end(test: Any, ended: list[int]) -> None:
    """Add the identity of a case to `ended` when its method has run to the end."""
    import inspect  # takes long
    import unittest

    name = unittest.TestCase.id(test).rpartition(".")[2]
    method = getattr(test, name)

    @functools.wraps(method)
    def noted() -> None:
        method()
        ended.append(id(test))

    @functools.wraps(method)
    async def noted_later() -> None:
        await method()
        ended.append(id(test))

    setattr(test, name, noted_later if inspect.iscoroutinefunction(method) else noted)


def _refuse_code_in_data(event: str, arguments: tuple[Any, ...]) -> None:
    parsing = event == "exec" and sys._getframe(1).f_globals.get("__name__") == "sympy.parsing.sympy_parser"
    if parsing or event in ("pickle.find_class", "sqlite3.enable_load_extension"):
        raise PermissionError(f"{event}: what the candidate returns or writes must not run code here")
