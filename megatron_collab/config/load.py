"""From overrides to a `Config`: Hydra composes the schema, `conf/` and the command line; nothing is checked yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from megatron_collab.config.hint import nearest
from megatron_collab.config.option import ConfigError, check_declared, declared, require
from megatron_collab.config.schema import Config

# In the package where it is installed from a wheel, beside it in a checkout.
_FOLDERS = [folder / "conf" for folder in Path(__file__).resolve().parents[1:3]]
CONF = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])

COMMAND_LINE = "command line"

# Other names of options on the command line: no field of a dataclass can be called by a keyword of Python.
ALIASES = {"run.from": "run.fork"}

_schema = OmegaConf.structured(Config)
for _name, _value, _ in declared(Config):
    if isinstance(_value, dict):  # its keys are names that may be added
        OmegaConf.set_struct(OmegaConf.select(_schema, _name), False)
ConfigStore.instance().store(name="schema", node=_schema)


def compose(overrides: Sequence[str], defaults: Mapping[str, Any] = {}) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides; whether the values can work is for launch.validate to say.

    `defaults`: values of options, by dotted name, in place of those of the schema.
    Raises ConfigError for an unknown option, a value of the wrong type, or a required one that is not set.
    """
    with _schema_with(defaults):
        node = _composed(overrides)
    if missing := sorted(OmegaConf.missing_keys(node)):
        raise ConfigError(f"{missing[0]}: not set; give {missing[0]}=VALUE or an experiment=NAME that sets it")
    config: Config = OmegaConf.to_object(node)
    return config


