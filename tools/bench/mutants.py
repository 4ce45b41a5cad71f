"""Do the tests notice a fault? One operator, constant, comparison or line at a time is changed, and the tests run.

`python tools/bench/mutants.py [--seed 0] [--mutants 400]` samples mutants of TARGETS: modules whose results are plain
values, with a formula or an invariant behind them. First the tests without processes of the mirrored folders,
and of other files that import a target, run once, which records the lines that each test executes. Then the tests are
collected, and each mutant is a fork of this process, in which the functions of the mutated file get their new code;
tests that cover the mutated line run first, then those beside them in their files, until one fails. A line that is
executed by an import, such as a constant of a module, is mutated before the import, in a fork that has not imported the
package. A failed import counts as a failure, and so does a mutant that hangs.

- mutants: how many were sampled.
- equivalent: how many of them behave as the original does, by an entry of mutants.toml beside this file.
- killed: the share of the other mutants that some test notices; the aim is 0.92. If no test covers a line, its mutants
  live.

Every mutant is printed with its fate. A line that begins with `error` is printed if an entry of mutants.toml matches no
mutant or is killed by a test, and if a test fails without a mutation; that test is left out.

Not mutated: annotations, decorators, asserts, error messages, texts of several words, `strict=` of zip.

--smoke: 10 mutants of one file. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_collab"
EQUIVALENT = Path(__file__).with_suffix(".toml")
TARGETS = (
    "algo/advantages.py",
    "algo/credit.py",
    "algo/policy_loss.py",
    "data/chat_template.py",
    "llm/limiter.py",
    "reward/multiturn.py",
    "rollout/journal.py",
    "rollout/scheduler.py",
    "trainer/losses.py",
    "trainer/microbatches.py",
    "trainer/prefix_tree.py",
    "weight_sync/overlap.py",
    "weight_sync/plan.py",
)
SMOKE = ("reward/multiturn.py", "tests/reward/test_multiturn.py")
LANE = "not gpu and not slurm and not slow and not processes"
LIBRARIES = ("torch", "aiohttp", "datasets", "hydra", "hypothesis", "litellm", "pytest", "ray", "transformers")
MEMORY = 12 * 2**30  # bytes of a mutant, which may append without end
START, PATIENCE = 30.0, 5.0  # CPU seconds for imports, and how many times as long as usual the tests of a mutant take
ASLEEP = 60  # seconds after which a mutant that sleeps counts as hanging
MONITOR = sys.monitoring

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PAIRS = (("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"))
NAMES = dict([*PAIRS, *((opposite, name) for name, opposite in PAIRS)])
REMOVED = (ast.Expr, ast.AugAssign, ast.Assign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """`attribute` of the node with the number `place` in ast.walk of `file` becomes `value`."""

    file: str
    place: int
    attribute: str
    value: Any
    line: int
    statement: frozenset[int]  # its lines, without its body
    before: str  # the source, and what it becomes
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What mutants.toml calls it; mutants of equal lines share it."""
        return self.file, self.before, self.after

    def tree(self) -> ast.Module:
        tree = parse(self.file)
        setattr(list(ast.walk(tree))[self.place], self.attribute, self.value)
        return ast.fix_missing_locations(tree)


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file, in the order of its nodes."""
    tree, source = parse(file), (PACKAGE / file).read_text().encode().splitlines()
    places = {node: place for place, node in enumerate(ast.walk(tree))}

    def visit(node: Any, statement: Any) -> Iterator[Mutant]:
        for attribute, value, replaced, text in changes(node):
            holder: Any = replaced if isinstance(replaced, ast.stmt) else statement
            block = getattr(holder, "body", None)
            last = max(holder.lineno, block[0].lineno - 1) if block else holder.end_lineno
            lines = {*range(holder.lineno, last + 1), *range(replaced.lineno, replaced.end_lineno + 1)}
            around = source[replaced.lineno - 1 : replaced.end_lineno]
            start, end = around[0][: replaced.col_offset].decode(), around[-1][replaced.end_col_offset :].decode()
            before, after = b" ".join(around).decode(), start + text + end
            shown = (" ".join(words.split()) for words in (before, after))
            yield Mutant(file, places[node], attribute, value, replaced.lineno, frozenset(lines), *shown)
        for child in children(node):
            yield from visit(child, child if isinstance(child, ast.stmt | ast.ExceptHandler) else statement)

    yield from visit(tree, tree)


def changes(node: ast.AST) -> Iterator[tuple[str, Any, Any, str]]:
    """For each mutation of a node: its attribute, the new value, and the node that is replaced by which text."""

    def changed(attribute: str, value: Any) -> tuple[str, Any, ast.AST, str]:
        mutated = copy(node)
        setattr(mutated, attribute, value)
        return attribute, value, node, ast.unparse(mutated)

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield changed("op", OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", ast.UnaryOp(ast.Not(), operand), node, ast.unparse(operand)
        case ast.Compare(ops=ops):
            for place, comparison in enumerate(ops):
                yield changed("ops", [*ops[:place], OPERATORS[type(comparison)](), *ops[place + 1 :]])
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "test", ast.UnaryOp(ast.Not(), test), test, f"not {ast.unparse(test)}"
        case ast.Constant(value=bool() as value):
            yield changed("value", not value)
        case ast.Constant(value=int() as value):
            yield changed("value", value + 1)
        case ast.Constant(value=float() as value):
            yield changed("value", 2 * value or 1.0)
        case ast.Constant(value=str() as value) if re.fullmatch(r"\w+", value):
            yield changed("value", f"{value}x")
        case ast.Name(id=name) if name in NAMES:
            yield changed("id", NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield changed("attr", NAMES[name])
    for block in ("body", "orelse", "finalbody"):
        statements: Any = getattr(node, block, None)
        for place, statement in enumerate(statements if isinstance(statements, list) else []):
            if removable(statement, node):
                yield block, [*statements[:place], ast.Pass(), *statements[place + 1 :]], statement, "pass"


def removable(statement: ast.stmt, owner: ast.AST) -> bool:
    """Whether the statement may be removed: no text, no definition of a local name, no return at a function's end."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name() | ast.Tuple()]):
            return False
        case ast.Return() if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            return statement is not owner.body[-1]
    return isinstance(statement, REMOVED)


