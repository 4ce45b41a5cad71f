"""Names say what a value is, and sentences put conditions with "if" and "when", as often as the field's code does."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_collab.config import AllOptions
from megatron_collab.settings import declared

ROOT = Path(__file__).resolve().parents[1]
# Pronouns, participles and the like: they name no value.
NO_NAMES = {
    *("again", "asked", "cast", "disturbed", "each", "found", "given", "held", "left", "lent", "made", "needs", "one"),
    *("others", "own", "rest", "said", "silence", "some", "taken", "there", "told", "wanted", "what", "who", "wish"),
}
# Of 1,000 words: the docstrings of the same projects have 0.7 to 1.2 and 5.0 to 12.3.
MOST_WHERE, LEAST_IF_AND_WHEN = 2.0, 5.0
EXCEPTIONS = {  # (file, name): why it has to be called so
    ("megatron_collab/llm/recording.py", "taken"): "the usage of a call, as recordings of earlier versions name it",
}


@dataclass(frozen=True)
class Source:
    """What the tests need of a source, which is read once."""

    names: list[str]  # that it binds: its own, variables, attributes, parameters, functions, classes and imports
    docstrings: list[str]
    errors: list[str]  # texts in calls of `require`, and in what is raised


@cache
def read(file: Path) -> Source:
    names, docstrings, errors = [file.stem], [], []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                names.append(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.TypeVar):
            names.append(node.name)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.alias):
            names.append((node.asname if isinstance(node, ast.alias) else node.name) or "")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings.append(ast.get_docstring(node) or "")
        of_require = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require"
        if of_require or isinstance(node, ast.Raise):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            errors += [part for part in parts if isinstance(part, str)]
    return Source(names, docstrings, errors)


@pytest.mark.seconds
@pytest.mark.parametrize("folder", ["megatron_collab", "tools", "tests"])
def test_a_name_says_what_the_value_is(folder: str) -> None:
    paths = {str(file.relative_to(ROOT)): file for file in sorted((ROOT / folder).rglob("*.py"))}
    names = ((path, name) for path, file in paths.items() for name in read(file).names)
    bad = [place for place in names if place[1].strip("_").lower() in NO_NAMES and place not in EXCEPTIONS]
    assert not bad


def test_every_exception_is_needed() -> None:
    assert all(name in read(ROOT / path).names and reason for (path, name), reason in EXCEPTIONS.items())


def docstrings() -> Iterator[str]:
    for file in ROOT.glob("megatron_collab/**/*.py"):
        yield from read(file).docstrings


def messages() -> Iterator[str]:
    for file in ROOT.glob("megatron_collab/**/*.py"):
        yield from read(file).errors


def pages() -> Iterator[str]:
    """Pages without their blocks of code and what is generated."""
    for file in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        if file.parent.name != "reference":
            yield re.sub(r"^(```.*?^```|    .*?)$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)


def option_helps() -> Iterator[str]:
    for _, _, rule in declared(AllOptions):
        yield rule.help


def figures(texts: Iterable[str]) -> tuple[float, float]:
    """Of 1,000 words: "where", and "if" and "when" together."""
    words = Counter(word for text in texts for word in re.findall(r"[a-z']+", text.lower()))
    where, if_, when = (1000 * words[word] / words.total() for word in ("where", "if", "when"))
    return where, if_ + when


@pytest.mark.parametrize("kind", [docstrings, option_helps, messages, pages], ids=lambda kind: kind.__name__)
def test_conditions_are_said_with_if_and_when(kind: Callable[[], Iterator[str]]) -> None:
    where, conditions = figures(kind())
    assert where <= MOST_WHERE
    if kind in (docstrings, pages):  # the others are fragments of sentences
        assert conditions >= LEAST_IF_AND_WHEN


# Stems that only British English has; texts for language models are left as they are.
BRITISH = re.compile(
    r"behaviour|colour|favour|neighbour|judgement|(?:normal|initial|recogn|serial|optim|quant|token)is(?:e|ing)"
)


def test_the_spelling_is_american() -> None:
    files = [*ROOT.glob("megatron_collab/**/*.py"), *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("docs/**/*.md")]
    lines = ((file, line) for file in [*files, ROOT / "README.md"] for line in file.read_text().splitlines())
    assert not [f"{file.relative_to(ROOT)}: {line}" for file, line in lines if BRITISH.search(line.lower())]
