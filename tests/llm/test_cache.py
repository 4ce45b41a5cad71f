from __future__ import annotations

import multiprocessing
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.llm.answer import Field
from megatron_collab.llm.cache import LONGEST, Cache, key_of


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    answer = {"thought": 'quotes " and \\ and ü\n', "score": 1.0, "count": 3, "sure": True}
    fields = [Field(name, type(value)) for name, value in answer.items()]
    cache = Cache(tmp_path / "new" / "folder")
    cache.put("a", answer)
    del cache
    reopened = Cache(tmp_path / "new" / "folder")
    assert reopened.get("a", fields) == answer
    assert [type(value) for value in (reopened.get("a", fields) or {}).values()] == [str, float, int, bool]
    assert reopened.get("b", fields) is None and not reopened.counters


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "{",
            "null",
            "[]",
            "[1]",
            "{}",
            '{"score": "high"}',
            '{"score": 2}',
            '{"score": NaN}',
            '{"sore": 1}',
            "7",
        ),
        *(b"\xff\xfe", b"", None, 3, "[" * 100_000, '{"score": 0.5, "why": "' + "x" * LONGEST + '"}'),
    ],
    ids=lambda written: repr(written)[:30],
)
def test_a_damaged_entry_is_not_there_counted_and_replaced(written: object, tmp_path: Path) -> None:
    cache, fields = Cache(tmp_path), [Field("score", float, 0.0, 1.0)]
    cache.put("a", {"score": 0.5})
    assert cache.get("a", fields) == {"score": 0.5} and not cache.counters
    cache._connection.execute("UPDATE answers SET answer = ?", (written,))
    assert cache.get("a", fields) is None
    assert cache.counters == {"damaged": 1}
    cache.put("a", {"score": 0.25})
    assert cache.get("a", fields) == {"score": 0.25}


def test_a_file_that_is_no_database_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f"{socket.gethostname()}.sqlite").write_bytes(b"no database" * 1000)
    cache = Cache(tmp_path)
    assert cache.counters == {"damaged": 1}
    cache.put("a", {"score": 0.5})
    assert Cache(tmp_path).get("a", [Field("score", float)]) == {"score": 0.5}


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    """Nor the file of an earlier version, which was as the umask allowed; nor SQLite's own beside it."""
    before = os.umask(0o022)
    try:
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / f"{socket.gethostname()}.sqlite").touch(0o644)
        caches = [Cache(tmp_path / name) for name in ("new", "old")]
    finally:
        os.umask(before)
    for cache in caches:
        cache.put("a", {"score": 0.5})
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    files = [*tmp_path.glob("*/*")]
    assert {file.suffix for file in files} >= {".sqlite", ".lock", ".sqlite-wal"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


WRITTEN = [Field("from", str), Field("i", int)]


def write(folder: Path, name: str) -> None:
    cache = Cache(folder)
    for i in range(200):
        cache.put(f"{name}-{i}", {"from": name, "i": i})
        cache.put("shared", {"from": name, "i": i})


def open_together(folder: Path, start: Any, times: int) -> None:
    for i in range(times):
        start.wait()
        Cache(folder / str(i)).put("a", {"i": 1})


@pytest.mark.processes
@pytest.mark.parametrize("times", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_processes_open_it_at_the_same_time(tmp_path: Path, times: int) -> None:
    """Without the lock around opening, a few in a hundred end in "database is locked"."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(8, timeout=60)
    writers = [fork.Process(target=open_together, args=(tmp_path, start, times)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8


@pytest.mark.processes
def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as writers:
        writers.starmap(write, [(tmp_path, name) for name in "abcd"], chunksize=1)
    cache = Cache(tmp_path)
    for name in "abcd":
        assert [cache.get(f"{name}-{i}", WRITTEN) for i in range(200)] == [{"from": name, "i": i} for i in range(200)]
    assert (cache.get("shared", WRITTEN) or {})["i"] == 199


def test_a_key_depends_on_every_part_and_on_no_order() -> None:
    assert key_of({"a": 1, "b": [1, 2]}) == key_of({"b": [1, 2], "a": 1})
    variants = [{"a": 1, "b": [2, 1]}, {"a": "1", "b": [1, 2]}, {"a": 1}, {"a": 1, "b": [1, 2], "c": None}]
    assert len({key_of(other) for other in [*variants, {"a": 1, "b": [1, 2]}]}) == 5


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        Cache(tmp_path / "file")
