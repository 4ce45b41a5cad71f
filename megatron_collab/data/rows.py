"""The rows of a source: files, folders and data sets of the Hub, opened as Arrow on disk that is mapped into memory."""

from __future__ import annotations

import glob
import importlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.config import nearest, require
from megatron_collab.data.sources import COMPRESSED, Source
from megatron_collab.runtime import hub

if TYPE_CHECKING:  # takes seconds to import
    from datasets import Dataset

# suffix: module of `datasets` that reads it, its class, and its options
_READERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    ".jsonl": ("json", "Json", {}),
    ".json": ("json", "Json", {}),
    ".csv": ("csv", "Csv", {}),
    ".tsv": ("csv", "Csv", {"sep": "\t"}),
    ".parquet": ("parquet", "Parquet", {}),
    ".arrow": ("arrow", "Arrow", {}),
    ".txt": ("text", "Text", {}),
}
ALL = "all"  # in place of a split: every one
_DESCRIBING = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json")


@dataclass(frozen=True)
class Rows:
    """An opened source: its rows, the files that they are from (none of a part, and of a saved data set), and the
    splits that are chosen."""

    table: Dataset
    files: Sequence[str]
    splits: Sequence[str]
    where: str
    setting: str

    def at(self, number: int) -> str:
        """Where the row `number` is, for messages."""
        if len(self.files) > 1:
            for file in self.files:
                rows = len(_load([file], f"{self.setting}={file}", None))
                if number < rows:
                    return f"{self.setting}={file} row {number}"
                number -= rows
        return f"{self.where} row {number}"


def open_rows(source: Source, setting: str, cache: Path | None = None) -> Rows:
    """The rows of `source`; Arrow is written to `cache` once, or for this process alone. Raises ConfigError,
    and ValueError for what cannot be read; both name `setting` and the source.
    """
    where = f"{setting}={source.source}"
    path = Path(source.source)
    if hub.named(source.source):
        path = _downloaded(source, setting)
    if path.is_dir() and (saved := _saved(path, source, where)) is not None:
        from datasets import load_from_disk

        tables = [_part(load_from_disk(str(folder)), split, where) for split, folder in saved.items()]
        return Rows(_joined(tables, where), (), list(saved), where, setting)
    if path.is_dir():
        files = _files_of_splits(path, source, where)
    else:
        found = [str(path)] if path.is_file() else sorted(glob.glob(source.source, recursive=True))
        there = [file for file in found if not Path(file).is_dir()]
        require(bool(there), f"{where}: no such file")
        message = f"{where}: files have no subsets, and no split but train; remove the setting, or give a folder"
        named = source.split if source.split not in (None, ALL) else "train"
        require(source.subset is None and named.partition("[")[0] == "train" and "+" not in named, message)
        files = {named: there}
    tables = [_part(_load(of_split, where, cache), split, where) for split, of_split in files.items()]
    whole = not any("[" in split for split in files)
    every = [file for of_split in files.values() for file in of_split] if whole else []
    return Rows(_joined(tables, where), every, list(files), where, setting)


def _load(files: Sequence[str], where: str, cache: Path | None) -> Dataset:
    """The rows of files of one format, in their order, from Arrow in `cache`."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is said below
    readers = {str(_reader(file)): _reader(file) for file in files}
    (module, name, options), *others = readers.values()
    message = f"holds files of the formats {module} and {', '.join(other[0] for other in others)}"
    require(not others, f"{where}: {message}; give a glob that takes one of them")
    if all(_first_line(file) == "" for file in files):  # which the library does not survive
        raise ValueError(f"{where}: has no rows")
    with ExitStack() as stack:  # what is mapped into memory stays when its folder is removed
        folder = str(cache) if cache else stack.enter_context(tempfile.TemporaryDirectory())
        kind = getattr(importlib.import_module(f"datasets.packaged_modules.{module}.{module}"), name)
        try:
            builder = kind(cache_dir=folder, data_files={"train": list(files)}, **options)
            builder.download_and_prepare()
            table = builder.as_dataset(split="train")
        except (DatasetGenerationError, OSError, ValueError, StopIteration) as error:
            reason = " ".join(str(error.__cause__ or error).split()) or "it is empty"
            formats = f"{', '.join(_READERS)}, compressed or not"
            raise ValueError(f"{where}: cannot be read ({reason}); give one of {formats}") from error
    if not len(table):
        raise ValueError(f"{where}: has no rows")
    return table


def _joined(tables: Sequence[Dataset], where: str) -> Dataset:
    """The rows of the splits one after the other, with the columns of all."""
    if len(tables) == 1:
        return tables[0]
    from datasets import concatenate_datasets

    try:
        return concatenate_datasets(list(tables))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: its splits have columns that differ ({reason}); choose one with split") from error


def _part(table: Dataset, split: str, where: str) -> Dataset:
    """The rows that a split such as train[:90%] asks for, of the rows of the whole one."""
    if "[" not in split:
        return table
    from datasets import ReadInstruction

    name = split.partition("[")[0]
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({name: len(table)})
    except (ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: split={split} cannot be read ({reason}); give NAME, or NAME[:90%]") from error
    found = table.select(range(part.from_ or 0, len(table) if part.to is None else part.to))
    if not len(found):
        raise ValueError(f"{where}: split={split} has no rows")
    return found


def _downloaded(source: Source, setting: str) -> Path:
    """The folder of a data set of the Hub, with the files of the subset alone where its card says which they are."""
    card = ("README.md",)
    folder = hub.download(source.source, setting, "dataset", card)
    declared = _declared(folder, source, f"{setting}={source.source}")
    every = [f"*{suffix}{packed}" for suffix in _READERS for packed in ("", *COMPRESSED)]
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
        files[split] = [file for file in named if _suffix(file) in _READERS and Path(file).name not in _DESCRIBING]
        require(bool(files[split]), f"{where}: no data files there; give a file, or a folder of them")
    return files


def _saved(folder: Path, source: Source, where: str) -> dict[str, Path] | None:
    """By chosen split the folder of a data set that save_to_disk wrote; None for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return {split: folder / split.partition("[")[0] for split in _chosen(splits, source, where)}
    if not (folder / "state.json").is_file():
        return None
    message = f"{where}: split={source.split}: a single split was saved there; remove the setting"
    require("+" not in (source.split or ""), message)
    return {source.split or "train": folder}  # whatever it was called


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


def _suffix(file: str) -> str:
    path = Path(file)
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _reader(file: str) -> tuple[str, str, dict[str, Any]]:
    """The entry of _READERS for a file, JSON where its name does not say; text is JSON where it begins like that."""
    suffix = _suffix(file)
    json_lines = suffix not in _READERS or (suffix == ".txt" and (_first_line(file) or "")[:1] == "{")
    return _READERS[".json" if json_lines else suffix]


def _first_line(file: str) -> str | None:
    """The first line that is not blank, "" where there is none; None for what is no plain text."""
    if Path(file).suffix in (*COMPRESSED, ".parquet", ".arrow"):
        return None
    with Path(file).open(errors="replace") as lines:
        return next((line.strip() for line in lines if line.strip()), "")
