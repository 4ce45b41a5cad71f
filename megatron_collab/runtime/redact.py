"""API keys are read from the environment and redacted from all output.

A key is the value (8 characters or more) of an environment variable whose name ends in KEY, TOKEN, SECRET or PASSWORD,
or a string of the form `sk-…`, a bearer token, or a password or key within a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from megatron_collab.config import require
from megatron_collab.config.load import leaves

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
    return _pattern().sub(HIDDEN, text)


def redacted(tree: Any, pattern: re.Pattern[str] | None = None) -> Any:
    """Mappings, lists and tuples as JSON has them, with every key in their strings replaced by ***."""
    pattern = pattern or _pattern()
    if isinstance(tree, str):
        return pattern.sub(HIDDEN, tree)
    if isinstance(tree, Mapping):
        return {redacted(name, pattern): redacted(value, pattern) for name, value in tree.items()}
    return [redacted(value, pattern) for value in tree] if isinstance(tree, list | tuple) else tree


def refuse_keys(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that contains a key; it names the setting and does not show the value."""
    for name, value in leaves(settings):
        require(
            redacted(value) == value,
            f"{name}: contains a key or a password; remove it and set it in the environment "
            "(OPENAI_API_KEY for openai/… and so on)",
        )


def _pattern() -> re.Pattern[str]:
    """Of the keys in the environment, the longest first, since one may be a prefix of another, and of the forms."""
    found = {value for name, value in os.environ.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return re.compile("|".join([*map(re.escape, sorted(found, key=len, reverse=True)), *_FORMS]))  # cached by re
