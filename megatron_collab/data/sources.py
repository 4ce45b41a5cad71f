"""The sources of data.train and data.eval: what they are called, how they are mixed, the commits they are pinned to."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_collab.config import Config, ConfigError, build, option, require
from megatron_collab.data.packing import COMPRESSED, KINDS
from megatron_collab.runtime import hub


@dataclass(frozen=True)
class Source:
    """Rows of one place. `preferred`: the splits that are taken where none is chosen, the first that there is."""

    preferred: ClassVar[tuple[str, ...]] = ("train",)

    source: str = option("", "file, folder, glob, or OWNER/NAME[@REVISION] of the Hub")
    name: str | None = option(None, "what it is called; none: the last part of source")
    subset: str | None = option(None, "subset (configuration) of a data set with several")
    split: str | None = option(
        None, "split, or parts of some, as train[:90%]+test; all: every one; none: the usual one"
    )

    @property
    def title(self) -> str:
        named = hub.named(self.source)
        last = Path(named.repo if named else self.source).name
        return self.name or last.partition("@")[0].partition(".")[0]


@dataclass(frozen=True)
class TrainingSource(Source):
    """One of the sources of data.train, mixed with the others (data/mixture.py)."""

    weight: float = option(1.0, "its share of the rows that are taken, in relation to the others'", gt=0)
    epochs: float | None = option(None, "in place of weight: how often its rows are taken while the others' are", gt=0)
    from_step: int = option(0, "first step that takes rows from it", ge=0)
    until_step: int | None = option(None, "first step that takes none any more; none: to the end", ge=1)
    sort_by: str | None = option(None, "column by which an epoch is sorted, as -level; none: shuffled")

    def __post_init__(self) -> None:
        if self.until_step is not None and self.from_step >= self.until_step:
            raise ValueError(f"no step is between from_step={self.from_step} and until_step={self.until_step}")


def sources[Kind: Source](value: Any, setting: str, kind: type[Kind]) -> list[Kind]:
    """The entries of data.train or data.eval: one place, or a list of places and of settings of `kind`.

    Raises ConfigError naming the setting that cannot be.
    """
    found = []
    entries = value if isinstance(value, list) else [value]
    for number, entry in enumerate(entries):
        where = f"{setting}[{number}]" if isinstance(value, list) else setting
        given = entry if isinstance(entry, Mapping) else {"source": str(entry)}
        found.append(build(kind, given, f"{where}."))
        require(bool(found[-1].source), f"{where}.source: not set; give a file, a folder, a glob or a name of the Hub")
    require(bool(found), f"{setting}=[]: names no source; give one")
    return found


def unread(source: Source, config: Config) -> list[str]:
    """What is said of settings of a source that change nothing in this run."""
    found = list[str]()
    if ":" in config.data.format:
        names = [name for name in ("subset", "split") if getattr(source, name) is not None]
        found += [f"{name}={getattr(source, name)}: not read, data.format reads all of the source" for name in names]
    if isinstance(source, TrainingSource):
        alone = not isinstance(config.data.train, list) or len(config.data.train) == 1
        names = [name for name, usual in (("weight", 1.0), ("epochs", None)) if getattr(source, name) != usual]
        found += [f"{name}={getattr(source, name):g}: not read, there is no other source" for name in names if alone]
        if source.from_step >= (steps := config.train.steps):
            found.append(f"from_step={source.from_step}: takes no rows, the run ends with train.steps={steps}")
    return found


def given_sources(text: str, setting: str, kinds: Sequence[type[Source]] = (Source,)) -> list[Source]:
    """The sources of a command line: a place, settings in braces, or a list; names of the Hub at their commits.

    All have the first of `kinds` that has every setting, else the first one. Raises ConfigError.
    """
    try:
        value: Any = OmegaConf.to_container(OmegaConf.create(text)) if text[:1] in ("{", "[") else text
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(
            f"{setting}={text}: cannot be read; give settings as '{{source: NAME, subset: NAME}}'"
        ) from error
    entries = value if isinstance(value, list) else [value]
    given = {name for entry in entries if isinstance(entry, Mapping) for name in entry}
    kind = next((kind for kind in kinds if given <= {spec.name for spec in fields(kind)}), kinds[0])
    found = sources(value, setting, kind)
    return [replace(source, source=hub.resolved(source.source, setting, "dataset")) for source in found]


def pinned(value: Any, setting: str, run_dir: Path) -> Any:
    """`value`, as `sources` takes it, with the names of the Hub at the commits that the run goes by. ConfigError."""
    if isinstance(value, list):
        return [pinned(entry, setting, run_dir) for entry in value]
    if isinstance(value, Mapping):
        return {**value, "source": hub.pin(str(value.get("source", "")), setting, run_dir, "dataset")}
    return hub.pin(str(value), setting, run_dir, "dataset")


def check_exists(value: Any, setting: str, kind: type[Source]) -> None:
    """Raises ConfigError for settings of sources that cannot be, and for files that are not there."""
    for source in sources(value, setting, kind):
        path = source.source
        name = hub.named(path) is not None and Path(path).suffix not in (*KINDS, *COMPRESSED)
        there = name or Path(path).exists() or bool(glob.glob(path, recursive=True))
        require(there, f"{setting}={path}: no such file")
