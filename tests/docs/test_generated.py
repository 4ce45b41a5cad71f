"""What scripts write into docs/ is what they write now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_options_is_that_of_the_schema() -> None:
    tool = _tool("make_docs")
    assert tool.OPTIONS.read_text() == tool.options_page(), "run python tools/make_docs.py"


def test_the_figures_are_those_of_the_script() -> None:
    tool = _tool("figures")
    for name, svg in tool.figures().items():
        ElementTree.fromstring(svg)  # well-formed
        assert (tool.FOLDER / name).read_text() == svg, "run python tools/figures.py"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