def children(node: ast.AST) -> Sequence[ast.AST | None]:
    """The children that are mutated; the module's docstring lists the others."""
    match node:
        case ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.arg() | ast.keyword(arg="strict"):
            return []
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.args, *node.body]
        case ast.ClassDef():
            return node.body
        case ast.AnnAssign() | ast.FormattedValue():
            return [node.value] if node.value else []
        case ast.JoinedStr():
            return [part for part in node.values if isinstance(part, ast.FormattedValue)]
    return list(ast.iter_child_nodes(node))


class Finder:
    """Imports files of the package from trees instead of their sources; calls `watch` with the code of each file."""

    def __init__(self, trees: Mapping[str, ast.Module], watch: Callable[[CodeType], None] = lambda code: None) -> None:
        self.trees, self.watch = trees, watch

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        file, finder = f"{name.partition('.')[2].replace('.', '/')}.py", self
        if not name.startswith(f"{PACKAGE.name}.") or file not in self.trees:
            return None

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                code = compiled(file, finder.trees[file])
                finder.watch(code)
                return code

        path = str(PACKAGE / file)
        return spec_from_file_location(name, path, loader=Loader(name, path))


def compiled(file: str, tree: ast.Module) -> CodeType:
    code: CodeType = compile(tree, str(PACKAGE / file), "exec", dont_inherit=True)
    return code


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code object and those of all definitions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def file_of(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True)
class Suite:
    """The tests that pass without a mutation, with their seconds, and by (file, line) the tests that execute it.

    The name is empty if an import executes the line.
    """

    seconds: Mapping[str, float]
    tests: Mapping[tuple[str, int], set[str]]
    failed: Sequence[str]

    def covering(self, mutant: Mutant) -> tuple[set[str], bool]:
        """Tests that execute the mutated line, and whether the import does; if so, all tests that execute the file."""
        names = set().union(*(self.tests.get((mutant.file, line), ()) for line in mutant.statement))
        if at_import := "" in names:
            names = set().union(*(names for (file, _), names in self.tests.items() if file == mutant.file))
        return names & self.seconds.keys(), at_import

    def beside(self, covering: set[str]) -> list[str]:
        """All tests in the files of `covering`, which come first, by files that take least time and by seconds."""
        totals: defaultdict[str, float] = defaultdict(float)
        for name in covering:
            totals[file_of(name)] += self.seconds[name]
        names = [name for name in self.seconds if file_of(name) in totals]
        return sorted(names, key=lambda name: (name not in covering, totals[file_of(name)], self.seconds[name]))


