"""The names that tests need, derived from the tests' source only, so that no candidate can influence them.

A name that the tests use but do not define comes from the task's prompt if that defines it, else from the candidate.
The usual abbreviations of modules are never taken from a candidate. Some tests cannot be judged from another process.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

# By the name in the tests: why the sandbox cannot judge them.
_MODULES = dict.fromkeys(
    ("pickle", "dill", "cloudpickle", "joblib", "jsonpickle", "shelve", "marshal", "multiprocessing"),
    "unpickle, which runs code",
) | {"inspect": "look into the candidate's code", "importlib": "import by name", "runpy": "import by name"}
_CODE = "look into the candidate's code"
_STATE = "look at state that only the candidate's process has"
_NAMES = (
    dict.fromkeys(("eval", "exec", "compile", "__import__", "sympify", "parse_expr"), "run text as code")
    | dict.fromkeys(("read_pickle", "allow_pickle", "unsafe_load"), "unpickle, which runs code")
    | dict.fromkeys(("UnsafeLoader", "yaml.Loader"), "unpickle, which runs code")
    | dict.fromkeys(("expectedFailure", "xfail"), "count a failure as a success")
    | dict.fromkeys(("__code__", "__globals__", "__closure__", "__defaults__", "__annotations__", "__dict__"), _CODE)
    | dict.fromkeys(("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex"), _STATE)
    | dict.fromkeys(("gcf", "gca", "get_fignums"), _STATE)
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Imports that tests may rely on even if only the solution makes them.
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
    """`candidate`: names to take from the candidate. `imports`: by name, the module or module:name to import here.
    `functions`: of the tests, to call as pytest does, because the tests do not.
    """

    candidate: tuple[str, ...]
    imports: dict[str, str]
    functions: tuple[str, ...]


def refusal(tests: ast.Module) -> str | None:
    """Why these tests cannot be judged from another process than the candidate's, or None."""
    for node in ast.walk(tests):
        for name in _names_in(node):
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


def _names_in(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr, f"{getattr(node.value, 'id', '')}.{node.attr}")
    if isinstance(node, ast.ImportFrom):
        return tuple(name for alias in node.names for name in (alias.name, f"{node.module}.{alias.name}"))
    return (node.arg,) if isinstance(node, ast.keyword) and node.arg else ()


def _imported(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Import):
        return tuple(alias.name for alias in node.names)
    return (node.module,) if isinstance(node, ast.ImportFrom) and node.module and not node.level else ()


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:  # the module is loaded and has no spec
        return True


def demands(tests: ast.Module, prompt: ast.Module, entry: str) -> Demands:
    """Names that tests need but do not define. `prompt`: code before the candidate's; `entry`: the name under test."""
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    functions = [name for node in tests.body if _is_test(node) for name in _bound_by(node) if name not in used]
    used -= {*dir(builtins), "__name__"} | _prompt_names(prompt)
    missing = used - _bound(tests)
    local = used - missing - {name for statement in tests.body for name in _bound_by(statement)}
    if entry:
        missing.add(entry)
    elif not missing:  # they test a function with the name of a builtin
        missing |= set(_subjects(tests))
    called = {
        node.func.id for node in ast.walk(tests) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    imports = {name: _USUAL[name] for name in missing - {entry} if name in _USUAL}
    modules = missing - {entry} - called - set(imports)
    imports |= {name: name for name in modules if name.isidentifier() and _is_module(name)}
    # A name that one function of the tests assigns may be the candidate's in another.
    return Demands(tuple(sorted((missing | local) - set(imports))), imports, tuple(functions))


def derived_from_candidate(tests: ast.Module, candidate: tuple[str, ...]) -> str | None:
    """Like `refusal`, for classes of the tests that derive from one of the candidate's."""
    for node in ast.walk(tests):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Name) and base.id in candidate:
                return f"its tests derive a class from the candidate's {base.id}"
    return None


def never_run(tests: ast.Module, functions: tuple[str, ...]) -> str | None:
    """Like `refusal`, for tests that would pass any code, because they, or some of them, never run."""
    cases = [node for node in tests.body if isinstance(node, ast.ClassDef) and node.bases]
    methods: list[Any] = [method for case in cases for method in case.body if _is_test(method)]
    called: list[Any] = [node for node in tests.body if getattr(node, "name", "") in functions]
    run = [node for part in tests.body if not isinstance(part, _DEFINITIONS) for node in ast.walk(part)]
    if not methods and not called and not any(isinstance(node, ast.Call | ast.Assert) for node in run):
        return "its tests define what is to run, but run nothing"
    for node in called:
        patched = "patch" in "".join(map(ast.dump, node.decorator_list))  # it passes arguments
        if isinstance(node, ast.ClassDef) or (node.args.args and not patched):
            return f"its tests need pytest to run {node.name}"
    awaited = methods if "IsolatedAsyncioTestCase" in ast.dump(tests) else []
    for function in (*methods, *called):
        if _yields(function) or (isinstance(function, ast.AsyncFunctionDef) and function not in awaited):
            return f"its tests never run the body of {function.name}"
    return None


def _is_test(node: ast.stmt) -> bool:
    """Whether pytest would run a definition; it need not derive from unittest.TestCase."""
    if isinstance(node, ast.ClassDef):
        return not node.bases and any(map(_is_test, node.body))
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _yields(node: ast.AST) -> bool:
    """Whether a function is a generator."""
    children = list(ast.iter_child_nodes(node))
    nested = any(_yields(child) for child in children if not isinstance(child, (*_DEFINITIONS, ast.Lambda)))
    return nested or any(isinstance(child, ast.Yield | ast.YieldFrom) for child in children)


def _bound(tree: ast.AST) -> set[str]:
    """Names that a tree assigns, imports, defines or takes as parameters, anywhere."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
    return names


def _prompt_names(prompt: ast.Module) -> set[str]:
    """Names that the tests take from the prompt: all except classes and functions without an implementation."""
    excluded = {node.name for node in prompt.body if isinstance(node, ast.ClassDef)}
    for node in prompt.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(map(_is_stub, node.body)):
            excluded.add(node.name)
    return {name for node in prompt.body for name in _bound_by(node)} - excluded


def _bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    return _bound(statement)


def _is_stub(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return text or isinstance(statement, ast.Pass | ast.Raise)


def _subjects(tests: ast.Module) -> Iterator[str]:
    """Builtin names that are called without a call among the arguments, as `sum` in abs(sum(1, 2) - 3)."""
    for node in ast.walk(tests):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if not any(isinstance(child, ast.Call) for argument in arguments for child in ast.walk(argument)):
                yield node.func.id


def _is_module(name: str) -> bool:
    return _installed(name)
