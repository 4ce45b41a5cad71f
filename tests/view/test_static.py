"""What the files of the page may contain: nothing that turns text into markup, and nothing from elsewhere."""

from __future__ import annotations

import re
from importlib import resources

import pytest

STATIC = {file.name: file.read_text() for file in resources.files("megatron_collab.view").joinpath("static").iterdir()}
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|setHTML"
CODE = r"\beval\b|\bFunction\(|setTimeout\(\s*[\"'`]|javascript:"
INLINE = r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|setAttribute\(\s*[\"']style"
STYLE = r"\.style\.(?!setProperty\(\"--)|\.cssText"


@pytest.mark.parametrize("name", STATIC)
def test_no_file_makes_markup_or_code_of_text(name: str) -> None:
    assert not re.findall(f"{MARKUP}|{CODE}|{INLINE}|{STYLE}", STATIC[name])


@pytest.mark.parametrize("name", STATIC)
def test_every_file_is_of_the_package(name: str) -> None:
    text = STATIC[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", text)
    names = re.findall(r"(?:from \"\./|(?:href|src)=\"/static/)([^\"]+)\"", text)
    assert set(names) <= STATIC.keys()


def test_every_file_is_used() -> None:
    uses = re.findall(r"(?:from \"\./|(?:href|src)=\"/static/)([^\"]+)\"", "".join(STATIC.values()))
    assert {*uses, "index.html"} == STATIC.keys()
