"""The top-level statements of Python code, with the names that each reads, binds and changes."""

from __future__ import annotations

import ast
import re
import symtable
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
RUNNERS = frozenset(("unittest.main", "doctest.testmod", "pytest.main"))  # of tests
_NO_SETTING = RUNNERS | {"print", "pprint.pprint", "sys.exit"}  # calls that change no object
_AT_ONCE = ("lambda", "listcomp", "setcomp", "dictcomp", "genexpr")  # functions that mostly run where they stand
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SCOPES = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MAYBE = (ast.For, ast.AsyncFor, ast.While, ast.Match, ast.AugAssign)  # need not bind, or not anew


@dataclass(frozen=True)
class Mutation:
    """What may be changed: `objects`, by name, and what `calls` change. `root`: the name the expression begins with."""

    objects: Set[str]
    root: str | None = None
    calls: Set[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at the top level of the block with this number, or a whole block if it does not parse: no `node`.

    All names are global ones. `reads`: all of them, and `at_once` those that are read when it runs, which the bodies of
    functions are not. `binds`: on some way through it, and `replaces` on every way, if its block does not read it
    before. `imports` and `defines` (functions and classes) are some of `binds`. `calls`: the functions, or the objects
    whose methods it calls. `changes`: by assignments to parts of objects and by calls whose value is not used; of a
    function or a class those of its body. `aliases`: a name, and names of objects that its value may be, contain or
    share a module with.
    """

    text: str
    node: ast.stmt | None
    block: int
    reads: Set[str]
    at_once: Set[str] = frozenset()
    binds: Set[str] = frozenset()
    replaces: Set[str] = frozenset()
    imports: Set[str] = frozenset()
    defines: Set[str] = frozenset()
    calls: Set[str] = frozenset()
    changes: Sequence[Mutation] = ()
    aliases: Sequence[tuple[str, Set[str]]] = ()


def parse(code: str) -> Sequence[ast.stmt] | None:
    """The statements of the code; None if it is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises for invalid code
        return None


def statements(code: str, block: int) -> Iterator[Statement]:
    """Those of a block, without what runs only if the block is the main program."""
    body = parse(code)
    if body is None:
        names = frozenset(DEFINITION.findall(code))
        yield Statement(code, None, block, _reads(code)[0], binds=names, replaces=names, defines=names)
        return
    read = set[str]()
    for text, node in zip(_texts(code, body), body, strict=True):
        match node:
            case ast.If(test=ast.Compare(left=ast.Name("__name__"), ops=[ast.Eq()]), orelse=[]):
                continue
        statement = _statement(text, node, block, read)
        read |= statement.at_once
        yield statement


def free_names(code: str) -> Set[str]:
    """The global names that the code reads and does not bind; all its words if it is no program."""
    return _reads(code)[0] - _bound(parse(code) or ())


def _statement(text: str, node: ast.stmt, block: int, read: Set[str]) -> Statement:
    reads, at_once = _reads(text)
    parts = [*_of_module([node])]
    added = {part.target.id for part in parts if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)}
    defines = {part.name for part in parts if isinstance(part, _DEFINITIONS)} | {
        name
        for part in parts
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Lambda)
        for name in _bound(part.targets)
    }
    return Statement(
        text,
        node,
        block,
        reads | added,
        at_once | added,
        _bound([node]),
        _replaced(node) - at_once - read,
        _bound(part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)),
        defines,
        _calls(node),
        [*_changes(node, reads)],
        [alias for part in parts for alias in _aliases(part)],
    )


