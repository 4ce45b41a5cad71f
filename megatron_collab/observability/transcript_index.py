"""An index over all futures of a run, to filter and sort them without reading their contents.

It holds about 100 bytes per future: the columns of the transcripts that serve filters, and which groups have a word.
Contents are read from the files when rows are requested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import batched, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_collab.observability import evaluations, records, transcripts
from megatron_collab.observability.conversations import is_conversation
from megatron_collab.observability.transcripts import SCORE, TERMS, Row

_FILES = 100  # that are read before their columns are joined, and the memory of reading is used again
_THREADS = 4  # that read files; a reading thread mostly waits for the disk or decompresses
_CONTENT = ("content",)
Range = tuple[float, float]  # lowest and highest value, both included


@dataclass(frozen=True)
class Query:
    """What futures must have to be selected; all conditions must hold, and None is no condition.

    `steps`: first and last step; `task`: a part of the task's id; `scores`: ranges by metric, which missing scores are
    outside of; `words`: each of them must be a part of a word in the future's group; `terms`: ranges by name in TERMS.
    """

    steps: Range | None = None
    task: str = ""
    ending: str | None = None
    reward: Range | None = None
    scores: Mapping[str, Range] = field(default_factory=dict)
    words: str = ""
    terms: Mapping[str, Range] = field(default_factory=dict)


class FuturePlace(NamedTuple):
    """A future: the step, the position of its group in the step, the numbers of its rollout and of itself."""

    step: int
    position: int
    rollout: int
    future: int


class _Columns:
    """The columns of an index, without futures at first.

    Arrays by future: `group` (its number), `rollout`, `future`, `ending` (its place in `endings`, -1: none), and
    `values` by name: `reward`, TERMS if recorded, `score/METRIC`; float32, NaN where missing. Arrays by
    group: `step`, `position` (in its step), `task` (its place in `tasks`), `first` (its first future).
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int, int]] = {}
        self._parts = list[_Part]()
        self._words = pa.array([], pa.string())  # distinct words of the run
        self.tasks, self.endings = pa.array([], pa.string()), list[str]()
        empty: np.ndarray = np.zeros(0, np.int32)
        self.step = self.position = self.task = self.first = empty
        self.group = self.rollout = self.future = empty
        self.ending: np.ndarray = empty.astype(np.int8)
        self.values: dict[str, np.ndarray] = {"reward": np.zeros(0, np.float32)}

    def __len__(self) -> int:
        """The number of futures."""
        return len(self.rollout)


