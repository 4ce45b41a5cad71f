from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.llm.client import Cache, key_of


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    answer = {"thought": 'quotes " and \\ and ü\n', "score": 1.0, "count": 3, "sure": True}
    cache = Cache(tmp_path / "new" / "folder")
    cache.put("a", answer)
    del cache
    again = Cache(tmp_path / "new" / "folder")
    assert again.get("a") == answer
    assert [type(value) for value in (again.get("a") or {}).values()] == [str, float, int, bool]
    assert again.get("b") is None


def write(folder: Path, name: str) -> None:
    cache = Cache(folder)
    for i in range(200):
        cache.put(f"{name}-{i}", {"from": name, "i": i})
        cache.put("shared", {"from": name, "i": i})


def open_together(folder: Path, start: Any) -> None:
    for i in range(40):
        start.wait()
        Cache(folder / str(i)).put("a", {"i": 1})


@pytest.mark.processes
def test_processes_open_it_at_the_same_time(tmp_path: Path) -> None:
    """Without the lock around opening, a few in a hundred end in "database is locked"."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(8, timeout=60)
    writers = [fork.Process(target=open_together, args=(tmp_path, start)) for _ in range(8)]
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
        assert [cache.get(f"{name}-{i}") for i in range(200)] == [{"from": name, "i": i} for i in range(200)]
    assert (cache.get("shared") or {})["i"] == 199


def test_a_key_depends_on_every_part_and_on_no_order() -> None:
    assert key_of({"a": 1, "b": [1, 2]}) == key_of({"b": [1, 2], "a": 1})
    others = [{"a": 1, "b": [2, 1]}, {"a": "1", "b": [1, 2]}, {"a": 1}, {"a": 1, "b": [1, 2], "c": None}]
    assert len({key_of(other) for other in [*others, {"a": 1, "b": [1, 2]}]}) == 5


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        Cache(tmp_path / "file")
