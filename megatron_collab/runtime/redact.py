"""API keys are read from the environment and redacted from all output.

A key is the value (8 characters or more) of an environment variable whose name ends in KEY, TOKEN, SECRET or PASSWORD,
or a string of the form `sk-…`, a bearer token, or a password or key within a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from megatron_collab.config import require

HIDDEN = "***"
_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
_SHORTEST = 8  # characters; shorter values occur in ordinary text
_FORMS = (
    r"\bsk-(?=[\w-]*\d)[\w-]{16,}",
    r"(?i:(?<=\bbearer )(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,})",
    r"(?<=://)[^\s/@]+:[^\s/@]+(?=@)",
    r"(?i:(?<=[?&])(?:api[_-]?key|key|token|secret|password)=[^\s&#\"']+)",
)


def redact(text: str) -> str:
    """`text` with every key replaced by ***."""
    return _pattern(_values()).sub(HIDDEN, text)


def redacted(tree: Any) -> Any:
    """Mappings, lists and tuples as JSON has them, with every key in their strings replaced by ***."""
    return _redacted(tree, _pattern(_values()))


def refuse_keys(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that contains a key; it names the setting and does not show the value."""
    pattern = _pattern(_values())
    for name, text in _strings(settings):
        require(
            not pattern.search(text),
            f"{name}: contains a key or a password; remove it and set it in the environment "
            "(OPENAI_API_KEY for openai/… and so on)",
        )


def _values() -> tuple[str, ...]:
    """The keys in the environment, the longest first: one may be a prefix of another."""
    found = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return tuple(sorted(found, key=len, reverse=True))


@lru_cache(maxsize=1)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(re.escape, values), *_FORMS]))


def _redacted(tree: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(tree, str):
        return pattern.sub(HIDDEN, tree)
    if isinstance(tree, Mapping):
        return {_redacted(name, pattern): _redacted(value, pattern) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_redacted(value, pattern) for value in tree]
    return tree


def _strings(tree: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The texts in nested settings with their dotted names."""
    if isinstance(tree, str):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _strings(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _strings(value, name)
