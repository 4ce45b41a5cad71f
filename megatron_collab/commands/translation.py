"""A command or a configuration file of another system as a command of this one, by the tables in config/peers.

The file is only read: a shell script by shell_script.py, YAML by its keys.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from megatron_collab.commands.shell_script import UNKNOWN, commands
from megatron_collab.config import compose_program
from megatron_collab.config.peers import NO, NOT_NEEDED, System, SystemProgram, Target, normal, systems
from megatron_collab.config.programs import AllOptions, BuildDatasetConfig, Config, EvaluateConfig
from megatron_collab.launch import validate
from megatron_collab.runtime.console import show
from megatron_collab.settings import ConfigError, require
from megatron_collab.settings.documents import parse_json, parse_yaml
from megatron_collab.settings.option import declared
from megatron_collab.settings.values import leaves

_LONGEST, _MOST_OPTIONS = 1 << 18, 10_000  # bytes of a file, and options in it
_PROGRAMS = {"train": Config, "evaluate": EvaluateConfig, "build-dataset": BuildDatasetConfig}
_REQUIRED = {"run.dir": "runs/RUN", "model.path": "MODEL", "data.train": "DATA"}  # of train; of the others, run.dir
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_DEFAULTS = {name: value for name, value, _ in declared(AllOptions)}
_HYDRA = re.compile(r"\+{0,2}([A-Za-z_][\w@]*(?:[./][\w@-]+)*)=(.*)", re.DOTALL)
_ABSENT = ("none", "null", "")  # values that say that an option is not set
_NUMBER = re.compile(r"-\.?\d.*")
_PLAIN = re.compile(r"[\w./~@:+-]+")  # values that Hydra reads without quotation marks
Value = str | list[str]


@dataclass
class Translation:
    """A file of another system in our words.

    `settings`: ours by option. `adopted`: their option with its value, and the settings made of it; `defaults`: the
    same of what the file leaves out. `missing`: by NOT_NEEDED or NO, and by the reason, their options.
    """

    system: System
    program: SystemProgram
    settings: dict[str, str] = field(default_factory=dict)
    adopted: list[tuple[str, str]] = field(default_factory=list)
    defaults: list[tuple[str, str]] = field(default_factory=list)
    missing: dict[str, dict[str, list[str]]] = field(default_factory=lambda: {NOT_NEEDED: {}, NO: {}})

    @property
    def overrides(self) -> list[str]:
        """The arguments of our command, with words in capitals for what the file does not say."""
        required = {name: value for name, value in _REQUIRED.items() if name == "run.dir" or self.trains}
        return [f"{name}={value}" for name, value in (required | self.settings).items()]

    @property
    def trains(self) -> bool:
        """Whether our command is train."""
        return self.program.command == "train"

    def leave(self, kind: str, why: str, name: str) -> None:
        names = self.missing[kind].setdefault(why, [])
        names += [] if name in names else [name]


def print_translation(path: str) -> int:
    """Print our command for the file, what it is made of, what is not needed, and what has no counterpart."""
    result = translate(Path(path))
    show(f"# {path}: {result.system.name}")
    words = ["megatron-collab", result.program.command]
    show(" \\\n    ".join([" ".join(words), *map(shlex.quote, result.overrides)]))
    try:
        config: Any = compose_program(_PROGRAMS[result.program.command], result.overrides)
        if code := next(_code(config), None):
            show(
                f"\nNot checked: {code} may name code, which only the run loads; it checks all settings when it starts"
            )
        elif isinstance(config, Config):
            validate.check_settings(config)
    except ConfigError as error:
        show(f"\nBefore it runs: {error}")
    sections = (
        ("Taken over", [f"{theirs} -> {ours}" for theirs, ours in result.adopted]),
        (f"Defaults of {result.system.name}, which the file leaves out", [f"{a} -> {b}" for a, b in result.defaults]),
        ("Not needed", [f"{why}: {', '.join(names)}" for why, names in result.missing[NOT_NEEDED].items()]),
        ("Without counterpart", [f"{why}: {', '.join(names)}" for why, names in result.missing[NO].items()]),
    )
    for title, lines in sections:
        if lines:
            show("\n".join([f"\n{title}:", *(f"  {line}" for line in lines)]))
    return 0


def _code(config: Any) -> Iterator[str]:
    """The options whose values may name a class or a file with code; checks would import them."""
    for name, value in leaves(asdict(config)):
        texts = () if value == _DEFAULTS.get(name) or name.endswith(".api_base") else _texts(value)
        if any(":" in text or text.lower().endswith((".py", ".yaml", ".yml")) for text in texts):
            yield name


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        for entry in entries:
            yield from _texts(entry)


def translate(path: Path) -> Translation:
    """The file in our words. Raises ConfigError if it cannot be read, or is of no system that the tables know."""
    text = _read(path)
    is_yaml = path.suffix in (".yaml", ".yml")
    options = _options_of_yaml(path, text) if is_yaml else {}
    words = [] if is_yaml else commands(text)
    system, program, command, start = _program(path, words, options)
    options = options or dict([*_options_of_words(command[:start], 1), *_options_of_words(command[start:])])
    result = _translate(system, program, options, lambda setting: None)
    try:
        _check(program, result.settings)
    except ConfigError:  # then setting by setting, which takes seconds
        result = _translate(system, program, options, lambda settings: _check(program, settings))
    return result


def _read(path: Path) -> str:
    message = f"--from={path}: must be a file of at most {_LONGEST} bytes; give a shell script or a .yaml"
    require(path.is_file() and path.stat().st_size <= _LONGEST, message)
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"--from={path}: {error.strerror}; give another file") from error


def _program(
    path: Path, words: list[list[str]], options: Mapping[str, Value]
) -> tuple[System, SystemProgram, list[str], int]:
    """The system and program, the words of its last command in the file, and where those of the program begin."""
    known = [(system, program) for system in systems() for program in system.programs]
    for command in reversed(words):
        for system, program in known:
            for part in program.match:
                start = _start(command, part)
                present = dict(_options_of_words(command[start:])) if start else {}
                if start and (not part.endswith(".py") or _has_key(system, program, present)):  # many have a train.py
                    return system, program, command, start
    command = max(words, key=len, default=[])
    names = options or dict(_options_of_words(command))
    shares = [(sum(1 for name in names if system.row(name)), system) for system in systems() if system.programs]
    most = max(share for share, _ in shares)
    message = (
        f"--from={path}: its options are of none of {', '.join(system.name for _, system in shares)}; give another file"
    )
    require(2 * most > len(names), message)
    system = next(system for share, system in shares if share == most)
    by_key = (program for program in system.programs if _has_key(system, program, names))
    starts = (number for number, word in enumerate(command, 1) if re.fullmatch(r"[\w./-]+\.py", word))
    return system, next(by_key, system.programs[0]), command, next(starts, 0)


def _has_key(system: System, program: SystemProgram, names: Iterable[str]) -> bool:
    return any(system.current(name) in program.keys for name in names)


def _start(command: list[str], part: str) -> int:
    """The number of the words up to `part`, a piece of a command line that begins a name; 0 if it is not there."""
    match = re.search(rf"(?<!\w){re.escape(part)}", " ".join(command))
    starts = accumulate((len(word) + 1 for word in command), initial=0)
    return sum(start < match.end() for start in starts) if match else 0


def _options_of_words(words: list[str], most: int = 1000) -> Iterator[tuple[str, Value]]:
    """name=value, +name=value, --name=value, and --name with the words that follow it, at `most` so many."""
    flag = ""
    values: list[str] = []
    for word in [*words, "--"]:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            if flag:
                yield from _named(flag, values[:most] if len(values[:most]) > 1 else "".join(values[:1]) or "true")
            flag, sign, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
            values = [value] if sign else []
        elif hydra := _HYDRA.fullmatch(word):
            yield from _named(hydra[1], hydra[2])
        elif flag:
            values.append(word)


def _named(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    """The option; one for each entry of a JSON object."""
    entries: Any = None
    if isinstance(value, str) and value.startswith("{"):
        try:
            entries = parse_json(value)
        except ValueError:
            entries = None
    if isinstance(entries, dict):
        yield from ((f"{name}.{key}", str(entry)) for key, entry in entries.items())
    else:
        yield name, value


def _options_of_yaml(path: Path, text: str) -> dict[str, Value]:
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--from={path}: cannot be read as YAML ({error}); mend it") from error
    require(isinstance(tree, dict), f"--from={path}: has no options; give a file of options by name")
    options = [*islice(_options_of_node("", tree), _MOST_OPTIONS + 1)]
    require(len(options) <= _MOST_OPTIONS, f"--from={path}: has more than {_MOST_OPTIONS} options; shorten it")
    return dict(options)


def _options_of_node(name: str, node: Any) -> Iterator[tuple[str, Value]]:
    """The options in a part of a YAML file; those in a list of objects have the name of the list."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _options_of_node(f"{name}.{key}" if name else str(key), value)
    elif isinstance(node, list) and any(isinstance(entry, dict) for entry in node):
        for entry in node:
            yield from _options_of_node(name, entry)
    else:
        yield name, _leaf(node)


