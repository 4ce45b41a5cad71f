"""The Python code of a conversation: the fenced blocks of all replies of the policy, merged; later definitions win.

The merged program is a backward slice (Weiser, Program slicing, 1981) of the top-level statements of all blocks:
definitions, and of other statements those that bind or change what these need.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

from megatron_collab.reward.metrics.code_statements import DEFINITION, RUNNERS, Statement, parse, statements

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^`]*")
_PYTHON = re.compile(r"\{?\.?(?:i?python|py)[\d.]*(?:[^\w-].*)?")  # also python3.12, python:a.py, {.python}; not pycon
_MAGIC = re.compile(r"^[ \t]*[!%].*", re.MULTILINE)  # commands of the shell and of IPython
_MOST_CLOSINGS = 16  # fences inside strings of one block that are tried
_BUILTINS = frozenset(dir(builtins))
_READ_BY_ALL = ("*", "__builtins__", "globals", "exec")  # by which code may bind any name

_Effects = Mapping[Statement, Set[str]]  # names that a statement binds, or whose objects it changes, in written order
_Causes = Mapping[str, Sequence[Statement]]  # of each name the statements with effects on it


def merged(replies: Sequence[str], names: Collection[str] = ()) -> str:
    """The code of all replies: the definitions of `names`, and the statements that these need.

    Definitions are functions, classes, and what binds one of `names` that is no builtin. Needed are also functions and
    classes that read a name of the conversation when they are defined, as those that a decorator registers. If no
    definition has one of `names`, all of them count as needed.

    If blocks bind a name again, the last of them counts, and stands in front of what needs it when it runs. Of the
    other statements those stay that bind or change what the remaining code reads, by whatever assignment, loop or call,
    and those in front of a definition of their block that change a module. Statements behind the last definition of a
    block are an example if one of them calls a definition without changing what the definitions read: what they bind
    stays only if nothing else binds it.

    A later definition wins even if its block does not parse. If no block defines anything, the code is the last block
    of the last reply with one, which may continue the code of the task; without a block it is the last reply.
    """
    fenced = [_blocks(reply) for reply in replies]
    blocks = [text for reply, texts in zip(replies, fenced, strict=True) for text in texts or filter(parses, [reply])]
    written = [statement for number, text in enumerate(blocks) for statement in statements(text, number)]
    functions = {name for statement in written for name in statement.defines}
    bound = {name for statement in written for name in statement.binds}
    defined = functions | (bound.intersection(names) - _BUILTINS)
    if not defined:
        return ["", *replies, *(text for texts in fenced for text in texts)][-1]
    written = [statement for statement in written if not _imports_own(statement, functions)]
    last = {statement.block: i for i, statement in enumerate(written) if not defined.isdisjoint(statement.binds)}
    behind = {statement for i, statement in enumerate(written) if i > last.get(statement.block, -1)}
    modules = {name for statement in written for name in statement.imports}
    effects = _latest(_without_examples(_effects(written, behind, defined, modules), behind, defined), modules)
    current = {statement.block for statement in written if not defined.isdisjoint(statement.binds & effects[statement])}
    settings = [
        statement
        for statement in written
        if statement.block in current
        and statement not in behind
        and not modules.isdisjoint(effects[statement] - statement.binds)
    ]
    registered = {name for s in written if not s.at_once.isdisjoint(bound - modules) for name in s.defines}
    tested = defined.intersection(names)
    kept, _ = _slice(_causes(effects), [*(tested | registered if tested else defined), *_READ_BY_ALL], settings)
    ordered = _Order({statement: effects[statement] for statement in written if statement in kept}).statements()
    future = dict.fromkeys(statement.text for statement in written if _of_future(statement))
    return "".join(f"{text}\n" for text in [*future, *(s.text for s in ordered if not _of_future(s))])


def extract(reply: str) -> str:
    """The code of one reply: its last block of code, else all."""
    return [reply, *_blocks(reply)][-1]


def parses(code: str) -> bool:
    return parse(code) is not None


def _imports_own(statement: Statement, functions: Set[str]) -> bool:
    """Whether it imports only definitions of the conversation, from a module that is not Python's own."""
    if not isinstance(statement.node, ast.ImportFrom):
        return False
    library = not statement.node.level and (statement.node.module or "").partition(".")[0] in sys.stdlib_module_names
    return not library and statement.binds <= functions


