"""Files as rows: where lines end, how long they may be, what separates columns."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_collab.data import parsing
from megatron_collab.data.examples import load_tasks
from megatron_collab.environments import gsm8k
from megatron_collab.rollout.users.llm import read_personas

# All that str.splitlines() takes for the end of a line, besides \n.
SEPARATORS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.csv", "rows.tsv", "rows.txt"])
def test_lines_end_at_newlines_only(tmp_path: Path, name: str, separator: str) -> None:
    questions = [f"Ann has 3{separator}apples.", "Bob?"]
    rows = [{"question": question, "answer": "3"} for question in questions]
    lines = [json.dumps(row, ensure_ascii=separator < " ") for row in rows]  # JSON escapes the first ones of ASCII
    comma = "\t" if name == "rows.tsv" else ","
    table = "\n".join([f"question{comma}answer", *(f"{question}{comma}3" for question in questions)])
    texts = {"rows.csv": table, "rows.tsv": table, "rows.txt": "\n".join(questions), "rows.json": f"[{lines[0]}]"}
    content = texts.get(name, "\n".join(lines)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [task.goal for task in load_tasks(tmp_path / name)] == questions[: 1 if name == "rows.json" else 2]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_the_world_and_the_personas_too(tmp_path: Path, separator: str) -> None:
    row = {"question": f"Ann has 3{separator}apples. How many?", "answer": "3\n#### 3"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=separator < " ") + "\n")
    assert [task.answer for task in gsm8k.tasks(tmp_path / "train.jsonl")] == ["3"]
    (tmp_path / "personas.txt").write_text(f"a shy{separator}nurse\n\na cook\n")
    assert read_personas(str(tmp_path / "personas.txt")) == (f"a shy{separator}nurse", "a cook")


@pytest.mark.parametrize("bad", ["{", '{"question": "q"}', '{"question": "q", "answer": ["4"]}', "5", '{"q": "\xff'])
def test_a_bad_row_of_a_world_is_named_by_file_and_row(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"question": "q", "answer": "#### 4"}\n' + bad.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"^data.path={file} row 2: "):
        gsm8k.tasks(file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", json.dumps({"question": "q" * 2000, "answer": "a"})),
        ("rows.jsonl", "x" * 5000),
        ("rows.json", json.dumps([{"question": "q", "answer": "a"}, {"question": "q" * 2000, "answer": "a"}])),
        ("rows.csv", f"question,answer\nq,{'a' * 2000}\n"),
        ("rows.csv", "question,answer\n" + 'q,"a\n' + "a\n" * 2000),
        ("rows.txt", "plan\n" + "q" * 2000),
    ],
)
def test_a_row_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    """Before it is read whole; a list of rows may be longer than a row."""
    monkeypatch.setattr(parsing, "ROW_BYTES", 1 << 10)
    (tmp_path / name).write_text(content)
    with pytest.raises(
        ValueError, match=rf"{name} row \d: (is longer than 0 MiB|cannot be read as a table \(field larg)"
    ):
        list(load_tasks(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "header", "separator"),
    [
        ("rows.csv", "question;answer", "';'"),
        ("semi;colon.csv", "question;answer;level", "';'"),
        ("rows.csv", "question\tanswer", r"'\\t'"),
        ("rows.csv", "question|answer", r"'\|'"),
        ("rows.tsv", "question,answer", "','"),
        ("rows.tsv", '"question";"answer"', "';'"),
    ],
)
def test_other_separators_of_columns_are_named(tmp_path: Path, name: str, header: str, separator: str) -> None:
    (tmp_path / name).write_text(f"{header}\n{header}\n")
    delimiter = r"'\\t'" if name.endswith(".tsv") else "','"
    with pytest.raises(ValueError, match=rf"row 1: separates columns by {separator}, not by {delimiter}; write"):
        load_tasks(tmp_path / name)


@pytest.mark.parametrize(("name", "header"), [("rows.csv", "text"), ("rows.tsv", "text"), ("rows.csv", '"text"')])
def test_a_single_column_is_a_table(tmp_path: Path, name: str, header: str) -> None:
    (tmp_path / name).write_text(f"{header}\nPlan; a trip\n")
    assert [task.goal for task in load_tasks(tmp_path / name)] == ["Plan; a trip"]
