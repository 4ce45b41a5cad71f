"""The rows of a source: the files of a path, a glob, a folder or a data set of the Hub, in their splits."""

from __future__ import annotations

import glob
import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from megatron_collab.config import nearest, require
from megatron_collab.data.packing import COMPRESSED, KINDS, kind_of, suffix_of
from megatron_collab.data.sources import Source
from megatron_collab.data.storing import StoredRows, stored
from megatron_collab.runtime import hub

ALL = "all"  # in place of a split: every one
_DESCRIBING = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json")
_BATCH = 1000  # rows that are taken from Arrow at once


@dataclass(frozen=True)
class FilePart:
    """The rows from `begin` to before `end` of a file; `where` says in messages which file that is."""

    of: StoredRows
    begin: int
    end: int
    where: str

    def __len__(self) -> int:
        return self.end - self.begin


class Rows(Sequence[dict[str, Any]]):
    """The rows of an opened source, each parsed when it is asked for, with null for columns that it lacks.

    `column_names` are those of all rows, `splits` those that are chosen; equal `fingerprint`s mean equal rows.
    """

    def __init__(self, parts: Sequence[FilePart], splits: Sequence[str]) -> None:
        self._parts, self.splits = parts, splits
        self._ends = list(accumulate(map(len, parts)))
        self._empty: dict[str, Any] = dict.fromkeys(name for part in parts for name in part.of.columns)
        self.column_names = list(self._empty)
        self.fingerprint = [f"{part.of.digest}[{part.begin}:{part.end}]" for part in parts]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        part, at = self._place(range(len(self))[index])
        return self._empty | json.loads(part.of.texts[at].as_py())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            for begin in range(part.begin, part.end, _BATCH):
                for text in part.of.texts[begin : min(begin + _BATCH, part.end)].to_pylist():
                    yield self._empty | json.loads(text)

    def at(self, number: int) -> str:
        """Where the row `number` is, for messages: setting, file, and the row in it, counted from 1."""
        part, at = self._place(number)
        return f"{part.where} row {part.of.numbers[at].as_py()}"

    def _place(self, number: int) -> tuple[FilePart, int]:
        which = bisect_right(self._ends, number)
        part = self._parts[which]
        return part, part.end - (self._ends[which] - number)


def open_rows(source: Source, setting: str, cache: Path | None = None) -> Rows:
    """The rows of `source`; Arrow is written to `cache` once, or for this process alone. Raises ConfigError,
    and ValueError for what cannot be read; both name `setting` and the source.
    """
    where = f"{setting}={source.source}"
    path = Path(source.source)
    if hub.named(source.source):
        path = _downloaded(source, setting)
    if path.is_dir():
        splits = _saved(path, source, where) or _files_of_splits(path, source, where)
    else:
        found = [str(path)] if path.is_file() else sorted(glob.glob(source.source, recursive=True))
        there = [file for file in found if not Path(file).is_dir()]
        require(bool(there), f"{where}: no such file")
        message = f"{where}: files have no subsets, and no split but train; remove the setting, or give a folder"
        named = source.split if source.split not in (None, ALL) else "train"
        require(source.subset is None and named.partition("[")[0] == "train" and "+" not in named, message)
        splits = {named: there}
    single = path.is_file()
    parts = list[FilePart]()
    with ExitStack() as stack:  # what is mapped into memory stays when its folder is removed
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for split, files in splits.items():
            opened = [_opened(file, where if single else f"{setting}={file}", folder) for file in _alike(files, where)]
            parts += _chosen_rows(opened, split, where)
    if not any(map(len, parts)):
        raise ValueError(f"{where}: has no rows; give a source with some")
    return Rows(parts, list(splits))


def _opened(file: str, where: str, cache: Path) -> FilePart:
    rows = stored(file, where, cache)
    return FilePart(rows, 0, len(rows), where)


def _alike(files: Sequence[str], where: str) -> Sequence[str]:
    """`files`, which must be of one format."""
    kind, *others = dict.fromkeys(map(kind_of, files))
    message = f"holds files of the formats {kind} and {', '.join(others)}; give a glob that takes one of them"
    require(not others, f"{where}: {message}")
    return files


def _chosen_rows(parts: Sequence[FilePart], split: str, where: str) -> Sequence[FilePart]:
    """The rows that a split such as train[:90%] asks for, of those of the whole one."""
    if "[" not in split:
        return parts
    from datasets import ReadInstruction

    rows = sum(map(len, parts))
    name = split.partition("[")[0]
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({name: rows})
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: split={split} cannot be read ({reason}); give NAME, or NAME[:90%]") from error
    first, last = part.from_ or 0, rows if part.to is None else part.to
    if first >= last:
        raise ValueError(f"{where}: split={split} has no rows")
    found, before = list[FilePart](), 0
    for each in parts:
        begin, end = max(first - before, 0), min(last - before, len(each))
        if begin < end:
            found.append(replace(each, begin=begin, end=end))
        before += len(each)
    return found


