"""Builds the settings of a program from overrides, without cross-checks.

Hydra composes the options of all programs and `conf/`, once per choice of files in a process, since that takes a tenth
of a second; the settings of the command line are merged into a copy. A program takes its own options.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from megatron_collab.config import peers
from megatron_collab.config.programs import AllOptions, CallConfig, Config
from megatron_collab.settings.documents import DEPTH, nesting
from megatron_collab.settings.hint import nearest
from megatron_collab.settings.option import ConfigError, check_declared, declared, require
from megatron_collab.settings.values import leaves

# Inside the package if installed from a wheel, beside it in a checkout.
_FOLDERS = [folder / "conf" for folder in Path(__file__).resolve().parents[1:3]]
CONF = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])

COMMAND_LINE = "command line"
_LONGEST = 1 << 20  # bytes of a file under conf/

# Aliases of options on the command line: a dataclass field cannot have the name of a Python keyword.
ALIASES = {"run.from": "run.fork"}

# Options that say what another one says in another unit, with that one and its default.
_INSTEAD_OF = {name: rule.instead_of for name, _, rule in declared(AllOptions) if rule.instead_of}
_REPLACED = {name: value for name, value, _ in declared(AllOptions) if name in _INSTEAD_OF.values()}

_schema = OmegaConf.structured(AllOptions)
for _name, _value, _ in declared(AllOptions):
    if isinstance(_value, dict):  # its keys are names that may be added
        OmegaConf.set_struct(OmegaConf.select(_schema, _name), False)
ConfigStore.instance().store(name="schema", node=_schema)
_PICKLED_SCHEMA = pickle.dumps(_schema)


def compose(overrides: Sequence[str], defaults: Mapping[str, Any] = {}) -> Config:
    """The settings of a training; see `compose_program`."""
    return compose_program(Config, overrides, defaults)


def compose_program[Program: CallConfig](
    program: type[Program], overrides: Sequence[str], defaults: Mapping[str, Any] = {}
) -> Program:
    """The settings of `program`: `conf/config.yaml` composed with Hydra overrides; launch.validate checks the whole.

    `defaults`: values of options by dotted name, in place of the schema's.
    Raises ConfigError for an unknown option, one that the program refuses, a value of the wrong type or one that its
    declaration rejects, or a required option that is not set.
    """
    for name in (override.lstrip("+").partition("=")[0] for override in overrides):
        group = name.partition(".")[0]
        message = f"{name}: is only for `megatron-collab {program.refused.get(group)}`; remove it"
        require(group not in program.refused, message)
    config = _part(program, _compose_values(overrides, defaults))
    if missing := sorted(name for name, value, _ in declared(config) if value == MISSING):
        raise ConfigError(f"{missing[0]}: not set; give {missing[0]}=VALUE or an experiment=NAME that sets it")
    check_declared(config)
    return config


def settings(overrides: Sequence[str], program: type[CallConfig] = Config) -> list[tuple[str, Any, str]]:
    """Name, value and source of every option of `program`; required ones that are not set are omegaconf.MISSING.

    The source is "default", the file under conf/ that sets the option, or "command line".
    """
    composed = asdict(_part(program, _compose_values(overrides)))
    options = {name: (value, "default") for name, value in leaves(composed)}
    for source, names in layers(overrides):
        for name, (value, _) in options.items():
            if any(f"{name}.".startswith(f"{prefix}.") for prefix in names):
                options[name] = value, source
    return [(name, *entry) for name, entry in options.items()]


def layers(overrides: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Sources of settings beside the schema (files under conf/, COMMAND_LINE) with the options they set; later wins."""
    overrides = _plain(overrides)
    choices, _ = _choices_and_settings(overrides)
    yield from _layers_of_files(choices, _conf_files())
    yield COMMAND_LINE, [name for override in overrides for name in _options_set(override)]


def _options_set(override: str) -> list[str]:
    """The options that an override sets: those in the braces of a group's value, none if it chooses a file."""
    name = override.partition("=")[0].lstrip("~")
    value = _parsed(override).value()
    if isinstance(value, dict) and value and not any(name == option for option, _, _ in declared(AllOptions)):
        return [f"{name}.{leaf}" for leaf, _ in leaves(value)]
    return [] if name in groups() else [name]


def groups() -> dict[str, list[str]]:
    """The names in each group of `conf/`, e.g. {"experiment": ["booking", …]}."""
    names: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        names.setdefault(file.parent.name, []).append(file.stem)
    return names


# Path of a file under conf/, time of its last change in nanoseconds, size in bytes.
ConfFile = tuple[str, int, int]


