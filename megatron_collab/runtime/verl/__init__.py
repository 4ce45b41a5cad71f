"""Loads and calls classes and functions that were written for verl, which need no edit and no verl.

They import their base classes from verl, which may not be installed, or be a version without them. Whatever it lacks of
MODULES comes from here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_collab.runtime.side_loop import LateCall, SideLoop
from megatron_collab.settings import ConfigError, require, resolve

SECONDS = 120.0  # of a constructor, as in launch/extensions.py
_ALL_ARGS, _ALL_KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
MODULES = {  # the module of this package that stands in for one of verl
    "verl.interactions.base": "base",
    "verl.tools.base_tool": "base",
    "verl.tools.schemas": "schemas",
    "verl.utils.reward_score.gsm8k": "gsm8k",
    "verl.utils.rollout_trace": "base",
}
_PACKAGES = {name.rsplit(".", depth)[0] for name in MODULES for depth in (1, 2, 3)}


class _Finder(MetaPathFinder, Loader):
    """Finds MODULES and the packages around them if no other finder does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = name in _PACKAGES
        return ModuleSpec(name, self, is_package=package) if package or name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MODULES:
            names = vars(importlib.import_module(f"{__name__}.{MODULES[module.__name__]}"))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("_")})


_FINDER = _Finder()


def load(spec: str, setting: str, methods: Sequence[str] = ()) -> Any:
    """The class with `methods`, or the function without, that `spec` names.

    `spec`: package.module:NAME, ./file.py:NAME, or package.module.NAME as verl writes it. Raises ConfigError naming
    `setting`.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)  # last, so that a verl that is installed comes first
    require(bool(spec), f"{setting}: is not set; give package.module:NAME or ./file.py:NAME")
    if ":" not in spec:
        spec = ":".join(spec.rsplit(".", 1))
    target = resolve(spec, setting, object, functions=True)
    lacking = next((name for name in methods if not callable(getattr(target, name, None))), None)
    require(lacking is None, f"{setting}={spec}: has no method {lacking}; give a class that was written for verl")
    return target


def attempt(label: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function, called before a run starts and again in its workers.

    Raises ConfigError if it fails or takes more than SECONDS.
    """
    loop = SideLoop.acquire()
    try:
        return loop.wait_for(SECONDS, function, *args)
    except LateCall as error:
        raise ConfigError(f"{label} ({error})") from error
    except Exception as error:  # an extension may raise anything
        raise ConfigError(f"{label} ({' '.join(f'{type(error).__name__}: {error}'.split())})") from error
    finally:
        loop.release()


def without_nulls(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a row that are there; Parquet fills structs with nulls for what only other rows have."""
    return {name: value for name, value in (arguments or {}).items() if value is not None}


async def call(loop: SideLoop, method: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The result of a method in `loop`, with what its signature takes of the arguments.

    `args` are for its first parameters, whatever their names, except those in `keywords`. Older interfaces lack the
    first of `args`, an id. Of `keywords` the method gets those that it names, or all if it has **kwargs.
    """
    positional, named = _accepted(method, args, keywords)
    return await loop.run(method, *positional, **named)


def _accepted(
    method: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    parameters = inspect.signature(method).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters if parameter.kind not in (_ALL_ARGS, _ALL_KEYWORDS)}
    accepted = {name: value for name, value in keywords.items() if name in named or _ALL_KEYWORDS in kinds}
    if _ALL_ARGS in kinds:
        return args, accepted
    free = [parameter.name for parameter in parameters if parameter.name in named and parameter.name not in keywords]
    return (), {**dict(zip(free, args[max(len(args) - len(free), 0) :], strict=False)), **accepted}
