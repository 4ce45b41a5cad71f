"""Values of options: the dataclass that they make, a copy with some replaced, and a nested dict as dotted names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_collab.settings.hint import nearest
from megatron_collab.settings.option import ConfigError, check_declared, require


def build[Options](kind: type[Options], values: Mapping[str, Any], prefix: str) -> Options:
    """An instance of `kind`, a dataclass of options, with `values`; messages call a setting `prefix` plus its name.

    Raises ConfigError for an unknown setting, a value of the wrong type, or one that its declaration rejects.
    """
    names = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    options_class: type = kind
    node = copy.deepcopy(_default_node(options_class))
    for name, value in values.items():
        available = f"there are {', '.join(names) or 'none'}"
        require(name in names, f"{prefix}{name}: no such setting{nearest(name, names)}; {available}")
        try:
            node[name] = value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{prefix}{name}={value}: {str(error).splitlines()[0]}") from error
    try:
        options: Any = OmegaConf.to_object(node)
    except ValueError as error:  # of its __post_init__
        raise ConfigError(f"{prefix.removesuffix('.')}: {error}") from error
    check_declared(options, prefix)
    return options


@lru_cache(maxsize=64)
def _default_node(kind: type) -> DictConfig:
    """The node of a dataclass with its defaults, to be copied, which takes a quarter of the time of making it."""
    node: DictConfig = OmegaConf.structured(kind)
    OmegaConf.set_readonly(node, False)  # the node of a frozen dataclass is read-only
    return node


def replaced[Options](options: Options, values: Mapping[str, Any]) -> Options:
    """A copy of the dataclass `options` with other `values`, by dotted name."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        group, _, option = name.partition(".")
        changed[group] = replaced(changed.get(group, getattr(options, group)), {option: value}) if option else value
    return replace(options, **changed)  # type: ignore[type-var]  # a dataclass


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nested dict; an empty dict is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