def _of_future(statement: Statement) -> bool:
    """Whether it has to stand in front of all code."""
    return isinstance(statement.node, ast.ImportFrom) and statement.node.module == "__future__"


def _effects(
    written: Sequence[Statement], behind: Set[Statement], defined: Set[str], modules: Set[str]
) -> dict[Statement, Set[str]]:
    """Behind the definitions of a block a module is changed only by statements that read nothing but modules.

    A call of a definition changes no module, and only what is also read by definitions that it does not call. What is
    bound by no name may be one of `import *`: in front of a definition its change stays.
    """
    binders = _causes({statement: statement.binds for statement in written})
    bound = binders.keys()
    readers = defaultdict[str, set[Statement]](set)
    aliases = defaultdict[str, set[str]](set)
    for statement in _slice(binders, defined)[0]:
        for name in statement.reads:
            readers[name].add(statement)
    for statement in written:
        for name, objects in statement.aliases:
            aliases[name] |= objects
    effects, slices = dict[Statement, Set[str]](), dict[Set[str], tuple[set[Statement], Set[str]]]()
    for statement in written:
        changed = set[str]()
        for change in statement.changes if not statement.defines else ():
            called = frozenset(change.calls & defined)
            if not called:
                changed |= _reached([*change.objects, *filter(None, [change.root])], aliases)
                continue
            if called not in slices:
                within, _ = _slice(binders, called)
                inside = (name for body in within if body.defines for c in body.changes for name in c.objects)
                slices[called] = within, _reached(inside, aliases)
            within, inside_names = slices[called]
            names = (_reached(change.objects, aliases) | inside_names) - modules
            changed |= {name for name in names if not readers[name] <= within}
        if statement not in behind and "*" in bound and not changed <= bound | _BUILTINS:
            changed.add("*")
        if statement in behind and not statement.reads & bound <= modules:
            changed -= modules
        effects[statement] = statement.binds | changed
    return effects


def _reached(names: Iterable[str], edges: Mapping[str, Set[str]]) -> set[str]:
    reached, pending = set[str](), [*names]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += edges.get(name, ())
    return reached


def _without_examples(effects: _Effects, behind: Set[Statement], defined: Set[str]) -> _Effects:
    """What examples bind or change stays only if neither another statement nor Python binds it."""
    _, read = _slice(_causes(effects), [*defined])
    read -= _BUILTINS
    shows = [s for s in behind if read.isdisjoint(effects[s]) and not s.calls.isdisjoint(defined | RUNNERS)]
    blocks = {statement.block for statement in shows}
    examples = {statement for statement in behind if statement.block in blocks}
    elsewhere = {"*", *_BUILTINS}.union(*(statement.binds for statement in effects if statement not in examples))
    return {s: names - elsewhere if s in examples else names for s, names in effects.items()}


def _latest(effects: _Effects, modules: Set[str]) -> _Effects:
    """The effects on names that no later block binds again; an import does not undo changes of its module."""
    latest = {name: statement for statement in effects for name in statement.replaces & effects[statement]}

    def stays(name: str, statement: Statement) -> bool:
        newest = latest.get(name, statement)
        of_package = _of_package(name, statement) and _of_package(name, newest)
        return statement.block >= newest.block or of_package or name in modules - statement.binds

    return {statement: {name for name in names if stays(name, statement)} for statement, names in effects.items()}


def _of_package(name: str, statement: Statement) -> bool:
    """Whether it imports the package of this name or modules in it, by `import a.b` without `as`."""
    aliases = statement.node.names if isinstance(statement.node, ast.Import) else ()
    return any(not alias.asname and alias.name.partition(".")[0] == name for alias in aliases)


def _causes(effects: _Effects) -> _Causes:
    causes = defaultdict[str, list[Statement]](list)
    for statement, changed in effects.items():
        for name in changed:
            causes[name].append(statement)
    return causes


def _slice(
    causes: _Causes, names: Iterable[str], settings: Sequence[Statement] = ()
) -> tuple[set[Statement], set[str]]:
    """The statements that bind or change a name of `names`, or one that `settings` or they read; all these names."""
    kept, reached = {*settings}, set[str]()
    pending = [*names, *(name for statement in settings for name in statement.reads)]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        for statement in causes.get(name, ()):
            if statement not in kept:
                kept.add(statement)
                pending += statement.reads
    return kept, reached


