"""What tests need, read from their source alone, so that no candidate can choose it.

Names that the tests use and do not define are the task's own where its prompt defines them, else the candidate's; the
usual abbreviations of modules are never taken from a candidate. And there are things that cannot be judged apart.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

# By the name in the tests: why what they need cannot be had.
_MODULES = dict.fromkeys(
    ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"), "unpickle, which runs code"
) | {"inspect": "look into the candidate's code", "importlib": "import by name", "runpy": "import by name"}
_CODE = "look into the candidate's code"
_STATE = "look at state that only the candidate's process has"
_NAMES = (
    dict.fromkeys(("eval", "exec", "compile", "__import__"), "run text as code")
    | dict.fromkeys(("read_pickle", "allow_pickle", "unsafe_load"), "unpickle, which runs code")
    | dict.fromkeys(("__code__", "__globals__", "__closure__", "__defaults__", "__annotations__", "__dict__"), _CODE)
    | dict.fromkeys(("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex"), _STATE)
    | dict.fromkeys(("gcf", "gca", "get_fignums"), _STATE)
)
# What tests may mean by a name although only the solution imports it.
_USUAL = {
    **{"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "sns": "seaborn", "sp": "scipy", "nx": "networkx"},
    **{"isclose": "math:isclose", "sqrt": "math:sqrt", "pi": "math:pi", "mean": "statistics:mean"},
    **{"Counter": "collections:Counter", "defaultdict": "collections:defaultdict", "deque": "collections:deque"},
    **{"OrderedDict": "collections:OrderedDict", "datetime": "datetime:datetime", "timedelta": "datetime:timedelta"},
    **{
        "Path": "pathlib:Path",
        "Decimal": "decimal:Decimal",
        "Fraction": "fractions:Fraction",
        "reduce": "functools:reduce",
    },
    **{"patch": "unittest.mock:patch", "Mock": "unittest.mock:Mock", "MagicMock": "unittest.mock:MagicMock"},
    **{"StringIO": "io:StringIO", "BytesIO": "io:BytesIO"},
}


class Demands(NamedTuple):
    """`candidate`: the names to take from it. `imports`: by name, module or module:name, those to import here."""

    candidate: tuple[str, ...]
    imports: dict[str, str]


def refusal(tests: ast.Module) -> str | None:
    """Why these tests cannot be judged apart from the candidate, or None."""
    for node in ast.walk(tests):
        for name in _said(node):
            if why := _NAMES.get(name):
                return f"its tests {why} ({name})"
        for module in _imported(node):
            if why := _MODULES.get(module.partition(".")[0]):
                return f"its tests {why} ({module})"
    for statement in tests.body:
        for module in _imported(statement):
            if module.partition(".")[0] not in ("solution", "prompt") and not _installed(module):
                return f"its tests import {module}, which is not installed"
    return None


def _said(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    return (node.arg,) if isinstance(node, ast.keyword) and node.arg else ()


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module,) if isinstance(node, ast.ImportFrom) and node.module and not node.level else ()


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # it is loaded, and says nothing of where it comes from
        return True


def demands(tests: ast.Module, prompt: ast.Module, entry: str) -> Demands:
    """Which names tests need but do not define; `prompt`: what the candidate's code follows, `entry`: its name."""
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used -= {*dir(builtins), "__name__"} | _kept(prompt)
    missing = used - _bound(tests)
    local = used - missing - {name for statement in tests.body for name in _bound_by(statement)}
    if entry:
        missing.add(entry)
    elif not missing:  # they are about a function that has the name of a builtin one
        missing |= set(_subjects(tests))
    called = {
        node.func.id for node in ast.walk(tests) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    imports = {name: _USUAL[name] for name in missing - {entry} if name in _USUAL}
    modules = missing - {entry} - called - set(imports)
    imports |= {name: name for name in modules if name.isidentifier() and _is_module(name)}
    # A name that one function of the tests assigns may be the candidate's in another.
    return Demands(tuple(sorted((missing | local) - set(imports))), imports)


def derived_from_candidate(tests: ast.Module, candidate: tuple[str, ...]) -> str | None:
    """As `refusal`, for classes of the tests that derive from one of the candidate's."""
    for node in ast.walk(tests):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Name) and base.id in candidate:
                return f"its tests derive a class from the candidate's {base.id}"
    return None


def _bound(tree: ast.AST) -> set[str]:
    """Names that a tree assigns, imports, defines or takes as parameters, anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
    return found


def _kept(prompt: ast.Module) -> set[str]:
    """What the tests take from the prompt: all but classes, and functions that are left to be written."""
    left = {node.name for node in prompt.body if isinstance(node, ast.ClassDef)}
    for node in prompt.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_says_nothing, node.body)):
            left.add(node.name)
    return {name for node in prompt.body for name in _bound_by(node)} - left


def _bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    return _bound(statement)


def _says_nothing(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Pass | ast.Raise)


def _subjects(tests: ast.Module) -> Iterator[str]:
    """Builtin names that are called with no call among the arguments: `sum` of abs(sum(1, 2) - 3)."""
    for node in ast.walk(tests):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
            inside = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not any(isinstance(each, ast.Call) for argument in inside for each in ast.walk(argument)):
                yield node.func.id


def _is_module(name: str) -> bool:
    return _installed(name)
