"""JSON and YAML from outside have a bound on nesting, and aliases of YAML one on what they repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import ConfigError, compose
from megatron_collab.config.documents import DEPTH, nesting, parse_json, parse_settings, parse_yaml

LAUGHS = "a0: &a0 [[], []]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}], k{n}: 1}}\n" for n in range(1, 14)
)
PAIRS = "[!!pairs [{a: " * 60 + "1" + "}]]" * 60


@pytest.mark.parametrize("read", [parse_json, parse_yaml])
@pytest.mark.parametrize("depth", [DEPTH, DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("closed", ["]", ""])
def test_what_nests_too_deep_is_refused(read: Callable[[str], Any], depth: int, closed: str) -> None:
    text = "[" * depth + closed * depth
    if depth == DEPTH and closed:
        assert nesting(text) == DEPTH and read(text) is not None
        return
    with pytest.raises(
        ValueError, match=r"\S" if depth <= 900 else "nests lists and objects more than 100 deep"
    ) as error:
        read(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: &a [*a]",
        "a: &a {b: *a}",
        "&a [" + "[], " * 5000 + "]\n---\n",
        "- &a [" + "[], " * 5000 + "]\n" + "- *a\n" * 500,
    ],
)
def test_aliases_that_repeat_without_end_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MERGES, "merge keys copy more than 65536 entries"),
        ("&a {<<: *a}", "more than 100 deep"),
        (PAIRS, "more than 100 deep"),
        ("[0x" + "1" * 5000 + "]", "a number of more than 4300 characters"),
        ("!!bool x", "KeyError"),
        ("!!int ''", "IndexError"),
        ("!!float ''", "IndexError"),
        ("!!timestamp foo", "AttributeError"),
        ("!!float 1:" + ":".join(["30"] * 300), "OverflowError"),
    ],
)
def test_merges_and_tags_of_yaml_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)


def test_merge_keys_are_read() -> None:
    assert parse_yaml("{a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: {<<: [*a, {z: 4}]}, n: 0x1f}") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2, "z": 4},
        "n": 31,
    }


def test_what_is_no_object_is_no_settings() -> None:
    assert parse_settings('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="holds a list, not settings by name"):
        parse_settings("[1]")


def test_a_deep_value_of_an_option_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = "[" * 60_000
    for closed in ("", "]" * 60_000):
        with pytest.raises(ConfigError, match=r"rollout.tools: nests brackets more than 100 deep; flatten it"):
            compose(["experiment=booking", f"rollout.tools={deep}{closed}"])