def _downloaded(source: Source, setting: str) -> Path:
    """The folder of a data set of the Hub, with the files of the subset alone where its card says which they are."""
    card = ("README.md",)
    folder = hub.download(source.source, setting, "dataset", card)
    declared = _declared(folder, source, f"{setting}={source.source}")
    every = [f"*{suffix}{packed}" for suffix in KINDS for packed in ("", *COMPRESSED)]
    wanted = [pattern for patterns in declared.values() for pattern in patterns] or every
    return hub.download(source.source, setting, "dataset", (*card, *wanted))


def _declared(folder: Path, source: Source, where: str) -> dict[str, list[str]]:
    """By split the patterns of the files of the subset, as the data set's card (README.md) declares them; else {}."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    from datasets.data_files import sanitize_patterns
    from huggingface_hub import DatasetCard
    from yaml import YAMLError

    try:
        configs = DatasetCard.load(card).data.to_dict().get("configs") or []
    except (ValueError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {card} cannot be read ({reason}); correct it, or give a file") from error
    found = {config.get("config_name", "default"): config for config in configs if "data_files" in config}
    if not found:
        return {}
    usual = [name for name, config in found.items() if config.get("default") or name == "default"]
    subset = source.subset or next(iter(usual or found))
    example = f"'{{source: {source.source}, subset: {next(iter(found))}}}'"
    message = f"{where}: has the subsets {', '.join(found)}; choose one, as {example}"
    require(source.subset is not None or bool(usual) or len(found) == 1, message)
    require(subset in found, f"{where}: no subset {subset}{nearest(subset, found)}; there are {', '.join(found)}")
    patterns = sanitize_patterns(found[subset]["data_files"])
    return {split: [paths] if isinstance(paths, str) else list(paths) for split, paths in patterns.items()}


def _files_of_splits(folder: Path, source: Source, where: str) -> dict[str, list[str]]:
    """By chosen split its data files, by the folder's card or by the names of its files."""
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns

    patterns = _declared(folder, source, where)
    if not patterns:
        base = folder / source.subset if source.subset else folder
        there = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir())) or "none"
        require(base.is_dir(), f"{where}: no subset {source.subset}; there are {there}")
        try:
            patterns, folder = get_data_patterns(str(base)), base
        except EmptyDatasetError:
            patterns = {}
    require(bool(patterns), f"{where}: no data files there; give a file, or a folder of them")
    files = dict[str, list[str]]()
    for split in _chosen(patterns, source, where):
        try:
            named = DataFilesList.from_patterns(patterns[split.partition("[")[0]], base_path=str(folder))
        except FileNotFoundError as error:
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
        files[split] = [file for file in named if suffix_of(file) in KINDS and Path(file).name not in _DESCRIBING]
        require(bool(files[split]), f"{where}: no data files there; give a file, or a folder of them")
    return files


def _saved(folder: Path, source: Source, where: str) -> dict[str, list[str]] | None:
    """By chosen split the files of a data set that save_to_disk wrote; None for any other folder."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            chosen = _chosen(splits, source, where)
            return {split: _files_saved(folder / split.partition("[")[0]) for split in chosen}
        if not (folder / "state.json").is_file():
            return None
        message = f"{where}: split={source.split}: a single split was saved there; remove the setting"
        require("+" not in (source.split or ""), message)
        return {source.split or "train": _files_saved(folder)}  # whatever it was called
    except (KeyError, TypeError, JSONDecodeError, FileNotFoundError) as error:
        message = f"what save_to_disk wrote there is not whole ({type(error).__name__}: {error}); save it again"
        raise ValueError(f"{where}: {message}") from error


def _files_saved(folder: Path) -> list[str]:
    state = json.loads((folder / "state.json").read_text())
    return [str(folder / each["filename"]) for each in state["_data_files"]]


def _chosen(splits: Iterable[str], source: Source, where: str) -> list[str]:
    """The splits of the source's settings, as a+b[:90%] or all; else the only one, else the first preferred one."""
    there = [str(split) for split in splits]
    usual = [split for split in source.preferred if split in there]
    example = f"'{{source: {source.source}, split: {'+'.join(there[:2])}}}'"
    message = f"{where}: has the splits {', '.join(there)}; choose one or several, as {example}"
    require(bool(source.split or usual or len(there) == 1), message)
    if source.split == ALL and ALL not in there:
        return there
    chosen = (source.split or (there[0] if len(there) == 1 else usual[0])).split("+")
    for name in (split.strip().partition("[")[0] for split in chosen):
        fault = f"no split {name}{nearest(name, there)}; there are {', '.join(there)}, and {ALL}"
        require(name in there, f"{where}: {fault}")
    return [split.strip() for split in chosen]