class Collected:
    """A pytest plugin that calls `act` when the tests are collected, instead of running them."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act, self.result = act, None

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)  # a failure is enough, and need not be small
        settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: Any) -> bool:
        self.result = self.act(session)
        return True


def collect(act: Callable[[Any], Any], tests: Iterable[str]) -> Any:
    """Returns act(session), or None if the tests cannot be collected."""
    import pytest

    plugin = Collected(act)
    pytest.main(["-m", LANE, "-s", "-p", "no:terminal", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    return plugin.result


def run_unmutated(tests: Iterable[str]) -> Suite:
    """Run the tests without a mutation."""
    executed: dict[tuple[str, int], set[str]] = defaultdict(set)
    files = {str(PACKAGE / file): file for file in TARGETS}
    seconds, failed, running = dict[str, float](), list[str](), ""

    def watch(module: CodeType) -> None:
        for code in codes(module):
            MONITOR.set_local_events(MONITOR.COVERAGE_ID, code, MONITOR.events.LINE)

    def reached(code: CodeType, line: int) -> Any:
        executed[files[code.co_filename], line].add(running)
        return MONITOR.DISABLE  # until the next test

    def act(session: Any) -> None:
        nonlocal running
        for item, following in pairwise([*session.items, None]):
            began, failures, running = time.monotonic(), session.testsfailed, item.nodeid
            MONITOR.restart_events()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed > failures:
                failed.append(running)
            else:
                seconds[running] = time.monotonic() - began

    MONITOR.use_tool_id(MONITOR.COVERAGE_ID, "mutants")
    MONITOR.register_callback(MONITOR.COVERAGE_ID, MONITOR.events.LINE, reached)
    sys.meta_path.insert(0, Finder({file: parse(file) for file in TARGETS}, watch))
    collect(act, tests)
    return Suite(seconds, executed, failed)


def killer(session: Any, names: Sequence[str]) -> str:
    """The first of these tests that fails; empty if all pass."""
    items = {item.nodeid: item for item in session.items}
    for name, following in zip(names, [*names[1:], None], strict=True):
        item = items[name]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
        if session.testsfailed:
            return name
    return ""


def killer_of_functions(mutant: Mutant, names: Sequence[str], session: Any, functions: Sequence[FunctionType]) -> str:
    """Like `killer`, after `functions` of the mutant's file have got its code."""
    code = {(code.co_qualname, code.co_firstlineno): code for code in codes(compiled(mutant.file, mutant.tree()))}
    for function in functions:
        if function.__code__.co_filename == str(PACKAGE / mutant.file):
            place = function.__code__.co_qualname, function.__code__.co_firstlineno
            function.__code__ = code.get(place, function.__code__)  # a lambda of a line that is left out has none
    return killer(session, names)


def killer_after_import(mutant: Mutant, names: Sequence[str]) -> str:
    """Like `killer`, after the package has been imported with the mutant."""
    sys.meta_path.insert(0, Finder({mutant.file: mutant.tree()}))
    name = collect(partial(killer, names=names), dict.fromkeys(map(file_of, names)))
    return "its import" if name is None else str(name)