def _leaf(node: Any) -> Value:
    entries = node if isinstance(node, list) else [node]
    texts = [UNKNOWN if isinstance(entry, dict | list) or "${" in str(entry) else str(entry) for entry in entries]
    return texts if len(texts) > 1 else "".join(texts)


def _translate(
    system: System, program: SystemProgram, options: Mapping[str, Value], check: Callable[[Mapping[str, str]], None]
) -> Translation:
    """The options in our words; what `check` refuses has no counterpart."""
    current = {system.current(name): value for name, value in options.items()}
    shown = {system.current(name): name for name in options}
    values: dict[str, Value] = {**program.defaults, **current}
    result = Translation(system, program)
    result.settings |= dict(setting.split("=", 1) for setting in program.settings)
    launchers = [other for other in systems() if not other.programs]
    order = {
        name: place for place, name in enumerate([*system.rows, *(row for other in launchers for row in other.rows)])
    }
    for name in sorted(values, key=lambda name: order.get(name, len(order))):
        row, label = system.row(name, program), shown.get(name, name)
        row = row or next(filter(None, (other.row(name) for other in launchers)), None)
        value = values[name]
        mapped = row and any(normal(value) in target.values for target in row.targets)
        if normal(value) in _ABSENT and not mapped:
            continue
        if row is None:
            result.leave(NO, f"not in the table of {system.name}'s options", label)
            continue
        if not row.targets:
            result.leave(row.kind, row.why, label)
        settings: dict[str, str] = {}
        reasons: list[ConfigError | _NoEffect] = []
        for target in row.targets:
            try:
                ours = _settings(target, value, {**result.settings, **values})
                check(ours)
                settings |= ours
            except (ConfigError, _NoEffect) as error:
                reasons.append(error)
        for reason in reasons if name in current else ():
            if isinstance(reason, ConfigError) or not settings:
                result.leave(NO if isinstance(reason, ConfigError) else NOT_NEEDED, str(reason), label)
        if settings:
            result.settings |= settings
            line = " ".join(f"{option}={text}" for option, text in settings.items())
            (result.adopted if name in current else result.defaults).append((f"{label}={_text(value)}", line))
    return result


