"""Finds and loads the extensions and files that settings name, such as `package.module:Class` or `./file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from megatron_collab.settings.hint import nearest
from megatron_collab.settings.option import ConfigError, require
from megatron_collab.settings.prompt import prompt_file
from megatron_collab.settings.values import build

_FILE = re.compile(r"(?P<before>(?:scripted/)?)(?P<file>[^:]+\.py)(?P<name>:\w+(?:/.*)?)")
_MODULE = re.compile(r"(?:scripted/)?(?P<module>(?!megatron_collab\.)[A-Za-z_][\w.]*):[A-Za-z_]\w*(?:/.*)?")
_PROMPT = re.compile(r"[^{}\n]+\.j2")
_TOOLS = re.compile(r"[^{}\n]+\.ya?ml")


@dataclass(frozen=True)
class NoOptions:
    """An extension without options."""


class Extension:
    """Base class of extensions. `Options` is a frozen dataclass; its fields may be declared with `option`."""

    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options


class Resolved:
    """Base of frozen dataclasses whose cached properties are checked values, e.g. classes loaded by their paths.

    All are computed when an instance is made, which raises ConfigError for settings that cannot work. They are not
    pickled: a process that unpickles an instance computes them itself, once, when it uses them. So classes of files,
    which cannot be unpickled by name, reach every process.
    """

    def __post_init__(self) -> None:
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}  # type: ignore[arg-type]  # a dataclass


def resolve(spec: str, setting: str, base: type, *, functions: bool = False) -> Any:
    """The subclass of `base` that `spec` names. With `functions`, or if `base` is callable, it may be a function.

    Raises ConfigError naming `setting` if the module or the name does not exist or is something else, or lacks methods.
    """
    location, _, name = spec.rpartition(":")
    module = load_module(location, f"{setting}={spec}")
    target = getattr(module, name, None)
    require(target is not None, f"{setting}={spec}: {location} has no {name}{nearest(name, vars(module))}")
    called = functions or "__call__" in vars(base)
    derived = issubclass(target, base) if isinstance(target, type) else called and callable(target)
    also = " or a function" if called else ""
    require(derived, f"{setting}={spec}: must be a subclass of {base.__module__}.{base.__name__}{also}")
    missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
    require(not missing, f"{setting}={spec}: the class has no {missing}; define what is missing")
    return target


def make(spec: str, setting: str, base: type, options: Mapping[str, Any], prefix: str) -> Any:
    """As `resolve`, but instantiates a class with `options`, which messages call `prefix` plus their name."""
    target = resolve(spec, setting, base)
    if isinstance(target, type):
        return target(build(target.Options, options, prefix))  # type: ignore[attr-defined]  # derived from `base`
    require(not options, f"{prefix.removesuffix('.')}: {setting}={spec} is a function, which takes no options")
    return target


def lookup(name: str, setting: str, table: Mapping[str, str], base: type, *, functions: bool = False) -> Any:
    """The class for `name`: an entry of `table`, which maps names to specs, or itself a spec (see `resolve`)."""
    known = f"known are {', '.join(sorted(table))}, or package.module:Class{nearest(name, table)}"
    require(name in table or ":" in name, f"{setting}={name}: no such name; {known}")
    return resolve(table.get(name, name), setting, base, functions=functions)


def make_absolute(value: Any) -> Any:
    """`value` (settings or a part) with absolute paths in specs, prompts and files of tools.

    Workers may run in other folders.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: make_absolute(entry) for name, entry in vars(value).items()})
    if isinstance(value, dict):
        return {make_absolute(key): make_absolute(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [make_absolute(entry) for entry in value]
    if isinstance(value, str) and (match := _FILE.fullmatch(value)):
        return f"{match['before']}{Path(match['file']).resolve()}{match['name']}"
    if isinstance(value, str) and _TOOLS.fullmatch(value):
        return str(Path(value).resolve())
    if isinstance(value, str) and _PROMPT.fullmatch(value):
        return str(prompt_file(value).resolve())
    return value


def module_file(spec: str) -> Path | None:
    """The file of the module in `spec`, which is not executed; None for other texts and modules of this package."""
    if match := _FILE.fullmatch(spec):
        return Path(match["file"])
    match = _MODULE.fullmatch(spec)
    module = None
    with suppress(ImportError, ValueError):
        module = importlib.util.find_spec(match["module"]) if match else None
    return Path(module.origin) if module and module.origin and module.has_location else None


def modules(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting and value, module or FILE.py) of each class path in `settings`; nothing is imported."""
    for setting, text in texts(settings):
        if match := _FILE.fullmatch(text) or _MODULE.fullmatch(text):
            yield f"{setting}={text}", match.groupdict().get("file") or match["module"]


def named_files(settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """(setting and value, path) of each file, module and folder of a model that `settings` name."""
    for setting, text in texts(settings):
        is_program = setting.endswith(".command")  # of the machine
        if not is_program and (path := _named_file(setting, text)):
            yield f"{setting}={text}", path


def texts(value: Any, setting: str = "") -> Iterator[tuple[str, str]]:
    """(setting, text) of each text in settings, also within their lists and in objects within these."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from texts(entry, f"{setting}.{name}" if setting else name)
    elif isinstance(value, list):
        for entry in value:
            yield from texts(entry, setting)
    elif isinstance(value, str):
        yield setting, value


def _named_file(setting: str, text: str) -> Path | None:
    """The file, or the folder of a model, that a setting's value names."""
    if module := module_file(text):
        return module
    is_model = setting.endswith((".model", "model.path")) and os.path.isfile(os.path.join(text, "config.json"))
    is_file = ("." in text or "/" in text) and os.path.isfile(text)  # False for texts that cannot be paths
    return Path(text) if is_model or is_file else None


def load_module(location: str, label: str) -> ModuleType:
    """The module of that name, or of the file `location`. Raises ConfigError, which begins with `label`."""
    file = Path(location).resolve()
    require(file.suffix != ".py" or file.is_file(), f"{label}: no such file")
    try:
        return _load_file(file) if file.suffix == ".py" else importlib.import_module(location)
    except BaseException as error:  # also SystemExit: it must not end the run
        fault = f"importing {location} failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{location}.".startswith(f"{error.name}."):
            fault = f"no module {error.name}; install its package, or give ./FILE.py:NAME"
        raise ConfigError(f"{label}: {fault}") from error


def _load_file(file: Path) -> ModuleType:
    """The module in `file`, loaded once per process.

    It is compiled from its source each time. Python would take stored bytecode for a file that was changed within a
    second and kept its length.
    """
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # before it is executed: dataclasses look it up
        try:
            code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
            exec(code, vars(sys.modules[name]))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
