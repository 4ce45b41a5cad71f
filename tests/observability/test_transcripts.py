"""Transcripts come back as they were written, are redacted, and a resume forgets them without reading."""

from __future__ import annotations

import json
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_collab.observability import transcripts
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import ConfigError

ODD = "a \ud800 \u2028 \x00 ünï \U0001f600 <b>"


def row(task: str = "t", rollout: int = 0, future: int = 0, text: str = "hello there", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{task} {rollout} {future}"}]
    named = {"task": task, "rollout": rollout, "future": future, "reward": 0.5, "ending": "user_done", "error": ""}
    return {**named, "messages": messages, "scores": {"right": 1.0, "judged": {"missing": "judge is down"}}, **more}


def group(task: str = "t", rollouts: int = 2, futures: int = 3, **more: Any) -> list[dict[str, Any]]:
    return [row(task, rollout, future, **more) for rollout in range(rollouts) for future in range(futures)]


def old_lines(folder: Path, *steps: int, tail: str = "") -> Path:
    """transcripts.jsonl with a group of each step, as earlier versions wrote it."""
    rows = [{"step": step, **future} for step in steps for future in group(f"old-{step}")]
    file = folder / transcripts.OLD_FILE
    file.write_text("".join(json.dumps(future) + "\n" for future in rows) + tail)
    return file


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    groups = [group("a"), group(ODD, text=ODD, judgements=[{"reason": ODD}], played=1), group("", 1, 1, reward=None)]
    transcripts.write_step(tmp_path, 12, groups)
    assert [file.name for file in (tmp_path / "transcripts").iterdir()] == ["step_000012.parquet"]
    assert [*transcripts.rows_of_file(transcripts.step_file(tmp_path, 12))] == [
        {"step": 12, **future} for rows in groups for future in rows
    ]
    transcripts.write(tmp_path / "eval_before.parquet", groups)
    assert [*transcripts.rows_of_file(tmp_path / "eval_before.parquet")] == [*chain(*groups)], (
        "an evaluation's rows have no step"
    )


def test_numbers_that_json_cannot_hold_are_null(tmp_path: Path) -> None:
    nested = {"a": [math.nan, np.float32(0.5), True, 3]}
    transcripts.write_step(tmp_path, 0, [[row(reward=math.nan, parts=nested), row(future=1, reward=-math.inf)]])
    first, second = transcripts.run_rows(tmp_path)
    assert (first["reward"], second["reward"], first["parts"]) == (None, None, {"a": [None, 0.5, True, 3]})


def test_keys_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-mine-4711")
    groups = [[row("a-key-of-mine-4711", text="say a-key-of-mine-4711", scores={"a-key-of-mine-4711": 1.0})]]
    transcripts.write_step(tmp_path, 0, groups)
    table = pq.read_table(transcripts.step_file(tmp_path, 0))
    assert "4711" not in str(table.to_pylist()) and "say ***" in table["content"][0].as_py()
    assert table.column_names.count("score/***") == 1


def test_columns_serve_filters_of_any_program(tmp_path: Path) -> None:
    rows = [row(reward=0.25, standard_error=0.5), row(future=1, reward=None, ending=None, scores={"right": 1e50})]
    transcripts.write_step(tmp_path, 3, [rows, group("u", 1, 1, scores={"only here": 10**400})])
    first, second = pq.read_table(transcripts.step_file(tmp_path, 3)).to_pylist()
    assert (first["step"], first["task"], first["rollout"], first["future"]) == (3, "t", [0, 0], [0, 1])
    assert (first["ending"], first["reward"], first["standard_error"]) == (
        ["user_done", None],
        [0.25, None],
        [0.5, None],
    )
    assert first["score/right"] == [1.0, None] and first["score/judged"] == [None, None], (
        "1e50 is not finite in float32"
    )
    assert second["score/only here"] == [None] and second["score/right"] == [None]
    assert first["words"] == sorted({"hello", "there", "t", "u", "0", "1", "judge", "is", "down"}), "texts alone"
    by_word = dict(zip(first["words"], first["word_groups"], strict=True))
    assert (by_word["hello"], by_word["u"], by_word["judge"], second["words"]) == (0b11, 0b10, 0b01, None)


@pytest.mark.processes
def test_groups_beyond_a_row_group_keep_their_order(tmp_path: Path) -> None:
    groups = [[row(str(number), text="x" * 30_000 * (number % 7))] for number in range(150)]
    groups.append([row("large", text="y" * 5_000_000), row("large", future=1, scores={"late": 1.0})])
    transcripts.write_step(tmp_path, 0, groups)
    source = pq.ParquetFile(transcripts.step_file(tmp_path, 0))
    sizes = [source.metadata.row_group(number).num_rows for number in range(source.num_row_groups)]
    assert sum(sizes) == 151 and max(sizes) <= 64 and len(sizes) > 3
    tasks = [row["task"] for row in transcripts.rows_of_file(transcripts.step_file(tmp_path, 0)) if not row["future"]]
    assert tasks == [*map(str, range(150)), "large"]


def test_a_step_without_futures_has_no_file(tmp_path: Path) -> None:
    transcripts.write_step(tmp_path, 0, [])
    transcripts.write_step(tmp_path, 1, [[]])
    assert transcripts.step_files(tmp_path) == {} and [*transcripts.run_rows(tmp_path)] == []


def test_a_step_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "transcripts" / "step_000000.parquet.tmp").mkdir(parents=True)
    with pytest.raises(RunStopped, match=r"step_000000\.parquet: cannot be written"):
        transcripts.write_step(tmp_path, 0, [group()])
    assert transcripts.step_files(tmp_path) == {}