def in_fork(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Returns `function(*arguments)` from a fork; None if it takes more CPU `seconds`, sleeps too long, or dies."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    errors = os.fdopen(os.dup(2), "w")

    def child(folder: str) -> None:
        os.setsid()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            sender.send(function(*arguments))
        except Exception:
            traceback.print_exc(file=errors)
            raise

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = multiprocessing.get_context("fork").Process(target=child, args=(folder,))
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            process.start()  # libraries have threads, which the child does not use
        pid = process.pid
        assert pid is not None
        sender.close()
        asleep = 0
        try:
            while not receiver.poll(1.0):
                asleep = asleep + 1 if psutil.Process(pid).status() == psutil.STATUS_SLEEPING else 0
                if asleep > ASLEEP:
                    return None
            return receiver.recv()
        except EOFError:
            process.join()
            if process.exitcode == 1:
                raise RuntimeError(f"{function.__name__} failed in a fork") from None
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join()


def covering_tests() -> list[str]:
    """The folders of tests that mirror those of TARGETS, and other test files that import one of TARGETS."""
    folders = {f"tests/{Path(file).parent}" for file in TARGETS}
    imports = "|".join(rf"{Path(file).parent}(\.| import (.*\b)?){Path(file).stem}\b" for file in TARGETS)
    importing = re.compile(rf"\b{PACKAGE.name}\.({imports})")
    tests = ROOT.glob("tests/**/test_*.py")
    importing_files = {str(file.relative_to(ROOT)) for file in tests if importing.search(file.read_text())}
    return sorted(folders | {file for file in importing_files if "/".join(Path(file).parts[:2]) not in folders})


def preload() -> None:
    """Import slow libraries, but nothing that imports a target, in the environment of the tests."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import_module("megatron_collab.patches").apply("megatron", "litellm")
    for library in LIBRARIES:
        import_module(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--mutants", type=int, default=400, help="how many are sampled")
    parser.add_argument("--smoke", action="store_true", help="10 mutants of one file: shows that it runs, no figures")
    options = parser.parse_args()
    targets: Sequence[str] = TARGETS
    tests, number = covering_tests(), options.mutants
    if options.smoke:
        targets, tests, number = SMOKE[:1], [*SMOKE[1:]], 10
    everything = [mutant for file in TARGETS for mutant in mutants(file)]
    entries = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    equivalent = {(entry["file"], entry["line"], entry["mutation"]) for entry in entries}
    for key in sorted(equivalent - {mutant.key for mutant in everything}):
        print(f"error: an entry of {EQUIVALENT.name} matches no mutant: {key}", flush=True)
    sample = random.Random(options.seed).sample([mutant for mutant in everything if mutant.file in targets], number)
    sample.sort(key=lambda mutant: (mutant.file, mutant.place))

    preload()
    suite = in_fork(run_unmutated, tests, seconds=3600.0)
    print(f"{len(suite.seconds)} tests, {sum(suite.seconds.values()):.0f} s", flush=True)
    for name in suite.failed:
        print(f"error: {name} fails without a mutation", flush=True)
    counts: dict[str, Counter[str]] = {file: Counter() for file in targets}

    def judge(session: Any, at_import: bool) -> bool:
        """Find, print and count the fate of the mutants whose line is executed at import, if `at_import`, or later."""
        gc.unfreeze()  # get_objects leaves out what the tests' conftest has frozen
        gc.collect()
        functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
        gc.freeze()  # else every fork would copy what the collector looks at
        for mutant in sample:
            covering, early = suite.covering(mutant)
            if early != at_import:
                continue
            began, name = time.monotonic(), ""
            if covering:
                names = suite.beside(covering)
                limit = START + PATIENCE * sum(suite.seconds[name] for name in names)
                call = (
                    [killer_after_import, mutant, names]
                    if early
                    else [killer_of_functions, mutant, names, session, functions]
                )
                name = in_fork(*call, seconds=limit)
            fate = "killed" if name != "" else "equivalent" if mutant.key in equivalent else "lives"
            counts[mutant.file][fate] += 1
            if fate == "killed" and mutant.key in equivalent:
                print(f"error: an entry of {EQUIVALENT.name} is killed: {mutant.key}", flush=True)
            detail = f"{time.monotonic() - began:.1f} s, {len(covering)} tests, {'hangs' if name is None else name}"
            print(f"{fate}\t{mutant.file}:{mutant.line}\t{mutant.before}\t{mutant.after}\t{detail}", flush=True)
        return True

    judge(None, at_import=True)
    if not collect(partial(judge, at_import=False), tests):
        raise SystemExit("the tests cannot be collected")
    for file, counted in counts.items():
        print(f"{file:24} {dict(counted)}")
    total = sum(counts.values(), Counter[str]())
    killed = total["killed"] / max(1, total["killed"] + total["lives"])
    values = {"mutants": number, "killed": round(killed, 4), "equivalent": total["equivalent"]}
    print(json.dumps({"name": "mutants", "values": values}))


if __name__ == "__main__":
    main()