def settings(overrides: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Name, value and source of every option that `compose` gives; required ones not set are omegaconf.MISSING.

    The source is "default", the file under conf/ that sets it, or "command line".
    """
    found = {name: (value, "default") for name, value in leaves(OmegaConf.to_container(_composed(overrides)))}
    for source, names in layers(overrides):
        for name, (value, _) in found.items():
            if any(f"{name}.".startswith(f"{prefix}.") for prefix in names):
                found[name] = value, source
    return [(name, *entry) for name, entry in found.items()]


def layers(overrides: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What sets options beside the schema (files under conf/, COMMAND_LINE), and which; later ones win."""
    overrides = _plain(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list("config", overrides, RunMode.RUN).defaults
    for default in found:
        path = f"{default.config_path}.yaml"
        if (CONF / path).is_file():
            prefix = f"{default.package}." if default.package else ""
            content: Any = OmegaConf.to_container(OmegaConf.load(CONF / path))
            yield f"conf/{path}", [prefix + leaf for leaf, _ in leaves(content)]
    names = (override.partition("=")[0].lstrip("~") for override in overrides)
    yield COMMAND_LINE, [name for name in names if name not in groups()]


def groups() -> dict[str, list[str]]:
    """The names that each group of `conf/` has, as {"experiment": ["booking", …]}."""
    found: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        found.setdefault(file.parent.name, []).append(file.stem)
    return found


def build[Options](kind: type[Options], given: Mapping[str, Any], prefix: str) -> Options:
    """`kind`, a dataclass of options, from settings that are called `prefix` and their name.

    Raises ConfigError for an unknown one, a value of the wrong type, and one that its declaration refuses.
    """
    names = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    node = OmegaConf.structured(kind)
    OmegaConf.set_readonly(node, False)  # which that of a frozen dataclass is
    for name, value in given.items():
        there = f"there are {', '.join(names) or 'none'}"
        require(name in names, f"{prefix}{name}: no such setting{nearest(name, names)}; {there}")
        try:
            node[name] = value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{prefix}{name}={value}: {str(error).splitlines()[0]}") from error
    try:
        made: Any = OmegaConf.to_object(node)
    except ValueError as error:  # of its __post_init__
        raise ConfigError(f"{prefix.removesuffix('.')}: {error}") from error
    check_declared(made, prefix)
    return made


def _composed(overrides: Sequence[str]) -> DictConfig:
    """The composed node, interpolations resolved; ConfigError for what Hydra or the schema refuses."""
    for override in overrides:
        _refuse_syntax(override)
    overrides = _plain(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            node = hydra.compose("config", overrides=overrides)
        OmegaConf.resolve(node)
        return node
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{_reason(error, overrides)} (all options: --help)") from error


@contextmanager
def _schema_with(defaults: Mapping[str, Any]) -> Iterator[None]:
    if not defaults:  # a schema that is stored is copied, which takes a quarter of the time of compose
        yield
        return
    node = _schema.copy()
    try:
        for name, value in defaults.items():
            OmegaConf.update(node, name, value, merge=False)
        ConfigStore.instance().store(name="schema", node=node)
        yield
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    finally:
        ConfigStore.instance().store(name="schema", node=_schema)


def _plain(overrides: Sequence[str]) -> list[str]:
    """Overrides without + and ++, which add what nothing would read, and with ~ after = as the home folder."""
    parts = (override.lstrip("+").partition("=") for override in overrides)
    named = (f"{ALIASES.get(name, name)}{sign}{value}" for name, sign, value in parts)
    return [re.sub(r"(?<==)~(?=/)", str(Path.home()), override, count=1) for override in named]


def _refuse_syntax(override: str) -> None:
    """What Hydra could read and a run has no use for, or Hydra would answer with advice that is refused here."""
    name, given, value = override.lstrip("+").partition("=")
    require(override[:1] != "-", f"{override}: no such argument; there are --help, --cfg and option=value")
    require(override[:1] != "~", f"{override}: options cannot be taken away; give another value instead")
    require(bool(given and name), f"{override}: give option=value")
    owner = re.split(r"[./]", name)[0]
    require(owner != "hydra", f"{override.lstrip('+')}: Hydra's own settings are not used; remove it")
    require("@" not in name, f"{override}: a group of settings has one place; give {name.partition('@')[0]}=NAME")
    logical = name not in _LOGICAL or value.lower() in ("true", "false", "0", "1") or "${" in value
    require(logical, f"{override}: must be true or false")
    try:
        sweeps = OverridesParser.create().parse_override(override).is_sweep_override()
    except HydraException:  # which says so once more when it composes
        return
    require(not sweeps, f"{override}: a run has one value of each option, and no sweeps; start a run for every value")


_LOGICAL = {name for name, default, _ in declared(Config) if isinstance(default, bool)}
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def _reason(error: Exception, overrides: Sequence[str]) -> str:
    """What Hydra refuses, in one line that names the override."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        there = groups().get(group, [])
        return f"{group}={name}: not in conf/{group}{nearest(name, there)}; there are {', '.join(there)}"
    if isinstance(error, OverrideParseException):
        name, _, value = error.override.partition("=")
        return f"{error.override}: cannot be read; quote special characters: '{name}=\"{value}\"'"
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):  # Hydra would recommend to add it with a +
        missing = str(cause.full_key)  # the first part of a name that is not there, or a key of a value in braces
        for name in (override.partition("=")[0] for override in overrides):
            if f"{name}.".startswith(f"{missing}.") or missing.startswith(f"{name}."):
                name = max(name, missing, key=len)
                return f"{name}: no such option{_nearest_option(name)}"
    said = [str(part).splitlines()[0] for part in (error, cause) if part]
    text = ": ".join(said).removeprefix("Error merging override ")
    text = re.sub(r"field '\S+' is not Optional", "cannot be null", text)
    text = re.sub(r"Interpolation key '(\S+)' not found", r"no option \1 that ${\1} could stand for", text)
    if "nterpolation" in text or "${" in text:
        given = next((override for override in overrides if "${" in override), "")
        return f"{given}: {text}".removeprefix(": ")
    if other := re.match(r"(\S+?=.*?): (Invalid \w+ assigned|Cannot assign|Value .* is incompatible)", text):
        return f"{other[1]}: must be {_kind(other[1].partition('=')[0])}"
    if converted := re.match(r"(.*?): Value .* could not be converted to (\w+)", text):
        return f"{converted[1]}: must be {_TYPES.get(converted[2], converted[2])}"
    return text


def _kind(name: str) -> str:
    """What an option, or a group of them, takes that was given something else."""
    default = next((value for option, value, _ in declared(Config) if option == name), None)
    if isinstance(default, list):
        return "a list in brackets, as [a, b]"
    return "settings in braces, as {name: value}" if isinstance(default, dict) else f"a group; give {name}.NAME=VALUE"


def _nearest_option(name: str) -> str:
    """Of its own group, where there is one, whose names are told."""
    (group, _, last), names = name.rpartition("."), [option for option, _, _ in declared(Config)]
    members = [option.rpartition(".")[2] for option in names if group and option.rpartition(".")[0] == group]
    if not members:
        with_entries = [option for option, default, _ in declared(Config) if isinstance(default, dict)]
        return nearest(name, [*names, *groups()]) or nearest(group, with_entries)
    return f"{nearest(last, members, f'{group}.')}; {group} has {', '.join(members)}"


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; an empty dict is a value."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
