"""The Python code of a conversation: the fenced blocks of all replies of the policy, merged; later definitions win."""

from __future__ import annotations

import ast
import re
import symtable
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_PYTHON = ("python", "python3", "py")
_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_SHOWS = ("print", "unittest.main")  # whose calls are examples
_MOST_CLOSINGS = 16  # fences inside strings of one block that are tried


@dataclass(frozen=True)
class _Block:
    """A block of code; `body` is None if it does not parse. `names`: functions and classes that it defines."""

    text: str
    body: Sequence[ast.stmt] | None
    names: frozenset[str]


def merged(replies: Sequence[str]) -> str:
    """The code of all replies: definitions, later ones in place of earlier ones, with what their blocks do besides.

    Examples of use are left out: what is printed, asserted or calls a definition at the top level, and imports of a
    definition from a module that is not Python's own. Of a block that defines nothing, or whose definitions are all
    replaced later, only those imports and assignments stay that the remaining code reads. A definition that does not
    parse stays too, unless it is replaced. If no block defines a function or a class, the code is the last block of the
    last reply with one, which may continue the code of the task; without a block it is the last reply.
    """
    blocks = [_read(text) for reply in replies for text in _blocks(reply) or filter(parses, [reply])]
    defined_by = {name: number for number, block in enumerate(blocks) for name in block.names}
    if not defined_by:
        fenced = [reply for reply in replies if _blocks(reply)]
        return extract([*replies, *fenced][-1]) if replies else ""
    current, names = {*defined_by.values()}, defined_by.keys()
    kept = {
        number: [statement for statement in blocks[number].body or () if not _example(statement, names)]
        for number in current
    }
    reads = {name for number in current for name in _reads(_source(kept[number], blocks[number].text))} - names
    for number in sorted({*range(len(blocks))} - current, reverse=True):  # what is read is assigned before
        kept[number] = []
        for statement in reversed(blocks[number].body or ()):
            if not reads.isdisjoint(_binds(statement)):
                kept[number].insert(0, statement)
                reads |= _reads(_source([statement], blocks[number].text)) - names
    imports, pieces = dict[str, None](), list[str]()
    for number, block in enumerate(blocks):
        if block.body is None:
            pieces += [block.text] if number in current else []
            continue
        imports |= dict.fromkeys(map(ast.unparse, filter(_of_future, block.body)))
        statements = [statement for statement in kept[number] if not _of_future(statement)]
        pieces.append(block.text if len(statements) == len(block.body) else _source(statements, block.text))
    return "".join([*(f"{statement}\n" for statement in imports), *filter(None, pieces)])


def extract(reply: str) -> str:
    """The code of one reply: its last block fenced as Python, else its last one without a language, else all."""
    return [reply, *_blocks(reply)][-1]


def parses(code: str) -> bool:
    return _body(code) is not None


def _read(text: str) -> _Block:
    body = _body(text)
    if body is None:
        return _Block(text, None, frozenset(_DEFINITION.findall(text)))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return _Block(text, body, frozenset(statement.name for statement in body if isinstance(statement, kinds)))


def _binds(statement: ast.stmt) -> set[str]:
    """The names that an import binds (`*`: all of a module), or that an assignment binds or changes; of others none."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign):
        targets: Sequence[ast.expr] = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    else:
        return {statement.name.id} if isinstance(statement, ast.TypeAlias) else set()
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _reads(code: str) -> set[str]:
    """The global names that the code reads, and `*`; all its words if it is no program."""
    try:
        tables, names = [symtable.symtable(code, "code", "exec")], {"*"}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"*", *re.findall(r"\w+", code)}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        symbols = [symbol for symbol in table.get_symbols() if symbol.is_referenced()]
        names |= {symbol.get_name() for symbol in symbols if symbol.is_global() or table.get_type() == "module"}
    return names


def _of_future(statement: ast.stmt) -> bool:
    """Whether it has to stand in front of all code."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _example(statement: ast.stmt, names: Collection[str]) -> bool:
    """Whether it only shows or checks the definitions `names`."""
    if isinstance(statement, ast.ImportFrom):
        library = not statement.level and (statement.module or "").partition(".")[0] in sys.stdlib_module_names
        return not library and _binds(statement) <= {*names}
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.Assert)
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(_root(function) in names or _named(function) in _SHOWS for function in calls)


def _named(function: ast.expr) -> str | None:
    """`name`, or `name.attribute`; None if the function is another expression."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else None


def _root(function: ast.expr) -> str | None:
    """The name that a called function is taken from: `a` of `a.b().c`."""
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return function.id if isinstance(function, ast.Name) else None


def _source(statements: Sequence[ast.stmt], text: str) -> str:
    """The code of the statements; `text`, the whole block, if it is too deeply nested to be written again."""
    try:
        return "".join(f"{ast.unparse(statement)}\n" for statement in statements)
    except RecursionError:
        return text


def _blocks(reply: str) -> list[str]:
    """The blocks fenced as Python, else those without a language."""
    blocks = [block for block in _fenced(reply.split("\n")) if block[1].strip()]
    python = [code for language, code in blocks if language in _PYTHON]
    return python or [code for language, code in blocks if not language]


def _fenced(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Language, in lower case, and content of each fenced block (CommonMark 4.5, at any indentation).

    The fences and the indentation of the opening fence are removed; an unclosed block extends to the end. Code may
    contain fences in its strings. If it does not parse up to the first fence that could close it, the block ends at the
    first later fence, or at the end of the reply, up to which it parses.
    """
    at = 0
    while at < len(lines):
        opening = _OPENING.fullmatch(lines[at].rstrip())
        at += 1
        if not opening:
            continue
        fence, indent = opening["fence"], len(opening["indent"])
        body = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines[at:]]
        marks = ((i, line.strip()) for i, line in enumerate(body))
        closes = [i for i, mark in marks if mark.startswith(fence) and set(mark) == {fence[0]}]
        ends = [*closes[:_MOST_CLOSINGS], len(body)]
        end = next((end for end in ends if parses("\n".join(body[:end]))), ends[0])
        yield opening["language"].lower(), "\n".join(body[:end]) + "\n"
        at += end + 1


def _body(code: str) -> Sequence[ast.stmt] | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises for invalid code
        return None
