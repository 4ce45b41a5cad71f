"""Prompts: Jinja templates, built-in ones in megatron_collab/prompts or a file that a setting names as FILE.j2.

A setting may also name a built-in prompt by its file name without a folder, e.g. collaborator.j2.
Templates are sandboxed, and nothing is escaped here: callers quote what comes from outside (data/transcript.py). Only
the file is template code: values, such as a conversation, are inserted as text. Every rendering is bounded: the rounds
of its loops in CPU time, the values that it computes and its output in length.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sized
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from megatron_collab.config.hint import nearest
from megatron_collab.config.option import ConfigError, require

PROMPTS = Path(__file__).resolve().parents[1] / "prompts"
SUFFIX = ".j2"

LONGEST = 1 << 20  # characters of a rendered prompt, besides four times those of its values
SECONDS = 5.0  # CPU time of a rendering
_LARGEST = 1 << 24  # characters or entries of a value, bits of a number
_CLOCK, _JOINED = "_clock", "_joined"
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class PromptError(ValueError):
    """A template cannot be rendered with these values; the message names file and line."""


class PromptLimit(PromptError):
    """A template takes more time or space than a prompt may."""


def _limit(size: int) -> None:
    if size > _LARGEST:
        raise PromptLimit(f"computes a value of more than {_LARGEST} characters")


def _bounded(value: Any) -> Any:
    _limit(value.bit_length() if isinstance(value, int) else len(value) if isinstance(value, str | list) else 0)
    return value


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a bounded result, and bounded numbers as arguments, which may be a width."""

    def call(*args: Any, **options: Any) -> Any:
        _limit(max((value for value in (*args, *options.values()) if isinstance(value, int)), default=0))
        return _bounded(function(*args, **options))

    return call


class _Environment(ImmutableSandboxedEnvironment):
    """Computes no values above _LARGEST."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        value, times = (left, right) if isinstance(right, int) else (right, left)
        if operator != "+" and isinstance(times, int):  # known before it is computed
            digits = value.bit_length() if operator == "**" and isinstance(value, int) else 0
            _limit((len(value) if isinstance(value, Sized) else digits) * times)
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **options: Any) -> Any:
        return _checked(partial(super().call, context, obj))(*args, **options)


class _Instrumented(NodeTransformer):
    """Makes every round of a loop and every call of a macro look at the clock, and `~` bound its result."""

    def visit_For(self, node: Any) -> Any:
        node.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(_CLOCK, "load"), [], [], None, None)))
        return self.generic_visit(node)

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_JOINED, "load"), node.nodes, [], None, None)


def _clock(deadline: float) -> None:
    if time.thread_time() > deadline:
        raise PromptLimit(f"takes more than {SECONDS:g} s")


_JINJA = _Environment(undefined=StrictUndefined, autoescape=False, finalize=_bounded)
_JINJA.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes HTML
_JINJA.filters |= {name: wraps(filter)(_checked(filter)) for name, filter in _JINJA.filters.items()}


class Prompt:
    """The template in `file`; it may use `variables` and does use `used`. Raises ConfigError with `label` and line."""

    def __init__(self, file: Path, variables: tuple[str, ...], label: str) -> None:
        require(file.is_file(), f"{label}: no such file")
        self.file, self.label = str(file), label
        try:
            source = file.read_text()
            tree = _JINJA.parse(source, filename=self.file)
            bounded = _Instrumented().visit(_JINJA.parse(source, filename=self.file)).set_environment(_JINJA)
            code = _JINJA.compile(bounded.set_lineno(1), filename=self.file)
            self._template = _JINJA.template_class.from_code(_JINJA, code, _JINJA.make_globals(None))
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
        room = LONGEST + 4 * sum(len(str(value)) for value in values.values())
        helpers = {
            _CLOCK: partial(_clock, time.thread_time() + SECONDS),
            _JOINED: lambda *parts: "".join(map(str, parts)),
        }
        pieces = list[str]()
        try:
            for piece in self._template.generate(**values, **helpers):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise PromptLimit("gives too many characters")
            return "".join(pieces)
        except _FAULTS as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
            location = f"{self.label} line {lines[-1]}" if lines else self.label
            if isinstance(error, PromptLimit):
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