class _Order:
    """Statements in written order, but each behind what it needs when it runs, also in functions that it may call.

    If only later blocks bind a name, all that binds or changes it in them is brought forward; unless only a function
    that may be called reads it, and it needs a statement that waits for this one.
    """

    def __init__(self, effects: _Effects) -> None:
        self._written = [*effects]
        self._first = dict[str, int]()  # number of the statement that binds the name
        self._causes = defaultdict[str, list[int]](list)
        self._reads = defaultdict[str, set[str]](set)  # by what binds or changes the name
        self._needed_by = defaultdict[str, set[str]](set)  # names that it binds or changes when it runs
        for i, statement in enumerate(self._written):
            for name in statement.binds & effects[statement]:
                self._first.setdefault(name, i)
            for name in statement.binds | effects[statement]:
                self._causes[name].append(i)
                self._reads[name] |= statement.reads
            for name in statement.at_once:
                self._needed_by[name] |= effects[statement]
        self._newest = max((self._written[i].block for i in self._first.values()), default=0)

    def statements(self) -> list[Statement]:
        done, waiting = dict[int, None](), dict[int, None]()
        for start in range(len(self._written)):
            stack = [start]
            while stack:
                i = stack[-1]
                if i in done:
                    stack.pop()
                    continue
                required = () if i in waiting else self._required(i, start, waiting)
                waiting[i] = None
                stack += (need for need in reversed(required) if need not in done and need not in waiting)
                if stack[-1] == i:
                    del waiting[i]
                    done[stack.pop()] = None
        return [self._written[i] for i in done]

    def _required(self, at: int, start: int, waiting: Iterable[int]) -> Sequence[int]:
        """What has to stand in front of number `at`; what stands in front of `start` does."""
        statement = self._written[at]
        if at == start and statement.block >= self._newest:
            return ()
        surely = {need for name in statement.at_once | statement.binds for need in self._before(name, at, start)}
        names = _reached(statement.at_once, self._reads)
        maybe = {need for name in names for need in self._before(name, at, start)} - surely
        unsettled = (name for i in (*waiting, at) for name in self._written[i].binds)
        blocked = _reached(unsettled, self._needed_by) if maybe else set()
        return [*sorted(surely), *(i for i in sorted(maybe) if blocked.isdisjoint(self._written[i].at_once))]

    def _before(self, name: str, at: int, start: int) -> Iterator[int]:
        late = self._first.get(name, at) > at and name not in self._written[at].binds
        for i in self._causes.get(name, ()):
            if start <= i < at or (late and self._written[i].block > self._written[at].block):
                yield i


def _blocks(reply: str) -> list[str]:
    """The blocks fenced as Python, and others that define a function or a class; else those without a language."""
    fenced = [(language, _without_magic(code)) for language, code in _fenced(reply.split("\n"))]
    blocks = [block for block in fenced if block[1].strip()]
    python = [
        code for language, code in blocks if _PYTHON.fullmatch(language) or (DEFINITION.search(code) and parses(code))
    ]
    return python or [code for language, code in blocks if not language]


def _without_magic(code: str) -> str:
    """The code without commands of the shell and of IPython, if it parses only without them."""
    plain = _MAGIC.sub("", code)
    return plain if plain != code and not parses(code) and parses(plain) else code


def _fenced(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Language, in lower case, and content of each fenced block (CommonMark 4.5, at any indentation).

    The fences and the indentation of the opening fence are removed; an unclosed block extends to the end. Code may
    contain fences in its strings. If it does not parse up to the first fence that could close it, the block ends at the
    first later fence (of the next 15), or at the end of the reply if fewer follow, up to which it parses.
    """
    at = 0
    while at < len(lines):
        opening = _OPENING.fullmatch(lines[at].rstrip())
        at += 1
        if not opening:
            continue
        fence, indent = opening["fence"], len(opening["indent"])
        marks = ((i, lines[i].strip()) for i in range(at, len(lines)))
        closings = (i for i, mark in marks if mark.startswith(fence) and set(mark) == {fence[0]})
        ends = [*islice(closings, _MOST_CLOSINGS)]
        ends += [len(lines)] if len(ends) < _MOST_CLOSINGS else []
        body = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines[at : ends[-1]]]
        end = next((end for end in ends if parses("\n".join(body[: end - at]))), ends[0])
        yield opening["language"].lower(), "\n".join(body[: end - at]) + "\n"
        at = end + 1
