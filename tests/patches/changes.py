"""Finds the places of a source that change imported code: attributes of modules and classes, and sys.modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator

UNKNOWN = "?"  # changed, but by a name that only a run knows
_IMPORTS = ("importlib.import_module", "__import__", "pkgutil.resolve_name")
_CHANGING = ("update", "pop", "popitem", "setdefault", "clear", "__setitem__", "__delitem__")


def changes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every change to an attribute or an item of what is imported, by any of the usual ways.

    If the attribute is no literal, the name is that of its owner; it is UNKNOWN if that is no import either.
    """
    names = _Names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            changed = names.changed_by(node)
        else:
            changed = [name for target in _targets(node) for name in names.assigned(target)]
        yield from ((node.lineno, name) for name in changed)  # type: ignore[attr-defined]


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes, without tuples."""
    pending: list[ast.expr | None] = []
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            pending = [*targets]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
            pending = [target]
        case ast.For(target=target) | ast.AsyncFor(target=target):
            pending = [target]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            pending = [item.optional_vars for item in items]
    while pending:
        target = pending.pop()
        if isinstance(target, ast.Tuple | ast.List):
            pending += target.elts
        elif isinstance(target, ast.Starred):
            pending.append(target.value)
        elif target is not None:
            yield target


class _Names:
    """The names of a source that imports bind, also under further names, as dotted names."""

    def __init__(self, tree: ast.Module) -> None:
        self.bound: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.bound |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        while aliases := {name: dotted for name, dotted in self._aliases(tree) if name not in self.bound}:
            self.bound |= aliases

    def _aliases(self, tree: ast.Module) -> Iterator[tuple[str, str]]:
        """Variables that hold what is imported: `cuda = torch.cuda`, `for kind in (Linear, Norm)`."""
        for node in ast.walk(tree):
            pairs: list[tuple[ast.expr, ast.expr]] = []
            match node:
                case ast.Assign(targets=targets, value=value):
                    pairs = [(target, value) for target in targets]
                case ast.NamedExpr(target=target, value=value):
                    pairs = [(target, value)]
                case ast.For(target=target, iter=ast.Tuple(elts=values) | ast.List(elts=values)):
                    pairs = [(target, value) for value in values]
            for target, value in pairs:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    flat = list(zip(target.elts, value.elts, strict=False))
                else:
                    flat = [(target, value)]
                for name, expression in flat:
                    if isinstance(name, ast.Name) and (dotted := self.dotted(expression)):
                        yield name.id, dotted

    def dotted(self, node: ast.expr) -> str | None:
        """The dotted name of an expression that begins with what is imported, else None."""
        match node:
            case ast.Name(id=name):
                return self.bound.get(name)
            case ast.Attribute(value=value, attr="__dict__"):
                return self.dotted(value)
            case ast.Attribute(value=value, attr=attribute):
                owner = self.dotted(value)
                return owner and f"{owner}.{attribute}"
            case ast.Subscript(value=value, slice=key):
                owner = self.dotted(value)
                return _item(owner, key) if owner and self._holds_names(value) else owner
            case ast.Call(func=ast.Name(id="vars"), args=[value]):
                return self.dotted(value)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, key, *_]):
                owner = self.dotted(value)
                return owner and _item(owner, key)
            case ast.Call(func=function, args=[name, *_]) if self._function(function) in _IMPORTS:
                return _literal(name) or UNKNOWN
        return None

    def _function(self, node: ast.expr) -> str | None:
        return self.dotted(node) or (node.id if isinstance(node, ast.Name) else None)

    def _holds_names(self, node: ast.expr) -> bool:
        """Whether an expression is the dictionary of a module or class, or sys.modules."""
        match node:
            case ast.Attribute(attr="__dict__") | ast.Call(func=ast.Name(id="vars")):
                return True
        return self.dotted(node) == "sys.modules"

    def assigned(self, target: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Attribute | ast.Subscript) and (name := self.dotted(target)):
            yield name

    def changed_by(self, call: ast.Call) -> Iterator[str]:
        function = self._function(call.func) or ""
        owner = (self.dotted(call.args[0]) or UNKNOWN) if call.args else UNKNOWN
        attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if function.startswith(("unittest.mock.patch", "mock.patch")):
            yield from self._mocked(call, function.rpartition("mock.")[2])
        elif function in ("setattr", "delattr") or attribute in ("__setattr__", "__delattr__"):
            if owner != UNKNOWN:
                yield _item(owner, call.args[1])
        elif attribute in ("setattr", "delattr"):  # of pytest's MonkeyPatch
            name = _literal(call.args[0])
            yield name or _item(owner, call.args[1])
        elif attribute in _CHANGING and isinstance(call.func, ast.Attribute) and self._holds_names(call.func.value):
            yield from filter(None, [self.dotted(call.func.value)])

    def _mocked(self, call: ast.Call, function: str) -> Iterator[str]:
        owner = _literal(call.args[0]) or self.dotted(call.args[0]) or UNKNOWN if call.args else UNKNOWN
        if function == "patch.object":
            yield _item(owner, call.args[1])
        elif function == "patch.multiple":
            yield from (f"{owner}.{keyword.arg}" for keyword in call.keywords)
        else:
            yield owner


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _item(owner: str, key: ast.expr) -> str:
    name = _literal(key)
    if owner == UNKNOWN or name is None:
        return owner
    return name if owner == "sys.modules" else f"{owner}.{name}"
