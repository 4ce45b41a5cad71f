"""What the pages name exists: files, options and their values, groups of conf/, make targets, commands, links."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_collab.commands.__main__ import COMMANDS
from megatron_collab.config import Config, groups, peers
from megatron_collab.config.load import ALIASES
from megatron_collab.settings import declared

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("conf", "docs", "megatron_collab", "requirements", "slurm", "tests", "tools")
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
OPTIONS = {name: rule for name, _, rule in declared(Config)}
OPEN = tuple(f"{name}." for name, default, _ in declared(Config) if isinstance(default, dict))  # anybody may add keys
GROUPS = sorted({name.partition(".")[0] for name in OPTIONS})

PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*…-]*")
FILE = re.compile(r"`([\w-]+\.(?:py|sh|yaml|lock))`")
OPTION = re.compile(rf"(?<![\w./-])((?:{'|'.join(GROUPS)})(?:\.[a-z_][a-z0-9_]*)+)(?:=([\w./:+-]+))?")
GROUP_FILE = re.compile(r"(?<![\w.])(experiment|algo|reward)=([a-z]\w*)")
MAKE = re.compile(r"(?:`|^    |^)make ([a-z][\w-]*)", re.MULTILINE)
COMMAND = re.compile(r"megatron-collab ([a-z][\w-]*)(?= |`|$)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
TO_BE_WRITTEN = re.compile(r"Save (?:it|this) as `([^`]+)`")  # by the reader of a how-to

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_files_exist(page: Path) -> None:
    text = page.read_text()
    written = set(TO_BE_WRITTEN.findall(text))
    named = {path.rstrip(".") for path in PATH.findall(text)} - written
    placeholders = {path for path in named if re.search(r"[*…]|[A-Z]{3}", path) and "LICENSE" not in path}
    assert not sorted(path for path in named - placeholders if not (ROOT / path).exists())
    assert not sorted(set(FILE.findall(text)) - written - FILES)
    assert not sorted(path for path in written if (ROOT / path).exists())


@pages
def test_options_exist_and_have_these_values(page: Path) -> None:
    for spelling, value in OPTION.findall(page.read_text()):
        name = ALIASES.get(spelling, spelling)
        if name.rpartition(".")[2] in ("py", "jsonl", "yaml", "j2", "sh") or name.startswith(OPEN):
            continue
        if page.stem.startswith("from-") and peers.hint(name):  # of another system
            continue
        prefix = any(option.startswith(f"{name}.") for option in OPTIONS)
        assert name in OPTIONS or prefix, f"no option {name}"
        if value not in ("", "null") and not prefix and OPTIONS[name].choices and not value.isupper():
            assert OPTIONS[name].fault(value) is None, f"{name}={value}"


@pages
def test_groups_of_settings_exist(page: Path) -> None:
    known = groups()
    assert not sorted(
        f"{group}={name}" for group, name in GROUP_FILE.findall(page.read_text()) if name not in known[group]
    )


@pages
def test_make_targets_and_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = re.sub(r"^#+ .*", "", page.read_text(), flags=re.MULTILINE)
    assert not set(MAKE.findall(text)) - targets
    code = "\n".join(re.findall(r"`[^`\n]+`|^    .*|^```.*?^```", text, re.MULTILINE | re.DOTALL))
    assert not set(COMMAND.findall(code)) - set(COMMANDS)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in set(_anchors(file)), target


def _anchors(page: Path) -> Iterator[str]:
    """Those that MkDocs gives the headings."""
    for heading in re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE):
        yield re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


@pages
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown imports what it uses and defines its classes."""
    for indent, code in re.findall(r"^( *)```python\n(.*?)```", page.read_text(), re.MULTILINE | re.DOTALL):
        module = ModuleType(f"page_{page.stem}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their names up
        exec(re.sub(rf"^{indent}", "", code, flags=re.MULTILINE), vars(module))


def test_the_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert "make quickstart" in text and "make test" in text


def test_the_file_of_an_algorithm_is_shown_as_it_is() -> None:
    shown = re.search(
        r"`(conf/algo/\w+\.yaml)`:\n\n```yaml\n(.*?)```", (ROOT / "docs/howto/algorithm.md").read_text(), re.S
    )
    assert shown
    lines = (ROOT / shown[1]).read_text().splitlines(keepends=True)
    assert shown[2] == "".join(line for line in lines if not line.startswith("#"))


def test_the_page_of_what_is_unproved_names_every_test_for_a_gpu() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    assert set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", page)) == set(_tests_for_a_gpu())


def _tests_for_a_gpu() -> Iterator[str]:
    """Those marked `gpu`, by a decorator or by their file's pytestmark, and those for any `device_type`."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        if "pytest.mark.gpu" not in text and "device_type" not in text:
            continue
        body = ast.parse(text).body
        module_marks = [
            node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node).startswith("pytestm")
        ]
        fixtures = {"device_type"} | {
            node.name
            for node in body
            if isinstance(node, ast.FunctionDef) and "device_type" in {argument.arg for argument in node.args.args}
        }
        everything = "pytest.mark.gpu" in " ".join(map(ast.unparse, module_marks))
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = " ".join(map(ast.unparse, node.decorator_list))
                either = fixtures & {argument.arg for argument in node.args.args}
                if everything or "pytest.mark.gpu" in marks or either:
                    yield f"{file.relative_to(ROOT)}::{node.name}"


def test_every_page_is_in_the_navigation() -> None:
    """Which mkdocs.yml lists by hand; `make docs` finds the opposite, entries without a page."""
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    paths = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in paths if not path.startswith("decisions/0")} == named
    index = (ROOT / "docs/decisions/index.md").read_text()
    assert all(path.name in index for path in (ROOT / "docs/decisions").glob("0*.md"))