class Index(_Columns):
    """The futures of the run in `folder`, numbered in order of steps; `refresh` adds those of new steps.

    `evaluation`: name and step of an evaluation whose conversations are indexed instead. For each of `pairs`, an
    opinion and a ground truth, `values` also has `score/OPINION above TRUTH`: the difference of both scores,
    standardized over all futures, if both are recorded. Raises ConfigError if a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        evaluation: tuple[str, int] | None = None,
        pairs: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__()
        self.folder, self._evaluation, self._pairs = folder, evaluation, pairs
        self.refresh()

    def _clear(self) -> None:
        super().__init__()

    def refresh(self) -> bool:
        """Read the files that are new; all files if others changed, since the run was resumed. Whether any did."""
        known = _known(self._files())
        if known == self._known:
            return False
        if not self._known.items() <= known.items() or [*known][: len(self._known)] != [*self._known]:
            self._clear()
        fresh = [file for file in known if file not in self._known]
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                for files in batched(fresh, _FILES):
                    step = self._evaluation and self._evaluation[1]
                    if parts := [part for of_file in pool.map(partial(_parts, step=step), files) for part in of_file]:
                        self._add(parts)
        except BaseException:
            self._clear()
            raise
        for opinion, truth in self._pairs:
            self._compare(opinion, truth)
        self._known = known
        return True

    def _files(self) -> list[Path]:
        if self._evaluation:
            return [evaluations.file_of(self.folder, self._evaluation[0])]
        return [self.folder / transcripts.OLD_FILE, *transcripts.step_files(self.folder).values()]

    def _compare(self, opinion: str, truth: str) -> None:
        """Add or replace the column of a pair."""
        scores = [self.values.get(f"{SCORE}{name}") for name in (opinion, truth)]
        standardized = [_standardized(column) for column in scores if column is not None]
        if len(standardized) == 2:
            self.values[f"{SCORE}{opinion} above {truth}"] = standardized[0] - standardized[1]

    def _add(self, parts: Sequence[_Part]) -> None:
        """Append the columns of new parts, with words and tasks numbered over the whole run."""
        groups, futures = len(self.step), len(self)
        for part in parts:
            part.group, part.position = groups, 0
            groups += part.groups
        for _, same_step in groupby(parts, key=lambda part: part.step):
            at = 0
            for part in same_step:
                part.position = at
                at += part.groups
        counts = np.concatenate([part.counts for part in parts])
        step: np.ndarray = np.repeat([part.step for part in parts], [part.groups for part in parts])
        position = np.concatenate([np.arange(part.groups) + part.position for part in parts])
        self.first = _joined(self.first, futures + np.cumsum(counts) - counts)
        self.group = _joined(self.group, np.repeat(np.arange(len(self.step), groups), counts))
        self.step, self.position = _joined(self.step, step), _joined(self.position, position)
        self.rollout = _joined(self.rollout, *(part.rollout for part in parts))
        self.future = _joined(self.future, *(part.future for part in parts))
        self.tasks, tasks = _numbered(self.tasks, [part.tasks for part in parts])
        self.task = _joined(self.task, *tasks)
        self._words, numbers = _numbered(self._words, [part.words for part in parts])
        for part, words in zip(parts, numbers, strict=True):
            part.word_numbers, part.words = words, None
        self._add_endings(parts)
        names = dict.fromkeys([*self.values, *(name for part in parts for name in part.values)])
        for name in names:
            before = self.values.get(name)
            pieces = [part.values.get(name, np.full(len(part.rollout), np.nan, np.float32)) for part in parts]
            missing: np.ndarray = np.full(futures, np.nan, np.float32)
            self.values[name] = _joined(missing if before is None else before, *pieces)
        for part in parts:
            part.drop_columns()
        self._parts += parts

    def _add_endings(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            self.endings += [ending for ending in part.endings if ending not in self.endings]
        by_part = [np.array([*map(self.endings.index, part.endings), -1], np.int8)[part.ending] for part in parts]
        self.ending = _joined(self.ending, *by_part)

    def place(self, number: int) -> FuturePlace:
        """The place of a future, for links to it."""
        group = self.group[number]
        return FuturePlace(
            *(int(of) for of in (self.step[group], self.position[group], self.rollout[number], self.future[number]))
        )

    def number(self, place: FuturePlace) -> int | None:
        """The number of the future at `place`; None if the run has no such future."""
        for group in np.flatnonzero((self.step == place.step) & (self.position == place.position)):
            numbers = np.flatnonzero(self.group == group)
            of_group = (self.rollout[numbers] == place.rollout) & (self.future[numbers] == place.future)
            return next(map(int, numbers[of_group]), None)
        return None

    def select(self, query: Query) -> np.ndarray:
        """The numbers of the selected futures, in order."""
        groups: np.ndarray = np.ones(len(self.step), bool)
        if query.steps:
            groups &= _within(self.step, query.steps)
        if query.task:
            groups &= pc.match_substring(self.tasks, query.task).to_numpy(zero_copy_only=False)[self.task]
        for word in dict.fromkeys(transcripts.words_of(query.words)):
            groups &= self._with_word(word)
        futures = groups[self.group]
        if query.ending is not None:
            place = self.endings.index(query.ending) if query.ending in self.endings else len(self.endings)
            futures &= self.ending == place
        ranges = {**{f"{SCORE}{name}": bounds for name, bounds in query.scores.items()}, **query.terms}
        for name, bounds in (ranges | ({"reward": query.reward} if query.reward else {})).items():
            futures &= _within(self.values[name], bounds) if name in self.values else False
        return np.flatnonzero(futures)

    def _with_word(self, word: str) -> np.ndarray:
        """Which groups have a word that contains `word`."""
        matches = pc.match_substring(self._words, word).to_numpy(zero_copy_only=False)
        groups: np.ndarray = np.zeros(len(self.step), bool)
        for part in self._parts:
            bits = np.bitwise_or.reduce(part.word_groups[matches[part.word_numbers]], keepdims=True)
            groups[part.group :][: part.groups] = np.unpackbits(
                bits.view(np.uint8), count=part.groups, bitorder="little"
            )
        return groups

    def sort(self, futures: np.ndarray, column: str, descending: bool = False, count: int | None = None) -> np.ndarray:
        """`futures`, or the first `count`, by a column: step, task, ending, advantage or one of `values`.

        Missing values are last; equal ones keep their order. Raises KeyError for another column.
        """
        if column in self.values:
            keys = self.values[column][futures]
        elif column == "ending":
            ranks = np.argsort(np.argsort([*self.endings, ""]))
            keys = ranks[self.ending[futures]].astype(np.float32)
            keys[self.ending[futures] < 0] = np.nan
        elif column == "advantage":
            keys = self._advantages()[futures]
        elif column not in ("task", "step"):
            raise KeyError(column)
        else:
            ranks = np.argsort(pc.array_sort_indices(self.tasks).to_numpy())
            keys = (ranks[self.task] if column == "task" else self.step)[self.group[futures]]
        keys = -keys if descending else keys
        if count is not None and count < len(keys):
            bound = np.partition(keys, count)[count]  # missing ones are greater than all
            candidates = np.flatnonzero(keys <= bound) if bound == bound else np.arange(len(keys))
            futures, keys = futures[candidates], keys[candidates]
        return futures[np.argsort(keys, kind="stable")][:count]

    def _advantages(self) -> np.ndarray:
        """By future: the reward of its rollout less the mean of its group's rollouts, NaN if there are no two."""
        is_first: np.ndarray = np.ones(len(self), bool)  # future of its rollout
        is_first[1:] = (np.diff(self.rollout) != 0) | (np.diff(self.group) != 0)
        rewards, groups = self.values["reward"][is_first], self.group[is_first]
        is_known, count = ~np.isnan(rewards), len(self.step)
        sums = np.bincount(groups[is_known], rewards[is_known], count)
        known = np.bincount(groups[is_known], minlength=count)
        means = np.divide(sums, known, out=np.full(count, np.nan), where=known > 0)
        means[np.bincount(groups, minlength=count) < 2] = np.nan
        advantages: np.ndarray = (rewards - means[groups])[np.cumsum(is_first) - 1]
        return advantages

    def group_rows(self, step: int, position: int) -> list[Row]:
        """The futures of a group, whole. Raises LookupError if the run has no such group."""
        numbers = np.flatnonzero((self.step == step) & (self.position == position))
        if not len(numbers):
            raise LookupError(f"step {step} has no group {position}")
        return self._contents(numbers)[int(numbers[0])]

    def rows(self, futures: Iterable[int]) -> list[Row]:
        """The futures of these numbers, whole. Raises ConfigError if a file is damaged, or removed by a resume."""
        numbers = np.fromiter(futures, np.int64)
        groups = self._contents(np.unique(self.group[numbers]))
        return [
            groups[group][number - self.first[group]]
            for number, group in zip(numbers, self.group[numbers], strict=True)
        ]

    def _contents(self, groups: np.ndarray) -> dict[int, list[Row]]:
        """The rows of groups by number, which ascend."""
        begins = np.array([part.group for part in self._parts])
        by_part = defaultdict[int, list[int]](list)
        for group in map(int, groups):
            by_part[int(np.searchsorted(begins, group, side="right")) - 1].append(group)

        def read(at: int) -> list[list[Row]]:
            part = self._parts[at]
            return part.content([group - part.group for group in by_part[at]])

        with ThreadPoolExecutor(_THREADS) as pool:
            contents = pool.map(read, by_part)
        return dict(zip((group for group in groups), (rows for part in contents for rows in part), strict=True))


