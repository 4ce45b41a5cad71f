"""The Python code of a conversation: the fenced blocks of all replies of the policy, merged; later definitions win."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`{]*)[^`]*")
_PYTHON = ("python", "python3", "py")
_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_MOST_CLOSINGS = 16  # fences inside strings of one block that are tried


@dataclass(frozen=True)
class _Block:
    """A block of code; `body` is None if it does not parse. `names`: functions and classes that it defines."""

    text: str
    body: Sequence[ast.stmt] | None
    names: frozenset[str]


def merged(replies: Sequence[str]) -> str:
    """The code of all replies: definitions, later ones in place of earlier ones, with what their blocks do besides.

    Examples of use are left out: what is printed, asserted or called at the top level, and blocks that define nothing
    but constants without calls. Of a block whose definitions are all replaced later, imports and such constants stay. A
    definition that does not parse stays too, unless it is replaced. If no block defines a function or a class, the code
    is the last block of the last reply with one, which may continue the code of the task; without a block it is the
    last reply.
    """
    blocks = [_read(text) for reply in replies for text in _blocks(reply) or filter(parses, [reply])]
    defined_by = {name: number for number, block in enumerate(blocks) for name in block.names}
    if not defined_by:
        fenced = [reply for reply in replies if _blocks(reply)]
        return extract([*replies, *fenced][-1]) if replies else ""
    imports, pieces = dict[str, None](), list[str]()
    for number, block in enumerate(blocks):
        current = any(defined_by[name] == number for name in block.names)
        if block.body is None:
            pieces += [block.text] if current else []
            continue
        future = [statement for statement in block.body if _of_future(statement)]
        imports |= dict.fromkeys(map(ast.unparse, future))
        kept = [
            statement
            for statement in block.body
            if not _of_future(statement)
            and (_constant(statement) or (current and not _example(statement, defined_by.keys())))
        ]
        pieces.append(block.text if len(kept) == len(block.body) else _source(kept, block.text))
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


def _constant(statement: ast.stmt) -> bool:
    """Whether it is an import, or assigns a value that calls nothing."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    assigns = isinstance(statement, ast.Assign | ast.AnnAssign | ast.TypeAlias)
    return assigns and not any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement))


def _of_future(statement: ast.stmt) -> bool:
    """Whether it has to stand in front of all code."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _example(statement: ast.stmt, names: Container[str]) -> bool:
    if isinstance(statement, ast.Assert):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    called = call.func if isinstance(call, ast.Call) else None
    return isinstance(called, ast.Name) and (called.id == "print" or called.id in names)


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
