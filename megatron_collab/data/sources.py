"""The sources of data.train and data.eval: their names, how they are mixed, the commits they are pinned to."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_collab.data.packing import COMPRESSED, KINDS
from megatron_collab.runtime import hub
from megatron_collab.settings import ConfigError, build, option, require


@dataclass(frozen=True)
class Source:
    """Rows of one place. `preferred`: default splits, of which the first that exists is taken."""

    preferred: ClassVar[tuple[str, ...]] = ("train",)

    source: str = option("", "file, folder, glob, or OWNER/NAME[@REVISION] of the Hub")
    name: str | None = option(None, "name of the source; null: the last part of source")
    subset: str | None = option(None, "subset (configuration) of a data set with several")
    split: str | None = option(
        None, "split, or parts of several, e.g. train[:90%]+test; all: every split; null: the usual one"
    )

    @property
    def title(self) -> str:
        return self.name or self._place.name.partition("@")[0].partition(".")[0]

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that its place names, outermost first; of the Hub, the owner."""
        return tuple(part for part in self._place.parts[:-1] if part not in ("/", ".."))

    @property
    def _place(self) -> Path:
        hub_name = hub.parse(self.source)
        return Path(hub_name.repo if hub_name else os.path.normpath(self.source))


@dataclass(frozen=True)
class TrainingSource(Source):
    """One of the sources of data.train, mixed with the others (data/mixture.py)."""

    weight: float = option(1.0, "share of its rows in training, relative to other sources", gt=0)
    epochs: float | None = option(None, "instead of weight: passes over its rows, relative to other sources", gt=0)
    from_step: int = option(0, "first step that takes rows from it", ge=0)
    until_step: int | None = option(None, "first step that no longer takes rows from it; null: never", ge=1)
    sort_by: str | None = option(None, "column to sort an epoch by, e.g. -level; null: shuffled")

    def __post_init__(self) -> None:
        if self.until_step is not None and self.from_step >= self.until_step:
            raise ValueError(f"no step is between from_step={self.from_step} and until_step={self.until_step}")


def sources[Kind: Source](value: Any, setting: str, kind: type[Kind]) -> list[Kind]:
    """The entries of data.train or data.eval: one place, or a list of places and of settings of `kind`.

    Raises ConfigError naming the invalid setting.
    """
    result = []
    entries = value if isinstance(value, list) else [value]
    for number, entry in enumerate(entries):
        where = f"{setting}[{number}]" if isinstance(value, list) else setting
        settings = entry if isinstance(entry, Mapping) else {"source": str(entry)}
        result.append(build(kind, settings, f"{where}."))
        require(bool(result[-1].source), f"{where}.source: not set; give a file, a folder, a glob or a name of the Hub")
    require(bool(result), f"{setting}=[]: names no source; give one")
    return result


def unread_settings(source: Source, format: str) -> list[str]:
    """Messages about settings of a source that have no effect with this data.format."""
    names = [name for name in ("subset", "split") if getattr(source, name) is not None] if ":" in format else []
    return [f"{name}={getattr(source, name)}: not read, data.format reads all of the source" for name in names]


def unused_mixture(source: TrainingSource, single: bool, steps: int) -> list[str]:
    """As `unread_settings`, about how a source is mixed with others; `single`: there are no others."""
    names = [name for name, usual in (("weight", 1.0), ("epochs", None)) if getattr(source, name) != usual]
    notes = [f"{name}={getattr(source, name):g}: not read, there is no other source" for name in names if single]
    if source.from_step >= steps:
        notes.append(f"from_step={source.from_step}: takes no rows, the run ends with train.steps={steps}")
    return notes


def parse_sources(text: str, setting: str, kinds: Sequence[type[Source]] = (Source,)) -> list[Source]:
    """The sources of a command line: a place, settings in braces, or a list; Hub names get their current commits.

    All get the first of `kinds` that has every setting, else the first one. Raises ConfigError.
    """
    try:
        value: Any = OmegaConf.to_container(OmegaConf.create(text)) if text[:1] in ("{", "[") else text
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(
            f"{setting}={text}: cannot be read; give settings as '{{source: NAME, subset: NAME}}'"
        ) from error
    entries = value if isinstance(value, list) else [value]
    names = {name for entry in entries if isinstance(entry, Mapping) for name in entry}
    kind = next((kind for kind in kinds if names <= {spec.name for spec in fields(kind)}), kinds[0])
    parsed = sources(value, setting, kind)
    return [replace(source, source=hub.resolve(source.source, setting, "dataset")) for source in parsed]


def pin_sources(value: Any, setting: str, run_dir: Path) -> Any:
    """`value`, in the form that `sources` takes, with Hub names pinned to the run's commits. Raises ConfigError."""
    if isinstance(value, list):
        return [pin_sources(entry, setting, run_dir) for entry in value]
    if isinstance(value, Mapping):
        return {**value, "source": hub.pin(str(value.get("source", "")), setting, run_dir, "dataset")}
    return hub.pin(str(value), setting, run_dir, "dataset")


def check_exists(sources: Sequence[Source], setting: str) -> None:
    """Raises ConfigError for files that do not exist."""
    for source in sources:
        path = source.source
        name = hub.parse(path) is not None and Path(path).suffix not in (*KINDS, *COMPRESSED)
        exists = name or Path(path).exists() or bool(glob.glob(path, recursive=True))
        require(exists, f"{setting}={path}: no such file")
