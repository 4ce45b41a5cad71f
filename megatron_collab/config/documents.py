"""JSON and YAML from outside, with bounds on how deep they nest and on what the aliases of YAML repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Any

import yaml

DEPTH = 100  # of nested lists and objects: copying, pickling or printing a value recurses as deep
_MOST = 1 << 20  # lists and objects of a document, those of aliases as often as they are repeated
_TOO_DEEP = f"nests lists and objects more than {DEPTH} deep"


def json_of(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return _bounded(json.loads(text))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def yaml_of(text: str) -> Any:
    """The value of a YAML text. Raises ValueError."""
    try:
        return _bounded(yaml.load(text, yaml.SafeLoader))  # the loader in C ends the process at deep nesting
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def settings_of(text: str) -> Mapping[str, Any]:
    """The object in a JSON text. Raises ValueError if it is none."""
    value = json_of(text)
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not settings by name")
    return value


def too_deep(value: Any, most: int | None = None) -> bool:
    """Whether lists and objects are nested more than DEPTH deep, or are as many as `most`."""
    level = [value]
    for _ in range(DEPTH):
        children = (
            entry
            for parent in level
            for entry in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(entry, dict | list)
        )
        level = list(islice(children, most))
        most = None if most is None else most - len(level)
        if not level:
            return most == 0
    return True


def nesting(text: str) -> int:
    """How deep the brackets of a text nest."""
    return max(accumulate((char in "[{(") - (char in "]})") for char in text), default=0)


def _bounded(value: Any) -> Any:
    if isinstance(value, dict | list) and too_deep(value, _MOST):
        raise ValueError(f"{_TOO_DEEP}, or holds {_MOST} of them")
    return value