def _compose_values(overrides: Sequence[str], defaults: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The composed values, interpolations resolved. Raises ConfigError if Hydra or the schema rejects an override."""
    for override in overrides:
        _refuse_syntax(override)
    overrides = _plain(overrides)
    files, schema = _conf_files(), _schema_with(defaults)
    try:
        choices, parsed = _choices_and_settings(overrides)
        node: DictConfig = pickle.loads(_compose_files(choices, files, schema))
        for override in parsed:
            _merge(node, override)
        values: Any = OmegaConf.to_container(node, resolve=True)
        _choose_alternatives(values, overrides)
        return values
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{_reason(error, overrides)} (all options: --help)") from error
    except RecursionError as error:
        raise ConfigError(f"conf/: a file nests more than {DEPTH} deep; flatten it") from error


def _choices_and_settings(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Override]]:
    """The overrides that choose a file of a group of conf/, and the parsed others. Raises HydraException."""
    parsed, names = [_parsed(override) for override in overrides], groups()
    chooses = [override.key_or_group in names and not isinstance(override.value(), dict) for override in parsed]
    choices = (line for line, choice in zip(overrides, chooses, strict=True) if choice)
    return tuple(choices), [override for override, choice in zip(parsed, chooses, strict=True) if not choice]


def _choose_alternatives(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Of an option and the one that it is `instead_of`, reset the one that is set earlier.

    Raises ConfigError if the same file, or the command line, sets both.
    """
    for name, other in _INSTEAD_OF.items():
        group, first, second = _entry(values, name), name.rpartition(".")[2], other.rpartition(".")[2]
        if group[first] is None or group[second] is None:
            continue
        places = [names for _, names in layers(overrides)]
        last, last_other = (
            max((at for at, names in enumerate(places) if it in names), default=-1) for it in (name, other)
        )
        if last == last_other:
            message = f"{name}={group[first]}: {other}={group[second]} sets the same; give one of them"
            require(last == -1, message)  # neither: recorded values of a run
        elif last > last_other:
            group[second] = _REPLACED[other]
        else:
            group[first] = None


def _entry(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The group of composed values that has the option `name`."""
    for key in name.split(".")[:-1]:
        values = values[key]
    return values


@lru_cache(maxsize=1024)
def _parsed(override: str) -> Override:
    """The parsed override; Hydra's parser takes a millisecond. Raises HydraException."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def _merge(node: DictConfig, override: Override) -> None:
    try:
        OmegaConf.update(node, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException as error:
        raise HydraException(override.input_line) from error


@lru_cache(maxsize=64)
def _compose_files(choices: tuple[str, ...], files: tuple[ConfFile, ...], schema: bytes) -> bytes:
    """The pickled node that `files` give with `choices` over the pickled `schema`; unpickling is the cheapest copy."""
    ConfigStore.instance().store(name="schema", node=pickle.loads(schema))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(hydra.compose("config", overrides=list(choices)))


@lru_cache(maxsize=64)
def _layers_of_files(choices: tuple[str, ...], files: tuple[ConfFile, ...]) -> list[tuple[str, list[str]]]:
    """The chosen ones of `files` in the order in which they are merged, with the options that each sets."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        default_files = loader.compute_defaults_list("config", list(choices), RunMode.RUN).defaults
    chosen = []
    for default in default_files:
        path = f"{default.config_path}.yaml"
        if (CONF / path).is_file():
            prefix = f"{default.package}." if default.package else ""
            content: Any = OmegaConf.to_container(OmegaConf.load(CONF / path))
            chosen.append((f"conf/{path}", [prefix + leaf for leaf, _ in leaves(content)]))
    return chosen


def _conf_files() -> tuple[ConfFile, ...]:
    """The files under conf/. Raises ConfigError for one that may never end, or is too long to be settings."""
    files = []
    for file in sorted(CONF.rglob("*.yaml")):
        status = file.stat() if file.is_file() else None
        if status is None or status.st_size > _LONGEST:
            name = file.relative_to(CONF)
            raise ConfigError(f"conf/{name}: must be a file of at most {_LONGEST} bytes; shorten it, or remove it")
        files.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(files)


def _part[Options](kind: type[Options], composed: Mapping[str, Any]) -> Options:
    """The options of `kind` in the composed values; those that are not set have their defaults."""
    values: dict[str, Any] = {}
    for spec in fields(kind):  # type: ignore[arg-type]  # a dataclass
        group: Any = spec.default_factory
        value = composed[spec.name]
        if isinstance(group, type) and is_dataclass(group):
            values[spec.name] = _part(group, value)
        elif value != MISSING:
            values[spec.name] = value
    return kind(**values)


def _schema_with(defaults: Mapping[str, Any]) -> bytes:
    """The pickled schema with other values of options. Raises ConfigError for a value of the wrong type."""
    if not defaults:
        return _PICKLED_SCHEMA
    node = _schema.copy()
    try:
        for name, value in defaults.items():
            OmegaConf.update(node, name, value, merge=False)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return pickle.dumps(node)


def _plain(overrides: Sequence[str]) -> list[str]:
    """Overrides without + and ++ (added options would not be read), aliases resolved, and ~ as the home folder."""
    parts = (override.lstrip("+").partition("=") for override in overrides)
    named = (f"{ALIASES.get(name, name)}{sign}{value}" for name, sign, value in parts)
    home = os.path.expanduser("~")
    return [re.sub(r"""^([^=]*=["']?)~(?=["'/]|$)""", lambda match: match[1] + home, override) for override in named]


def _refuse_syntax(override: str) -> None:
    """Raises ConfigError for syntax that is valid for Hydra but useless here, or gets misleading advice from Hydra."""
    name, sign, value = override.lstrip("+").partition("=")
    deep = nesting(value) > DEPTH  # takes Hydra's parser minutes
    require(not deep, f"{name}: nests brackets more than {DEPTH} deep; flatten it")
    if override[:1] == "-":
        hint = peers.hint(override.partition("=")[0]) or "; give --help, --cfg or option=value"
        raise ConfigError(f"{override}: no such argument{hint}")
    require(override[:1] != "~", f"{override}: options cannot be removed; give another value")
    require(bool(sign and name), f"{override}: give option=value")
    owner = re.split(r"[./]", name)[0]
    require(owner != "hydra", f"{override.lstrip('+')}: Hydra's own settings are not used; remove it")
    require("@" not in name, f"{override}: Hydra's packages are not supported; give {name.partition('@')[0]}=NAME")
    logical = name not in _LOGICAL or value.lower() in ("true", "false", "0", "1") or "${" in value
    require(logical, f"{override}: must be true or false")
    try:
        sweeps = _parsed(override).is_sweep_override()
    except HydraException:  # raised again by compose
        return
    require(not sweeps, f"{override}: sweeps are not supported; start one run per value")


_LOGICAL = {name for name, default, _ in declared(AllOptions) if isinstance(default, bool)}
_TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def _reason(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's error as one line that names the override."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        names = groups().get(group, [])
        return f"{group}={name}: not in conf/{group}{nearest(name, names)}; there are {', '.join(names)}"
    if isinstance(error, OverrideParseException):
        name, _, value = error.override.partition("=")
        return f"{error.override}: cannot be read; quote special characters: '{name}=\"{value}\"'"
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):  # Hydra would recommend adding it with a +
        missing = str(cause.full_key)  # the first unknown part of a name, or a key of a value in braces
        for name in (override.partition("=")[0] for override in overrides):
            if f"{name}.".startswith(f"{missing}.") or missing.startswith(f"{name}."):
                name = max(name, missing, key=len)
                return f"{name}: no such option{peers.hint(name) or _nearest_option(name)}"
    lines = [str(part).splitlines()[0] for part in (error, cause) if part]
    text = ": ".join(lines).removeprefix("Error merging override ")
    text = re.sub(r"field '\S+' is not Optional", "cannot be null", text)
    text = re.sub(r"Interpolation key '(\S+)' not found", r"${\1} refers to no option", text)
    if "nterpolation" in text or "${" in text:
        interpolated = next((override for override in overrides if "${" in override), "")
        return f"{interpolated}: {text}".removeprefix(": ")
    if other := re.match(r"(\S+?=.*?): (Invalid \w+ assigned|Cannot assign|Value .* is incompatible)", text):
        return f"{other[1]}: must be {_kind(other[1].partition('=')[0])}"
    if converted := re.match(r"(.*?): Value .* could not be converted to (\w+)", text):
        return f"{converted[1]}: must be {_TYPES.get(converted[2], converted[2])}"
    return text


def _kind(name: str) -> str:
    """The kind of value that an option or a group takes, for messages about a wrong one."""
    default = next((value for option, value, _ in declared(AllOptions) if option == name), None)
    if isinstance(default, list):
        return "a list in brackets, e.g. [a, b]"
    return "settings in braces, e.g. {name: value}" if isinstance(default, dict) else f"a group; give {name}.NAME=VALUE"


def _nearest_option(name: str) -> str:
    """A hint at the nearest option: within the same group if it exists, with the names of its members."""
    (group, _, last), names = name.rpartition("."), [option for option, _, _ in declared(AllOptions)]
    members = [option.rpartition(".")[2] for option in names if group and option.rpartition(".")[0] == group]
    if not members:
        with_entries = [option for option, default, _ in declared(AllOptions) if isinstance(default, dict)]
        return nearest(name, [*names, *groups()]) or nearest(group, with_entries)
    return f"{nearest(last, members, f'{group}.')}; {group} has {', '.join(members)}"
