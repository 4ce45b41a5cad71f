"""Classes and functions from outside the package, named in a setting as `package.module:Class` or `./file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from megatron_collab.config.hint import nearest
from megatron_collab.config.load import build
from megatron_collab.config.option import ConfigError, require
from megatron_collab.config.prompt import prompt_file

_FILE = re.compile(r"(?P<before>(?:scripted/)?)(?P<file>[^:]+\.py)(?P<name>:\w+(?:/.*)?)")
_PROMPT = re.compile(r"[^{}\n]+\.j2")


@dataclass(frozen=True)
class NoOptions:
    """An extension without options."""


class Extension:
    """Base of what a setting may name. `Options` is a frozen dataclass, whose fields `option` may declare."""

    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options


def resolve(spec: str, setting: str, base: type, *, functions: bool = False) -> Any:
    """The class that `spec` names, derived from `base`, or with `functions`, or a callable `base`, a function.

    Raises ConfigError naming `setting` where the module or the name does not exist, or is something else.
    """
    where, _, name = spec.rpartition(":")
    module = _load(where, f"{setting}={spec}")
    found = getattr(module, name, None)
    require(found is not None, f"{setting}={spec}: {where} has no {name}{nearest(name, vars(module))}")
    called = functions or "__call__" in vars(base)
    derived = issubclass(found, base) if isinstance(found, type) else called and callable(found)
    also = " or a function" if called else ""
    require(derived, f"{setting}={spec}: must be a subclass of {base.__module__}.{base.__name__}{also}")
    return found


def make(spec: str, setting: str, base: type, given: Mapping[str, Any], prefix: str) -> Any:
    """`resolve`, and of a class the instance with the options `given`, which are set as `prefix` and their name."""
    found = resolve(spec, setting, base)
    if isinstance(found, type):
        return found(build(found.Options, given, prefix))  # type: ignore[attr-defined]  # derived from `base`
    require(not given, f"{prefix.removesuffix('.')}: {setting}={spec} is a function, which takes no options")
    return found


def lookup(name: str, setting: str, table: Mapping[str, str], base: type, *, functions: bool = False) -> Any:
    """The class called `name` in `table`, whose values are specs, or what a spec from outside names (see `resolve`)."""
    known = f"known are {', '.join(sorted(table))}, or package.module:Class{nearest(name, table)}"
    require(name in table or ":" in name, f"{setting}={name}: no such name; {known}")
    return resolve(table.get(name, name), setting, base, functions=functions)


def make_absolute(value: Any) -> Any:
    """`value`, settings or a part of them, with absolute files of specs and prompts: workers may run elsewhere."""
    if is_dataclass(value):
        for name, entry in vars(value).items():
            setattr(value, name, make_absolute(entry))
    if isinstance(value, dict):
        return {make_absolute(key): make_absolute(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [make_absolute(entry) for entry in value]
    if isinstance(value, str) and (found := _FILE.fullmatch(value)):
        return f"{found['before']}{Path(found['file']).resolve()}{found['name']}"
    if isinstance(value, str) and _PROMPT.fullmatch(value):
        return str(prompt_file(value).resolve())
    return value


def _load(where: str, said: str) -> ModuleType:
    file = Path(where).resolve()
    require(file.suffix != ".py" or file.is_file(), f"{said}: no such file")
    try:
        return _load_file(file) if file.suffix == ".py" else importlib.import_module(where)
    except Exception as error:
        fault = f"importing {where} failed: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            fault = f"no module {error.name}; install its package, or give ./FILE.py:NAME"
        raise ConfigError(f"{said}: {fault}") from error


def _load_file(file: Path) -> ModuleType:
    """The module in `file`, once a process."""
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # before it is executed: dataclasses look it up
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
