"""Finds attributes that do not exist once their object is constructed: those of a later call, or of one rank only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping


def incomplete(tree: ast.Module, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """CLASS.ATTRIBUTE for each attribute that a method assigns and that not every instance has from the start.

    `classes`: possible bases outside the module, by name. Those that are not among them have unknown attributes.
    """
    own_classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    by_name = {**classes, **{cls.name: cls for cls in own_classes}}
    for cls in own_classes:
        assigned = {attribute for method in _methods(cls) for attribute in _stored(method)}
        yield from (f"{cls.name}.{attribute}" for attribute in sorted(assigned - _complete(cls, by_name)))


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; empty for other expressions."""
    if isinstance(node, ast.Call | ast.Subscript):
        return _name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _stored(node: ast.AST) -> set[str]:
    """The attributes of `self` to which `node` assigns."""
    targets = (part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store))
    return {target.attr for target in targets if _name(target.value) == "self"}


def _always_stored(body: list[ast.stmt]) -> set[str]:
    """The attributes that exist after `body`, whichever branches are taken. A loop counts as run at least once."""
    stored: set[str] = set()
    for statement in body:
        match statement:
            case ast.If(body=then, orelse=otherwise) if isinstance(then[-1], ast.Raise):
                stored |= _always_stored(otherwise)
            case ast.If(body=then, orelse=otherwise):
                stored |= _always_stored(then) & _always_stored(otherwise)
            case ast.Try(body=tried, orelse=otherwise, finalbody=final):
                stored |= _always_stored([*tried, *otherwise, *final])
            case ast.With(body=inner) | ast.For(body=inner) | ast.While(body=inner):
                stored |= _always_stored(inner)
            case ast.AnnAssign(value=None):
                pass
            case ast.Assign() | ast.AnnAssign():
                stored |= _stored(statement)
    return stored


def _methods(cls: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _complete(cls: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    """The attributes that every instance has once it is constructed."""
    fields = any(_name(decorator) == "dataclass" for decorator in cls.decorator_list)
    attributes = {method.name for method in _methods(cls)}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and (fields or node.value):
            attributes.add(_name(node.target))
        if isinstance(node, ast.Assign):
            attributes |= {_name(target) for target in node.targets}
    for method in _methods(cls):
        if method.name in ("__init__", "__post_init__", "__enter__"):
            attributes |= _always_stored(method.body)
    for base in {_name(base) for base in cls.bases} & by_name.keys() - {cls.name}:  # it may extend a library's namesake
        attributes |= _complete(by_name[base], by_name)
    return attributes
