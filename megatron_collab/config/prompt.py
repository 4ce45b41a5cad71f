"""Prompts: Jinja templates, ours in megatron_collab/prompts or a file that a setting names as FILE.j2.

Others of ours are named in the same way, without a folder, as collaborator.j2.
They are sandboxed, and nothing is escaped. Only the file is template code: what stands in a value, as in a
conversation, is text.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_collab.config.hint import nearest
from megatron_collab.config.option import ConfigError, require

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
SUFFIX = ".j2"

_JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
_JINJA.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class PromptError(ValueError):
    """A template cannot be rendered with these values; the text names file and line."""


class Prompt:
    """The template in `file`, which gets `variables`; those in `used` it takes. ConfigError naming `said` and line."""

    def __init__(self, file: Path, variables: tuple[str, ...], said: str) -> None:
        require(file.is_file(), f"{said}: no such file")
        self.file, self.said = str(file), said
        try:
            source = file.read_text()
            tree = _JINJA.parse(source, filename=self.file)
            code = _JINJA.compile(source, filename=self.file)
            self._template = _JINJA.template_class.from_code(_JINJA, code, _JINJA.make_globals(None))
        except TemplateSyntaxError as error:
            raise ConfigError(f"{said} line {error.lineno}: {error.message}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{said}: cannot be read as text in UTF-8 ({error})") from error
        for other in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise ConfigError(f"{said} line {other.lineno}: takes in another template; write it into this file")
        self.used = meta.find_undeclared_variables(tree)
        if unknown := self.used - {*variables}:
            name = min(unknown)
            line = next(found.lineno for found in tree.find_all(nodes.Name) if found.name == name)
            there = f"there are {', '.join(variables)}" if variables else "this prompt gets none"
            raise ConfigError(f"{said} line {line}: no variable {name}; {there}{nearest(name, variables)}")

    def render(self, **values: str | int | Mapping[str, Any]) -> str:
        """The text; PromptError where the template fails on these values."""
        try:
            return self._template.render(**values)
        except _FAULTS as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
            where = f"{self.said} line {lines[-1]}" if lines else self.said
            raise PromptError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from error


@cache
def read_prompt(setting: str, file: str | None, default: str, variables: tuple[str, ...]) -> Prompt:
    """The template in `file`, which `setting` names, or ours of the name `default`; read once in a process.

    Raises ConfigError for one that is no template, or takes what it does not get.
    """
    if file is None:
        return Prompt(PROMPTS / f"{default}{SUFFIX}", variables, f"{default}{SUFFIX}")
    said = f"{setting}={file}"
    require(file.endswith(SUFFIX), f"{said}: name the file of a Jinja template, FILE{SUFFIX}")
    return Prompt(prompt_file(file), variables, said)


def prompt_file(file: str) -> Path:
    """The file that a setting names: a name without a folder that is no file in this folder may be one of ours."""
    ours = PROMPTS / file
    return ours if Path(file).name == file and not Path(file).exists() and ours.is_file() else Path(file)
