"""Files of people's labels: what is read, and the line for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.settings import ConfigError
from megatron_collab.view import labels
from megatron_collab.view.labels import Label, read

ROWS: list[dict[str, Any]] = [
    {"step": 3, "task": "t1", "rollout": 2, "future": 1, "label": 0.25, "rater": "Ada", "metric": "polite"},
    {"evaluation": "test/after", "task": 't "2", \u00fc', "label": True},
    {"evaluation": "test/after", "task": "t3", "rollout": 1, "label": "no"},
]
LABELS = [
    Label("training/3", "t1", 2, 1, 0.25, "Ada", "polite"),
    Label("test/after", 't "2", \u00fc', 0, 0, 1.0, "", ""),
    Label("test/after", "t3", 1, 0, 0.0, "", ""),
]
CSV = """\ufeffstep,evaluation,task,rollout,future,label,rater,metric\r
3,,t1,2,1,0.25,Ada,polite\r
\r
,test/after,"t ""2"", \u00fc",,,Yes,,\r
,test/after,t3,1,,FALSE,,\r
"""


def written(folder: Path, content: str, suffix: str = ".jsonl") -> Path:
    file = folder / f"people{suffix}"
    file.write_text(content, newline="")
    return file


def test_lines_of_json_and_csv_say_the_same(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    assert read(written(tmp_path, f"{lines}\n\n")) == (LABELS, [])
    assert read(written(tmp_path, CSV, ".csv")) == (LABELS, [])


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([], "is no JSON object"),
        ({"task": "t", "label": 1}, "give either step or evaluation"),
        ({"step": 1, "evaluation": "after", "task": "t", "label": 1}, "give either step or evaluation"),
        ({"step": 1, "label": 1}, "give task and label"),
        ({"step": 1, "task": "t"}, "give task and label"),
        ({"step": 1, "task": 5, "label": 1}, "task=5: give a text"),
        ({"step": -1, "task": "t", "label": 1}, "step=-1: give a whole number from 0 on"),
        ({"step": 1, "task": "t", "rollout": True, "label": 1}, "rollout=True: give a whole number"),
        ({"step": 1, "task": "t", "future": "1.5", "label": 1}, "future=1.5: give a whole number"),
        ({"step": 1, "task": "t", "label": "good"}, "label=good: give a number, or yes or no"),
        ({"step": 1, "task": "t", "label": float("nan")}, "label=nan: give a number"),
        ({"step": 1, "task": "t", "label": [1]}, "label=[1]: give a number"),
        ({"step": 1, "task": "t", "label": 1, "score": 2}, "score: no such name; choose from step, evaluation, task"),
        ({"step": 3, "task": "t1", "rollout": 2, "future": 1, "label": 1, "rater": "Ada", "metric": "polite"}, "row 1"),
        ({"step": 1, "task": "t", "label": "\x1b[31m\n\u202e" * 100}, "label=\u2026"),
    ],
)
def test_a_fault_is_a_line_with_its_row(tmp_path: Path, row: Any, fault: str) -> None:
    kept, faults = read(written(tmp_path, f"{json.dumps(ROWS[0])}\n\n{json.dumps(row)}\n{json.dumps(ROWS[1])}\n"))
    assert kept == LABELS[:2]
    (line,) = faults
    assert line.startswith(f"--labels={tmp_path}/people.jsonl, row 3: ") and fault in line
    assert line.isprintable() and len(line) < 1000


def test_a_row_of_csv_with_other_cells_is_faulty(tmp_path: Path) -> None:
    kept, (line,) = read(written(tmp_path, CSV + "3,t\n", ".csv"))
    assert kept == LABELS and ", row 6: is no JSON object, or has more or fewer cells" in line


@pytest.mark.parametrize(
    ("content", "suffix", "fault"),
    [
        ("", ".jsonl", "has no labels"),
        ("step,task,label\n", ".csv", "has no labels"),
        ("step,task,label,note\n1,t,1,x\n", ".csv", "column note: unknown or repeated"),
        ("step,task,label,label\n1,t,1,0\n", ".csv", "column label: unknown or repeated"),
        ('step,task,label\n1,"t\n', ".csv", "is no CSV"),
        (json.dumps(ROWS[0]), ".txt", "give a file whose name ends in .jsonl or .csv"),
        (f"{json.dumps(ROWS[0])}\n" * 5, ".jsonl", "has more than 4 rows; give fewer"),
        ("x" * 2001, ".jsonl", "has more than 2000 bytes; give a shorter one"),
    ],
)
def test_what_is_no_file_of_labels_is_refused(
    tmp_path: Path, content: str, suffix: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "MOST_ROWS", 4)
    monkeypatch.setattr(labels, "LONGEST", 2000)
    with pytest.raises(ConfigError, match=f"^--labels={tmp_path}/people{suffix}") as error:
        read(written(tmp_path, content, suffix))
    assert fault in str(error.value) and str(error.value).isprintable()


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name, fault in (("none.jsonl", "No such file"), ("bytes.jsonl", "utf-8")):
        with pytest.raises(ConfigError, match=f"{name}: .*{fault}"):
            read(tmp_path / name)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path / "folder.jsonl")