def test_a_run_of_both_formats_reads_as_one(tmp_path: Path) -> None:
    old_lines(tmp_path, 0, 1, tail='[1]\n{"epoch": 1}\n{"step": 1, "torn')
    transcripts.write_step(tmp_path, 10, [group("d")])
    transcripts.write_step(tmp_path, 2, [group("c"), group("c2")])
    steps = [future["step"] for future in transcripts.run_rows(tmp_path)]
    assert steps == [0] * 6 + [1] * 6 + [2] * 12 + [10] * 6
    assert {future["task"] for future in transcripts.run_rows(tmp_path, 1)} == {"old-1"}
    assert {future["task"] for future in transcripts.run_rows(tmp_path, 2)} == {"c", "c2"}
    groups = [*transcripts.by_group(transcripts.run_rows(tmp_path, 2))]
    assert [len(rows) for rows in groups] == [6, 6]


def test_a_resume_forgets_repeated_steps_and_reads_no_others(tmp_path: Path) -> None:
    old = old_lines(tmp_path, 0, 1, 2, tail='{"step": 2, "torn')
    for step in (3, 4, 5):
        transcripts.write_step(tmp_path, step, [group()])
    transcripts.step_file(tmp_path, 3).write_bytes(b"not read")
    transcripts.forget(tmp_path, 4)
    assert [*transcripts.step_files(tmp_path)] == [3]
    assert {future["step"] for _, future in transcripts.records.lines(old) if future} == {0, 1, 2}
    assert old.read_text().endswith("}\n"), "the torn line is dropped"
    transcripts.forget(tmp_path, 1)
    assert [future["step"] for future in transcripts.run_rows(tmp_path)] == [0] * 6
    transcripts.forget(tmp_path, 0)
    assert old.read_text() == ""
    transcripts.forget(tmp_path, 0)


def test_of_old_lines_a_resume_reads_only_the_last_ones(tmp_path: Path) -> None:
    old = old_lines(tmp_path, 0, 1)
    kept = old.read_bytes()
    with old.open("r+b") as stream:  # a hole of 1 GiB, which is not read, before the last line of step 1
        stream.seek(1 << 30)
        stream.write(
            b"\n" + json.dumps({"step": 1, **row()}).encode() + b"\n" + json.dumps({"step": 2}).encode() + b"\n"
        )
    transcripts.forget(tmp_path, 2)
    assert old.stat().st_size > 1 << 30
    with old.open("rb") as stream:
        assert stream.read(len(kept)) == kept
        stream.seek(-100, os.SEEK_END)
        assert stream.read().endswith(b"}}}\n"), "the last line is of step 1"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, share: float) -> None:
    transcripts.write_step(tmp_path, 0, [group()])
    file = transcripts.step_file(tmp_path, 0)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r"^[^\n]*step_000000\.parquet: cannot be read \([^\n]*\); restore it[^\n]*$"):
        [*transcripts.run_rows(tmp_path)]
    file.write_bytes(bytes(byte ^ 255 for byte in content[:100]) + content[100:])
    with pytest.raises(ConfigError, match=r"^[^\n]*step_000000\.parquet: cannot be read"):
        [*transcripts.run_rows(tmp_path)]