@dataclass
class _Part:
    """Groups of a row group, or as many of transcripts.jsonl; `content`: the rows of the groups at these places."""

    content: Callable[[Sequence[int]], list[list[Row]]]
    step: int
    groups: int
    counts: np.ndarray  # of futures
    tasks: pa.Array
    rollout: np.ndarray
    future: np.ndarray
    ending: np.ndarray
    endings: list[str]
    values: dict[str, np.ndarray]
    words: pa.Array | None
    word_groups: np.ndarray
    word_numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    group: int = 0  # number of its first group in the run
    position: int = 0  # and in the step

    def drop_columns(self) -> None:
        """Drop what the index has copied."""
        self.rollout = self.future = self.ending = self.counts = np.zeros(0, np.int8)
        self.tasks, self.values = None, {}


def _known(files: Iterable[Path]) -> dict[Path, tuple[int, int, int]]:
    """The files that exist, with what changes if they are written again."""
    stats = {}
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:  # removed by a resume since it was listed
            continue
        stats[file] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return stats


def _parts(file: Path, step: int | None) -> list[_Part]:
    """The parts of a file of either format. `step`: of an evaluation, whose rows have none."""
    if file.suffix != ".parquet":
        return [*_old_parts(file, step)]
    try:
        with transcripts.readable(file):
            dictionaries = ["task", "ending.list.element"]
            source = pq.ParquetFile(file, memory_map=True, read_dictionary=dictionaries)
            columns = [name for name in source.schema_arrow.names if name not in _CONTENT]
            tables = [
                source.read_row_group(number, columns=columns, use_threads=False)
                for number in range(source.num_row_groups)
            ]
            return [_part(table, step, partial(_content, file, number)) for number, table in enumerate(tables)]
    except FileNotFoundError:  # removed by a resume since it was listed
        return []


