from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest

from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.data.examples import load_conversations, load_tasks
from megatron_collab.data.prefixes import prefixes
from megatron_collab.types import Message, Task

HI, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
ROW = {"prompt": [HI], "goal": "g", "answer": "5", "user": "booking"}


def file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    write_jsonl(path, rows)
    return path


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    messages = (Message("user", "hi"), Message("assistant", "hello"), Message("user", "five, \u00fcber 5"))
    written = [
        Task("a", messages, '{"people": "5"}', "5", "booking", {"level": 3}),
        Task("b", messages[:1], "g", "", "gsm8k"),
    ]
    assert list(load_tasks(file(tmp_path, [task_row(task) for task in written]))) == written


def test_jsonl_and_parquet_hold_the_same_tasks(tmp_path: Path) -> None:
    rows = [ROW | {"id": str(i)} for i in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert list(load_tasks(tmp_path / "rows.parquet")) == list(load_tasks(file(tmp_path, rows)))


def test_a_changed_file_of_the_same_name_is_read_again(tmp_path: Path) -> None:
    assert len(load_tasks(file(tmp_path, [ROW]))) == 1
    assert len(load_tasks(file(tmp_path, [ROW, ROW]))) == 2


def test_a_row_without_an_id_has_its_number(tmp_path: Path) -> None:
    assert [task.id for task in load_tasks(file(tmp_path, [ROW, ROW]))] == ["0", "1"]


def test_conversations(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    path = file(tmp_path, [{"messages": [HI, HELLO, HI, HELLO]}, {"messages": [system, HI, HELLO]}])
    assert [[message.role for message in messages] for messages in load_conversations(path)] == [
        ["user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"prompt": None}, "no prompt"),
        ({"prompt": 5}, "prompt is not a list"),
        ({"prompt": [HI, HELLO]}, "its last message must be the user's"),
        ({"prompt": [{"role": "boss", "content": "hi"}]}, "role 'boss'"),
        ({"prompt": [{"role": "user", "content": " "}]}, "message without content"),
        ({"goal": None}, "no goal"),
        ({"goal": ""}, "goal is not a string with content"),
    ],
)
def test_a_bad_task_is_refused_by_file_and_row(tmp_path: Path, change: dict, fault: str) -> None:
    path = file(tmp_path, [ROW | change])
    with pytest.raises(ValueError) as refusal:
        list(load_tasks(path, "data.eval"))
    assert str(refusal.value).startswith(f"data.eval={path} row 1: ") and fault in str(refusal.value)


def test_the_user_opens_if_the_prompt_is_empty_or_no_row_has_one(tmp_path: Path) -> None:
    system = Message("system", "s")
    rows = [ROW | {"prompt": []}, ROW, ROW | {"prompt": [system.as_dict()]}]
    tasks = list(load_tasks(file(tmp_path, rows)))
    assert [task.unopened for task in tasks] == [True, False, True]
    assert [task.messages for task in tasks[::2]] == [(), (system,)]
    (unopened,) = load_tasks(file(tmp_path, [{"goal": "a table"}]))
    assert unopened.unopened and unopened.goal == "a table" and [*prefixes(unopened)] == [unopened]
    opened = unopened.play_on(Message("user", "hi"))
    assert not opened.unopened and opened.played == 1 and opened.original == unopened


def test_the_number_of_the_bad_row_is_given(tmp_path: Path) -> None:
    rows = [ROW] * 17 + [{key: value for key, value in ROW.items() if key != "prompt"}]
    with pytest.raises(ValueError, match="row 18: no prompt"):
        list(load_tasks(file(tmp_path, rows)))


@pytest.mark.parametrize("messages", [[HI], [HELLO], [HI, HI, HELLO], [HI, HELLO, HI], []])
def test_a_conversation_out_of_turn_is_refused(tmp_path: Path, messages: list[dict]) -> None:
    rows = [{"messages": [HI, HELLO]}, {"messages": messages}]
    with pytest.raises(ValueError, match=r"row 2: .*messages"):
        list(load_conversations(file(tmp_path, rows)))


@pytest.mark.parametrize("text", ["", "\n", "{broken\n", json.dumps(ROW)[:-4]])
def test_a_file_that_is_no_data_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"data.train={path}(: has no rows| row 1: is not JSON)"):
        load_tasks(path)


def test_a_folder_without_data_or_with_too_much_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of the system."""
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "folder" / "deeper" / f"{number}.log").touch()
    monkeypatch.setattr("datasets.data_files.get_data_patterns", lambda path: pytest.fail("searched"))
    with pytest.raises(ValueError, match="folder: no data files there; give a file, or a folder of them"):
        load_tasks(tmp_path / "folder", "data.train")
    (tmp_path / "folder" / "rows.jsonl").touch()
    monkeypatch.setattr("megatron_collab.data.rows._MOST_ENTRIES", 10)
    with pytest.raises(ValueError, match="folder: holds more than 10 files; give a glob of those with data"):
        load_tasks(tmp_path / "folder", "data.train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.txt", "rows.jsonl.gz"])
def test_a_pipe_is_no_file_of_rows(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: is a named pipe, not a file; write its content to a file"):
        load_tasks(tmp_path / name, "data.train")
    with pytest.raises(ValueError, match="/dev/zero: is a device"):
        load_tasks(Path("/dev/zero"), "data.train")