class _NoEffect(Exception):
    """The value means what happens here anyway, or means nothing beside their other options."""


def _settings(target: Target, value: Value, values: Mapping[str, Value]) -> dict[str, str]:
    """Our settings for `value`. Raises ConfigError if there are none, _NoEffect if none are needed."""
    for name, expected in target.condition.items():
        actual = normal(values.get(name, "false"))
        if ("false" if actual in _ABSENT else actual) != expected:
            raise _NoEffect(f"it counts only with {name}={expected}")
    computed = "the value is computed when the script runs, or comes from outside"
    require(UNKNOWN not in _text(value), f"set {' and '.join(target.names())}; {computed}")
    mapped = target.values.get(normal(value), "") if isinstance(value, str) else ""
    if mapped is None:
        raise _NoEffect("it is so here, too")
    if "=" in mapped:
        return dict(setting.split("=", 1) for setting in mapped.split())
    require(bool(target.options), f"{_text(value)} is not built in, but {', '.join(target.values)}")
    value = mapped or value
    if isinstance(value, str) and value.startswith("[") and len(target.options) > 1:
        value = [part.strip(" '\"") for part in value.strip("[]").split(",")]
    if target.compute:
        value = _computed(target, value, values)
    if target.keys:
        keys = values.get(target.keys, [])
        metrics = [key.rpartition(">")[2] for key in ([keys] if isinstance(keys, str) else keys)]
        weights = zip(metrics, [value] if isinstance(value, str) else value, strict=False)
        return {target.options[0].replace("*", metric): _written("", weight) for metric, weight in weights}
    if target.sets:
        return {target.options[0]: _sets(value)}
    if isinstance(value, list) and len(target.options) == len(value) > 1:
        return {option: _written(option, part) for option, part in zip(target.options, value, strict=True)}
    return {option: _written(option, value) for option in target.options}


