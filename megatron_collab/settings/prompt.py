"""Prompts: Jinja templates, built-in ones in megatron_collab/prompts or a file that a setting names as FILE.j2.

A setting may also name a built-in prompt by its file name without a folder, e.g. collaborator.j2.
Templates are sandboxed, and nothing is escaped here: callers quote what comes from outside (data/transcript.py). Only
the file is template code: values, such as a conversation, are inserted as text.
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

from megatron_collab.settings.bounded_jinja import BoundedTemplate, TemplateLimit, bounded
from megatron_collab.settings.hint import nearest
from megatron_collab.settings.option import ConfigError, require

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
SUFFIX = ".j2"

_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class PromptError(ValueError):
    """A template cannot be rendered with these values; the message names file and line."""


class PromptLimit(PromptError):
    """A template takes more time or space than a prompt may."""


_UNBOUNDED = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
_UNBOUNDED.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
_JINJA = bounded(_UNBOUNDED)


class Prompt:
    """The template in `file`; it may use `variables` and does use `used`. Raises ConfigError with `label` and line."""

    def __init__(self, file: Path, variables: tuple[str, ...], label: str) -> None:
        require(file.is_file(), f"{label}: no such file")
        self.file, self.label = str(file), label
        try:
            source = file.read_text()
            tree = _JINJA.parse(source, filename=self.file)
            self._template = BoundedTemplate(_JINJA, source, self.file)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{label} line {error.lineno}: {error.message}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{label}: cannot be read as text in UTF-8 ({error})") from error
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise ConfigError(f"{label} line {node.lineno}: includes another template; copy it into this file")
        self.used = meta.find_undeclared_variables(tree)
        if unknown := self.used - {*variables}:
            name = min(unknown)
            line = next(node.lineno for node in tree.find_all(nodes.Name) if node.name == name)
            available = f"there are {', '.join(variables)}" if variables else "this prompt has none"
            raise ConfigError(f"{label} line {line}: no variable {name}; {available}{nearest(name, variables)}")

    def render(self, **values: str | int | Mapping[str, Any]) -> str:
        """The rendered text. Raises PromptError if the template fails on these values or exceeds its bounds."""
        try:
            return self._template.render(values)
        except _FAULTS as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
            location = f"{self.label} line {lines[-1]}" if lines else self.label
            if isinstance(error, TemplateLimit):
                raise PromptLimit(f"{location}: {error}") from error
            raise PromptError(f"{location}: {type(error).__name__}: {' '.join(str(error).split())}") from error


@cache
def read_prompt(setting: str, file: str | None, default: str, variables: tuple[str, ...]) -> Prompt:
    """The template in `file`, the value of `setting`; if None, the built-in `default`. Read once per process.

    Raises ConfigError if it is no valid template or uses other variables.
    """
    if file is None:
        return Prompt(PROMPTS / f"{default}{SUFFIX}", variables, f"{default}{SUFFIX}")
    label = f"{setting}={file}"
    require(file.endswith(SUFFIX), f"{label}: name the file of a Jinja template, FILE{SUFFIX}")
    return Prompt(prompt_file(file), variables, label)


def prompt_file(file: str) -> Path:
    """The file that a setting names: if it has no folder and does not exist here, a built-in prompt of that name."""
    built_in = PROMPTS / file
    return built_in if Path(file).name == file and not Path(file).exists() and built_in.is_file() else Path(file)