def _part(table: pa.Table, step: int | None, content: Callable[[Sequence[int]], list[list[Row]]]) -> _Part:
    columns = {name: column.chunk(0) for name, column in zip(table.column_names, table.columns, strict=True)}
    endings = columns["ending"].flatten()
    endings = endings if pa.types.is_dictionary(endings.type) else endings.dictionary_encode()
    names = [name for name in columns if name.startswith(SCORE) or name in ("reward", *TERMS)]
    values = {name: columns[name].flatten().to_numpy(zero_copy_only=False) for name in names}
    return _Part(
        content,
        columns["step"][0].as_py() if step is None else step,
        len(table),
        columns["reward"].value_lengths().to_numpy(),
        columns["task"],
        columns["rollout"].flatten().to_numpy(),
        columns["future"].flatten().to_numpy(),
        endings.indices.fill_null(-1).to_numpy(),
        endings.dictionary.to_pylist(),
        {name: array for name, array in values.items() if len(array) == len(endings)},  # without those that are null
        columns["words"].flatten(),
        columns["word_groups"].flatten().to_numpy().copy(),  # without the unused part of its buffer
    )


def _content(file: Path, number: int, places: Sequence[int]) -> list[list[Row]]:
    with transcripts.readable(file):
        return [*transcripts.read_row_group(pq.ParquetFile(file, memory_map=True), number, places)]


def _old_parts(file: Path, evaluated: int | None) -> Iterator[_Part]:
    """The futures of lines of an earlier version; those that are none are left out. `evaluated`: as in `_parts`."""
    lines_of_file = _old_lines(file, evaluated is not None)
    for step, step_lines in groupby(lines_of_file, key=lambda line: line[2].get("step", evaluated)):
        lines = [*step_lines]
        spans = {id(row): (begin, end) for begin, end, row in lines}
        groups = [*transcripts.by_group(row for _, _, row in lines)]
        group_spans = [(spans[id(group[0])][0], spans[id(group[-1])][1]) for group in groups]
        at = 0
        for table in transcripts.tables_of(groups, step):
            yield _part(table, step, partial(_old_content, file, group_spans[at : at + len(table)]))
            at += len(table)


def _old_lines(file: Path, is_evaluation: bool) -> Iterator[_Line]:
    """Begin, end and row of each line that is a future; one of training has a step."""
    begin = 0
    with file.open("rb") as stream:
        for line in stream:
            row, end = records.parsed(line.decode(errors="replace")), begin + len(line)
            if row is not None and (is_evaluation or records.of_step(row)) and is_conversation(row):
                yield begin, end, row
            begin = end


def _old_content(file: Path, spans: Sequence[tuple[int, int]], places: Sequence[int]) -> list[list[Row]]:
    contents = []
    with transcripts.readable(file), file.open("rb") as stream:
        for begin, end in (spans[place] for place in places):
            stream.seek(begin)
            rows = [records.parsed(line.decode(errors="replace")) for line in stream.read(end - begin).splitlines()]
            contents.append([row for row in rows if row is not None and is_conversation(row)])
    return contents


_Line = tuple[int, int, Row]


def _joined(before: np.ndarray, *pieces: np.ndarray) -> np.ndarray:
    return np.concatenate([before, *(piece.astype(before.dtype, copy=False) for piece in pieces)])


def _numbered(distinct: pa.np.ndarray, pieces: Sequence[pa.np.ndarray]) -> tuple[pa.np.ndarray, list[np.ndarray]]:
    """`distinct` texts with the new ones of `pieces`, and for each piece the places of its texts in them."""
    texts = [distinct, *(piece.cast(pa.string()) for piece in pieces)]
    encoded = pa.concat_arrays(texts).dictionary_encode()
    places = np.split(encoded.indices.to_numpy(), np.cumsum([len(text) for text in texts])[:-1])
    return encoded.dictionary, places[1:]


def _standardized(values: np.ndarray) -> np.ndarray:
    """(values - mean) / standard deviation, NaN where missing; 0 if all values are equal."""
    finite = values[~np.isnan(values)]
    if not len(finite):
        return values
    spread = finite.std()
    return (values - finite.mean()) / (spread if spread else 1)


def _within(values: np.ndarray, bounds: Range) -> np.ndarray:
    return (values >= bounds[0]) & (values <= bounds[1])