def _texts(code: str, body: Sequence[ast.stmt]) -> Iterator[str]:
    """The text of each statement, with the comments and decorators in front of it."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").encode().split(b"\n")  # as the parser counts them
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    source, start = b"\n".join(lines), 0
    for node in body:
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        yield source[start:end].decode().lstrip("; \t\f\n")
        start = end


def _reads(code: str) -> tuple[Set[str], Set[str]]:
    """The global names that the code reads (all words if it is no program), and those outside bodies of functions."""
    try:
        tables = [(symtable.symtable(code, "code", "exec"), True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {*re.findall(r"\w+", code)}, set()
    reads, at_once = set[str](), set[str]()
    while tables:
        table, runs = tables.pop()
        runs = runs and (table.get_type() != "function" or table.get_name() in _AT_ONCE)
        tables += ((child, runs) for child in table.get_children())
        symbols = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
        names = {symbol.get_name() for symbol in symbols if symbol.is_global() or table.get_type() == "module"}
        reads |= names
        at_once |= names if runs else set()
    return reads, at_once


def _of_module(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes and those in them, outside functions, classes and comprehensions."""
    pending = [*nodes]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that the nodes bind on some way through them; `*`: all of a module."""
    names = set[str]()
    for node in _of_module(nodes):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (*_DEFINITIONS, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _replaced(*body: ast.stmt) -> set[str]:
    """The names that the statements bind on every way through them."""
    names = set[str]()
    for node in body:
        if isinstance(node, ast.If):
            ways = [_replaced(*node.body)]
            while len(node.orelse) == 1 and isinstance(
                node.orelse[0], ast.If
            ):  # elif, of which there may be a thousand
                node = node.orelse[0]
                ways.append(_replaced(*node.body))
            names |= set.intersection(*ways, _replaced(*node.orelse))
        elif isinstance(node, ast.Try | ast.TryStar):
            ways = [_replaced(*node.body, *node.orelse), *(_replaced(*handler.body) for handler in node.handlers)]
            names |= set.intersection(*ways) | _replaced(*node.finalbody)
        elif isinstance(node, ast.With | ast.AsyncWith):
            names |= _bound(node.items) | _replaced(*node.body)
        elif not isinstance(node, _MAYBE) and not (isinstance(node, ast.AnnAssign) and node.value is None):
            names |= _bound([node]) - {"*"}
    return names


def _calls(node: ast.AST) -> set[str]:
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {name for function in functions for name in (_root(function), _dotted(function)) if name}


def _changes(node: ast.stmt, reads: Set[str]) -> Iterator[Mutation]:
    """Of a function or a class, whose other names are its own, only of names in `reads`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Global):
            yield Mutation({*part.names})
            continue
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            expression: ast.expr = part.value
            if _dotted(part.value.func) in _NO_SETTING:
                continue
        elif (isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load)) or (
            isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del)
        ):
            expression = part
        else:
            continue
        objects = _objects(expression)
        yield Mutation(
            objects & reads if isinstance(node, _DEFINITIONS) else objects, _root(expression), _calls(expression)
        )


def _aliases(node: ast.AST) -> Iterator[tuple[str, Set[str]]]:
    """Of names that the node binds itself."""
    targets: Sequence[ast.AST] = ()
    value: ast.AST | None = None
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
        targets, value = [node.target], node.value
    elif isinstance(node, ast.For | ast.AsyncFor):
        targets, value = [node.target], node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        targets, value = [node.optional_vars], node.context_expr
    elif isinstance(node, ast.ImportFrom):
        yield from ((name, _bound([node])) for name in _bound([node]))
    objects = _objects(value) if value else set()
    yield from ((name, objects) for name in _bound(targets) if objects)


def _objects(expression: ast.AST) -> set[str]:
    """The objects that a value may be taken from: `a`, `b` of `a.c(b)[0]`, but of `f(b)` only `b`."""
    names = set[str]()
    while not isinstance(expression, ast.Name):
        if isinstance(expression, ast.Call):
            arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
            names |= {argument.id for argument in arguments if isinstance(argument, ast.Name)}
            if isinstance(expression.func, ast.Name):
                return names
            expression = expression.func
        elif isinstance(expression, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            expression = expression.value
        else:
            return names
    return names | {expression.id}


def _root(expression: ast.AST) -> str | None:
    """The name that an expression begins with: `a` of `a.b().c[0]`."""
    while isinstance(expression, ast.Attribute | ast.Call | ast.Subscript | ast.Await):
        expression = expression.func if isinstance(expression, ast.Call) else expression.value
    return expression.id if isinstance(expression, ast.Name) else None


def _dotted(function: ast.expr) -> str | None:
    """`name`, or `name.attribute`; None if the function is another expression."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else None
