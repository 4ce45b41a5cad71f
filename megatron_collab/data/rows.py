"""The rows of a source: the files of a path, a glob, a folder or a data set of the Hub, by split."""

from __future__ import annotations

import glob
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_collab.data.packing import COMPRESSED, KINDS, kind_of, suffix_of
from megatron_collab.data.parsing import value_of
from megatron_collab.data.sources import Source
from megatron_collab.data.storing import StoredRows, stored_rows
from megatron_collab.runtime import files, hub
from megatron_collab.settings import ConfigError, nearest, require
from megatron_collab.settings.documents import parse_settings, parse_yaml

ALL = "all"  # in place of a split: all splits
_DESCRIBING = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json")
_LONGEST_CARD = 1 << 20  # bytes of README.md
_CARD_HEADER = re.compile(r"\s*---\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_MOST_ENTRIES = 100_000  # files and folders below a folder of data
_BATCH = 1000  # rows read from Arrow at once


@dataclass(frozen=True)
class FilePart:
    """The rows [begin, end) of a file; `where` names that file in messages."""

    rows: StoredRows
    begin: int
    end: int
    where: str

    def __len__(self) -> int:
        return self.end - self.begin


class Rows(Sequence[dict[str, Any]]):
    """The rows of an opened source, each parsed when it is accessed, with null for columns that it lacks.

    `column_names`: the columns of all rows; `splits`: the chosen ones; equal `fingerprint`s mean equal rows.
    """

    def __init__(self, parts: Sequence[FilePart], splits: Sequence[str]) -> None:
        self._parts, self.splits = parts, splits
        self._ends = list(accumulate(map(len, parts)))
        self._empty: dict[str, Any] = dict.fromkeys(name for part in parts for name in part.rows.columns)
        self.column_names = list(self._empty)
        self.fingerprint = [f"{part.rows.digest}[{part.begin}:{part.end}]" for part in parts]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        part, at = self._place(range(len(self))[index])
        return self._empty | value_of(part.rows.texts[at].as_py())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            for begin in range(part.begin, part.end, _BATCH):
                for text in part.rows.texts[begin : min(begin + _BATCH, part.end)].to_pylist():
                    yield self._empty | value_of(text)

    def at(self, number: int) -> str:
        """The location of the row `number` for messages: setting, file, and the row in it, counted from 1."""
        part, at = self._place(number)
        return f"{part.where} row {part.rows.numbers[at].as_py()}"

    def _place(self, number: int) -> tuple[FilePart, int]:
        part_number = bisect_right(self._ends, number)
        part = self._parts[part_number]
        return part, part.end - (self._ends[part_number] - number)


def open_rows(source: Source, setting: str, cache: Path | None = None) -> Rows:
    """The rows of `source`, stored as Arrow in `cache` once, or in a temporary folder without `cache`.

    Raises ConfigError, and ValueError if the data cannot be read; both name `setting` and the source.
    """
    where = f"{setting}={source.source}"
    splits, single = chosen_files(source, setting), Path(source.source).is_file()
    parts = list[FilePart]()
    with ExitStack() as stack:  # memory-mapped files stay readable when their folder is removed
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for split, files in splits.items():
            opened = [_open(file, where if single else f"{setting}={file}", folder) for file in _one_kind(files, where)]
            parts += _select_rows(opened, split, where)
    if not any(map(len, parts)):
        raise ValueError(f"{where}: has no rows; give a source with some")
    return Rows(parts, list(splits))


def chosen_files(source: Source, setting: str) -> dict[str, list[str]]:
    """The files of each chosen split of `source`. Raises as `open_rows`."""
    where = f"{setting}={source.source}"
    path = _download(source, setting) if hub.parse(source.source) else Path(source.source)
    if path.is_dir():
        return _saved_files(path, source, where) or _files_of_splits(path, source, where)
    paths = [str(path)] if path.is_file() else sorted(glob.glob(source.source, recursive=True))
    data_files = [file for file in paths if not Path(file).is_dir()]
    require(bool(data_files), f"{where}: no such file")
    message = f"{where}: files have no subsets, and no split but train; remove the setting, or give a folder"
    split_name = source.split if source.split not in (None, ALL) else "train"
    require(source.subset is None and split_name.partition("[")[0] == "train" and "+" not in split_name, message)
    return {split_name: data_files}


def _open(file: str, where: str, cache: Path) -> FilePart:
    rows = stored_rows(file, where, cache)
    return FilePart(rows, 0, len(rows), where)


def _one_kind(files: Sequence[str], where: str) -> Sequence[str]:
    """`files`, if they have one format. Raises ConfigError otherwise."""
    kind, *other_kinds = dict.fromkeys(map(kind_of, files))
    message = f"holds files of the formats {kind} and {', '.join(other_kinds)}; give a glob that takes one of them"
    require(not other_kinds, f"{where}: {message}")
    return files


def _select_rows(parts: Sequence[FilePart], split: str, where: str) -> Sequence[FilePart]:
    """The rows of a split such as train[:90%], from those of the full split."""
    if "[" not in split:
        return parts
    from datasets import ReadInstruction

    rows = sum(map(len, parts))
    name = split.partition("[")[0]
    try:
        (instruction,) = ReadInstruction.from_spec(split).to_absolute({name: rows})
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: split={split} cannot be read ({reason}); give NAME, or NAME[:90%]") from error
    first, last = instruction.from_ or 0, rows if instruction.to is None else instruction.to
    if first >= last:
        raise ValueError(f"{where}: split={split} has no rows")
    chosen, before = list[FilePart](), 0
    for part in parts:
        begin, end = max(first - before, 0), min(last - before, len(part))
        if begin < end:
            chosen.append(replace(part, begin=begin, end=end))
        before += len(part)
    return chosen


def _download(source: Source, setting: str) -> Path:
    """The folder of a data set of the Hub, with only the files of the subset if its card declares them."""
    card = ("README.md",)
    folder = hub.download(source.source, setting, "dataset", card)
    declared = _declared_patterns(folder, source, f"{setting}={source.source}")
    all_patterns = [f"*{suffix}{packed}" for suffix in KINDS for packed in ("", *COMPRESSED)]
    file_patterns = [pattern for patterns in declared.values() for pattern in patterns] or all_patterns
    return hub.download(source.source, setting, "dataset", (*card, *file_patterns))


def _declared_patterns(folder: Path, source: Source, where: str) -> dict[str, list[str]]:
    """The file patterns of each split of the subset, as the data set's card (README.md) declares them; else {}."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    from datasets.data_files import sanitize_patterns

    try:
        header = _CARD_HEADER.match(files.read_text(card, _LONGEST_CARD))
        configs = ((parse_yaml(header[1]) if header else None) or {}).get("configs") or []
        subsets = {str(config.get("config_name", "default")): config for config in configs if "data_files" in config}
        patterns = {subset: sanitize_patterns(config["data_files"]) for subset, config in subsets.items()}
        lists = {
            subset: {split: [paths] if isinstance(paths, str) else list(paths) for split, paths in by_split.items()}
            for subset, by_split in patterns.items()
        }
        texts = [path for by_split in lists.values() for paths in by_split.values() for path in paths]
        if not all(isinstance(path, str) for path in texts):
            raise ValueError("data_files must name files or patterns")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {card} cannot be read ({reason}); correct it, or give a file") from error
    if not subsets:
        return {}
    defaults = [name for name, config in subsets.items() if config.get("default") or name == "default"]
    subset = source.subset or next(iter(defaults or subsets))
    example = f"'{{source: {source.source}, subset: {next(iter(subsets))}}}'"
    message = f"{where}: has the subsets {', '.join(subsets)}; choose one, e.g. {example}"
    require(source.subset is not None or bool(defaults) or len(subsets) == 1, message)
    require(subset in subsets, f"{where}: no subset {subset}{nearest(subset, subsets)}; there are {', '.join(subsets)}")
    return lists[subset]


def _files_of_splits(folder: Path, source: Source, where: str) -> dict[str, list[str]]:
    """The data files of each chosen split, according to the folder's card or to file names."""
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns

    patterns = _declared_patterns(folder, source, where)
    if not patterns:
        base = folder / source.subset if source.subset else folder
        subsets = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "none"
        require(base.is_dir(), f"{where}: no subset {source.subset}; there are {subsets}")
        try:
            patterns, folder = get_data_patterns(str(base)) if _has_data(base, where) else {}, base
        except EmptyDatasetError:
            patterns = {}
    require(bool(patterns), f"{where}: no data files there; give a file, or a folder of them")
    chosen = dict[str, list[str]]()
    for split in _choose_splits(patterns, source, where):
        try:
            matches = DataFilesList.from_patterns(patterns[split.partition("[")[0]], base_path=str(folder))
        except FileNotFoundError as error:
            raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
        chosen[split] = [file for file in matches if suffix_of(file) in KINDS and Path(file).name not in _DESCRIBING]
        require(bool(chosen[split]), f"{where}: no data files there; give a file, or a folder of them")
    return chosen


def _has_data(folder: Path, where: str) -> bool:
    """Whether a file below `folder` has the suffix of data. Raises ConfigError if it holds too many files.

    get_data_patterns walks through all of it several dozen times.
    """
    count, has_data = 0, False
    for _, folders, names in os.walk(folder):
        count += len(folders) + len(names)
        require(
            count <= _MOST_ENTRIES, f"{where}: holds more than {_MOST_ENTRIES} files; give a glob of those with data"
        )
        has_data = has_data or any(suffix_of(name) in KINDS for name in names)
    return has_data


def _saved_files(folder: Path, source: Source, where: str) -> dict[str, list[str]] | None:
    """The files of each chosen split of a data set that save_to_disk wrote; None for any other folder."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = parse_settings(files.read_text(folder / "dataset_dict.json"))["splits"]
            chosen = _choose_splits(splits, source, where)
            return {split: _arrow_files(folder / split.partition("[")[0]) for split in chosen}
        if not (folder / "state.json").is_file():
            return None
        message = f"{where}: split={source.split}: a single split was saved there; remove the setting"
        require("+" not in (source.split or ""), message)
        return {source.split or "train": _arrow_files(folder)}  # under whatever name it was saved
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, FileNotFoundError) as error:
        message = f"the folder written by save_to_disk is incomplete ({type(error).__name__}: {error}); save it again"
        raise ValueError(f"{where}: {message}") from error


def _arrow_files(folder: Path) -> list[str]:
    state = parse_settings(files.read_text(folder / "state.json"))
    return [str(folder / entry["filename"]) for entry in state["_data_files"]]


def _choose_splits(splits: Iterable[str], source: Source, where: str) -> list[str]:
    """The splits in the source's settings, as a+b[:90%] or all; else the only one, else the first preferred one."""
    names = [str(split) for split in splits]
    preferred = [split for split in source.preferred if split in names]
    example = f"'{{source: {source.source}, split: {'+'.join(names[:2])}}}'"
    message = f"{where}: has the splits {', '.join(names)}; choose one or several, e.g. {example}"
    require(bool(source.split or preferred or len(names) == 1), message)
    if source.split == ALL and ALL not in names:
        return names
    chosen = (source.split or (names[0] if len(names) == 1 else preferred[0])).split("+")
    for name in (split.strip().partition("[")[0] for split in chosen):
        fault = f"no split {name}{nearest(name, names)}; there are {', '.join(names)}, and {ALL}"
        require(name in names, f"{where}: {fault}")
    return [split.strip() for split in chosen]
