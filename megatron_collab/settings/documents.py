"""JSON and YAML from outside, with bounds on how deep they nest and on what YAML's aliases and merge keys repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, islice
from typing import Any

import yaml

DEPTH = 100  # of nested lists and objects: copying, pickling or printing a value recurses as deep
_MOST = 1 << 20  # lists and objects of a document, those of aliases as often as they are repeated
_MOST_MERGED = 1 << 16  # entries that the merge keys (<<) of a document copy into its objects
_LONGEST_NUMBER = 4300  # characters, as many as Python's int() reads; YAML also has numbers in base 2, 8, 16 and 60
_PARENTS = (dict, list, tuple)  # tuples: of !!pairs and !!omap; made once, since it is asked of every value
_MERGE = "tag:yaml.org,2002:merge"
_TOO_DEEP = f"nests lists and objects more than {DEPTH} deep"


class TooDeep(ValueError):
    """A document nests lists and objects too deep, or holds too many."""


class _Loader(yaml.SafeLoader):
    """Reads YAML's plain types. It refuses merge keys that copy without end, and long numbers.

    It is the loader in Python: the one in C ends the process at deep nesting.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._merged = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if key.tag == _MERGE and isinstance(source, yaml.MappingNode):
                    self.flatten_mapping(source)
                    self._merged += len(source.value)
                    if self._merged > _MOST_MERGED:
                        raise yaml.YAMLError(f"merge keys copy more than {_MOST_MERGED} entries")
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_NUMBER:
            raise yaml.YAMLError(f"has a number of more than {_LONGEST_NUMBER} characters")
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, TooDeep among them."""
    try:
        value = json.loads(text)
        return bounded(value) if text.count("[") + text.count("{") > DEPTH else value  # faster than the walk
    except RecursionError as error:
        raise TooDeep(_TOO_DEEP) from error


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Raises ValueError."""
    try:
        return bounded(yaml.load(text, _Loader))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"a value does not fit its tag ({type(error).__name__}: {error})"[:200]) from error
    except RecursionError as error:
        raise TooDeep(_TOO_DEEP) from error


def parse_settings(text: str) -> Mapping[str, Any]:
    """The object in a JSON text. Raises ValueError if it is none."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not settings by name")
    return value


def is_too_deep(value: Any, most: int | None = None) -> bool:
    """Whether lists and objects are nested more than DEPTH deep, or are as many as `most`."""
    level = [value]
    for _ in range(DEPTH):
        children = (
            entry
            for parent in level
            for entry in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(entry, _PARENTS)
        )
        level = list(islice(children, most))
        most = None if most is None else most - len(level)
        if not level:
            return most == 0
    return True


def nesting(text: str) -> int:
    """How deep the brackets of a text nest."""
    return max(accumulate((char in "[{(") - (char in "]})") for char in text), default=0)


def bounded(value: Any) -> Any:
    """`value`, as an object of a document. Raises TooDeep."""
    if isinstance(value, dict | list) and is_too_deep(value, _MOST):
        raise TooDeep(f"{_TOO_DEEP}, or holds {_MOST} of them")
    return value