def _computed(target: Target, value: Value, values: Mapping[str, Value]) -> str:
    """The value of the formula; rounded up if the option is a whole number. Raises ConfigError if a part is missing."""
    assert target.compute
    (option,) = target.options
    parts = target.compute.split()
    numbers = []
    for part in parts[::2]:
        text = _text(value if part == "value" else values.get(part, str(_DEFAULTS.get(part, part))))
        try:
            numbers.append(float(text))
        except ValueError:
            raise ConfigError(f"set {option}, which is {target.compute}; the file has no {part}") from None
    result = numbers[0]
    for symbol, number in zip(parts[1::2], numbers[1:], strict=True):
        require(symbol != "/" or number != 0, f"set {option}, which is {target.compute}; a part is 0")
        result = _OPERATORS[symbol](result, number)
    require(math.isfinite(result), f"set {option}, which is {target.compute}; it is too large")
    whole = not isinstance(_DEFAULTS.get(option), float)
    return str(max(1, math.ceil(result)) if whole else f"{result:.6g}")


def _sets(value: Value) -> str:
    """A list of sets from pairs of a name and a source."""
    words = [value] if isinstance(value, str) else value
    if len(words) % 2:
        return words[-1]
    pairs = zip(words[::2], words[1::2], strict=True)
    return f"[{', '.join(f'{{name: {_quoted(name)}, source: {_quoted(source)}}}' for name, source in pairs)}]"


def _written(option: str, value: Value) -> str:
    """The value as our command line takes it: in brackets if the option is a list or there are several."""
    if isinstance(value, str) and value.startswith("["):
        return value
    words = value.split(",") if isinstance(value, str) and isinstance(_DEFAULTS.get(option), list) else value
    if isinstance(words, list):
        return f"[{', '.join(_quoted(word.strip()) for word in words)}]"
    return words.lower() if isinstance(_DEFAULTS.get(option), bool) else _quoted(words)


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _text(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _check(program: SystemProgram, settings: Mapping[str, str]) -> None:
    """Raises ConfigError if our program refuses the settings."""
    required = [f"{name}={value}" for name, value in _REQUIRED.items() if name not in settings]
    try:
        compose_program(
            _PROGRAMS[program.command], [*required, *(f"{name}={value}" for name, value in settings.items())]
        )
    except ConfigError as error:
        raise ConfigError(str(error).removesuffix(" (all options: --help)")) from error
