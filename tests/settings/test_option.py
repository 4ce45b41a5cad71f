"""What the declaration of an option says is what the validator refuses and the help shows."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import AllOptions
from megatron_collab.settings import ADDRESS, ConfigError, build, check_declared, declared, option
from megatron_collab.settings.option import seconds
from megatron_collab.settings.schema import TOOL_PARSERS


@dataclass
class Options:
    color: str = option("red", "which", choices=("red", "green"), may_change=True)
    loss: str | None = option(None, "which", choices=("ppo",), extensible=True)
    share: float = option(0.5, "how much", ge=0, le=1)
    rate: float = option(0.1, "how fast", gt=0)
    decay: float = option(0.9, "how long", ge=0, lt=1)
    count: int = option(1, "how many", le=9)
    weights: dict[str, float] = option({}, "of each", gt=0)
    names: list[str] = option([], "of all", choices=("a", "b"))
    limit: float = seconds(60.0, "seconds it may take")
    url: str = option("", "where", kind=ADDRESS)
    words: list[str] = option([], "of a command", blank=True)
    free: dict[str, Any] = option({}, "for a library")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("color", "gren", "x.color=gren: choose one of red, green; the nearest is green"),
        ("color", "x:Y", "x.color=x:Y: choose one of red, green"),
        ("loss", "pp", "x.loss=pp: choose one of ppo, package.module:Class; the nearest is ppo"),
        ("share", 1.5, "x.share=1.5: must be at least 0 and at most 1"),
        ("share", math.nan, "x.share=nan: must be finite and at least 0 and at most 1"),
        ("rate", 0.0, "x.rate=0.0: must be above 0 and at most 10000000"),
        ("rate", math.inf, "x.rate=inf: must be finite and above 0 and at most 10000000"),
        ("decay", 1.0, "x.decay=1.0: must be at least 0 and below 1"),
        ("count", 10, "x.count=10: must be at most 9"),
        ("weights", {"a": 1.0, "b": -1.0}, "x.weights.b=-1.0: must be above 0 and at most 10000000"),
        ("weights", {" ": 1.0}, "x.weights.' ': is blank; give a name"),
        ("names", ["a", "c"], "x.names=c: choose one of a, b"),
        ("names", ["a", " "], "x.names=' ': is blank; give a value"),
        ("color", "", "x.color='': is blank; give a value"),
        ("loss", "\n", r"x.loss='\n': is blank; give a value"),
        ("limit", 1e-9, "x.limit=1e-09: must be at least 0.1 and at most 10000000"),
        ("limit", 10.0**9, "x.limit=1000000000.0: must be at least 0.1 and at most 10000000"),
        ("url", "h:80", "x.url=h:80: must begin with http:// or https://, as http://HOST:PORT"),
        ("url", " ", "x.url=' ': is blank; give a value"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_declared(Options(**{name: value}), "x.")
    assert str(error.value) == message


def test_allowed_values_pass() -> None:
    check_declared(
        Options(color="green", loss="my.losses:Clipped", share=1, decay=0.0, weights={"a": 2.0}, names=["b"])
    )
    check_declared(Options(limit=0.1, url="", words=["", " "], free={"a": "", "b": None}))


def test_declarations_are_read_from_a_class_and_from_its_objects() -> None:
    assert {name: default for name, default, _ in declared(Options)}["weights"] == {}
    declarations = {name: (value, rule) for name, value, rule in declared(Options(share=0.25), "x.")}
    assert declarations["x.share"][0] == 0.25 and declarations["x.share"][1].allowed() == "at least 0 and at most 1"
    assert declarations["x.color"][1].may_change and declarations["x.loss"][1].allowed() == "ppo | package.module:Class"


def test_every_option_has_help_and_every_number_a_bound_or_a_reason() -> None:
    unbounded = {"reward.malformed"}  # a reward, of either sign
    for name, value, rule in declared(AllOptions):
        assert rule.help, name
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in unbounded:
            assert rule.allowed(), name
        for entry in value if isinstance(value, list) else [value]:
            assert rule.fault(entry) is None or entry == "???", name


def test_settings_of_a_metric_have_the_types_of_its_options() -> None:
    assert build(Options, {"share": 1, "names": ["a"], "loss": "x:Y"}, "x.") == Options(
        share=1.0, names=["a"], loss="x:Y"
    )
    for values, message in (
        ({"share": "much"}, "x.share=much: "),
        ({"share": 2}, "x.share=2.0: must be at least 0 and at most 1"),
        ({"colour": "red"}, "x.colour: no such setting; the nearest is color; there are color, loss"),
    ):
        with pytest.raises(ConfigError) as error:
            build(Options, values, "x.")
        assert str(error.value).startswith(message)


def test_the_parsers_of_tool_calls_are_those_of_sglang() -> None:
    """Read, not imported: that takes a GPU's libraries."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "srt" / "function_call" / "function_call_parser.py"
    enum = next(
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum"
    )
    assert isinstance(enum, ast.Dict)
    assert sorted(ast.literal_eval(key) for key in enum.keys if key) == sorted(TOOL_PARSERS)
