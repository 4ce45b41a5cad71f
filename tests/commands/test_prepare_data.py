"""From a set of scored candidates, and from conversations, to rows that the trainer reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.data.examples import load_conversations, load_pairs, load_tasks
from megatron_collab.data.preparation import groups_of_eval
from megatron_collab.data.sources import Source
from megatron_collab.settings.prompt import PROMPTS
from tests.helpers import byte_level_tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def candidates(conversation: int, turns: int, scores: tuple[float, ...]) -> list[dict[str, Any]]:
    """A conversation of several turns with candidates for each, of which the first is the one it went on with."""
    rows, prompt = list[dict[str, Any]](), [user(f"first message of {conversation}")]
    for _ in range(turns):
        for number, score in enumerate(scores):
            reply = f"reply {number} to {len(prompt)}"
            row = {"prompt": list(prompt), "completion": reply, "conv_id": conversation, "score": score}
            row |= {"turn_id": len(prompt), "single_turn_prompt": f"problem {conversation}"}
            rows.append(row | {"single_turn_completion": "42", "single_turn_metadata": {"level": "1"}})
        prompt += [assistant(f"reply 0 to {len(prompt)}"), user(f"message {len(prompt) + 1} of {conversation}")]
    return rows


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """20 conversations of 3 turns with 3 candidates each; the first messages of the last two are the same."""
    rows = [row for conversation in range(19) for row in candidates(conversation, 3, (0.5, 0.9, 0.1))]
    rows += [row | {"conv_id": 19} for row in rows[-9:]]
    write_jsonl(tmp_path / "published.jsonl", rows)
    return tmp_path / "published.jsonl"


def prepared(source: object, to: str, out: Path, *more: str) -> dict[str, Any]:
    assert run("prepare-data", [str(source), "--to", to, "--out", str(out), *more]) == 0
    return json.loads((out / "summary.json").read_text())


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.processes
def test_tasks_are_every_prompt_once_and_split_by_conversation(published: Path, tmp_path: Path) -> None:
    (tmp_path / "system.j2").write_text("Ask before you answer.\n")
    out = tmp_path / "rl"
    summary = prepared(published, "rl", out, "--system-prompt", str(tmp_path / "system.j2"), "--eval-share", "0.25")
    assert summary["kept"] == {"train": 39, "eval": 18} and summary["conversations"] == 19  # 6 of 19 for 0.25
    assert summary["rows"] == 180 and summary["format"] == "collabllm"
    # 3 candidates for each turn, whose prompts have 1, 2 and 3 prefixes
    assert summary["dropped"] == {"prefixes of conversations that another row has too": 20 * 3 * (1 + 2 + 3) - 57}
    sides = [list(load_tasks(out / f"{side}.jsonl")) for side in ("train", "eval")]
    every = [task for side in sides for task in side]
    assert len({task.messages for task in every}) == len({task.id for task in every}) == len(every) == 57
    assert {len(task.messages) for task in every} == {2, 4, 6}  # every depth
    assert {task.messages[0].content for task in every} == {"Ask before you answer."}
    first = [{task.messages[1].content for task in side} for side in sides]
    assert not first[0] & first[1]
    assert (every[0].goal[:8], every[0].answer, every[0].metadata) == ("problem ", "42", {"level": "1"})
    prepared(published, "rl", tmp_path / "again", "--eval-share", "0.25", "--seed", "1")
    assert rows_of(tmp_path / "again" / "eval.jsonl")[0]["goal"] != rows_of(out / "eval.jsonl")[0]["goal"]
    prepared(published, "sft", tmp_path / "sft", "--eval-share", "0.25")
    assert {row["messages"][0]["content"] for row in rows_of(tmp_path / "sft" / "eval.jsonl")} == first[1]


def test_goals_become_tasks_that_the_user_opens_on_the_side_of_their_conversations(
    published: Path, tmp_path: Path
) -> None:
    (tmp_path / "system.j2").write_text("Ask before you answer.\n")
    opened, rows = tmp_path / "opened", ["--eval-share", "0.25"]
    summary = prepared(published, "opened", opened, "--system-prompt", str(tmp_path / "system.j2"), *rows)
    assert summary["kept"] == {"train": 13, "eval": 6}
    assert summary["dropped"] == {"goals that another row has too": 180 - 19}
    prepared(published, "rl", tmp_path / "rl", *rows)
    for side in ("train", "eval"):
        tasks = list(load_tasks(opened / f"{side}.jsonl"))
        assert all(task.unopened and task.messages[0].content == "Ask before you answer." for task in tasks)
        assert {task.goal for task in tasks} == {row["goal"] for row in rows_of(tmp_path / "rl" / f"{side}.jsonl")}
        assert {(task.answer, task.metadata["level"]) for task in tasks} == {("42", "1")}
    # They are prepared again: a task without a message stays as it is, and is held out by its goal.
    assert sum(prepared(opened / "train.jsonl", "rl", tmp_path / "again", *rows)["kept"].values()) == 13


def test_all_published_splits_are_read_unless_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are by row: the last turn of the conversation is in the other one."""
    rows, folder = candidates(0, 2, (0.5,)), tmp_path / "published"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", rows[:1])
    write_jsonl(folder / "test.jsonl", rows[1:])
    for number, (source, splits, last) in enumerate(
        (
            (folder, ["train", "test"], "reply 0 to 3"),
            (f"{{source: {folder}, split: train}}", ["train"], "reply 0 to 1"),
        )
    ):
        summary = prepared(source, "sft", tmp_path / f"sft{number}", "--eval-share", "0")
        assert summary["splits"] == splits and f"rows (split {'+'.join(splits)})" in capsys.readouterr().out
        (row,) = rows_of(tmp_path / f"sft{number}" / "train.jsonl")
        assert row["messages"][-1]["content"] == last


def test_a_conversation_is_held_out_whatever_others_there_are() -> None:
    groups = [str(number) for number in range(2000)]
    held_out = groups_of_eval(groups, 0.1, 0)
    assert abs(len(held_out) - 200) < 4 * (2000 * 0.1 * 0.9) ** 0.5
    assert groups_of_eval(groups[:700], 0.1, 0) == held_out & set(groups[:700])
    assert [len(groups_of_eval(groups[:2], share, 0)) for share in (0, 0.001, 0.999)] == [0, 1, 1]
    assert groups_of_eval(groups[:1], 0.5, 0) == set()


def test_supervised_rows_are_the_best_last_turns(published: Path, tmp_path: Path) -> None:
    summary = prepared(published, "sft", tmp_path / "sft", "--eval-share", "0", "--parquet")
    assert summary["kept"] == {"train": 20}
    assert summary["dropped"] == {"candidates that are not the best of the last turn": 160}
    conversations = list(load_conversations(tmp_path / "sft" / "train.parquet"))
    assert {messages[-1].content for messages in conversations} == {"reply 1 to 5"}
    assert sorted(path.name for path in (tmp_path / "sft").iterdir()) == ["summary.json", "train.parquet"]


def test_pairs_are_the_best_against_the_worst_with_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = candidates(0, 2, (0.5, 0.9, 0.1)) + candidates(1, 1, (0.5, 0.51)) + candidates(2, 1, (0.5,))
    write_jsonl(tmp_path / "rows.jsonl", rows)
    summary = prepared(tmp_path / "rows.jsonl", "dpo", tmp_path / "dpo", "--eval-share", "0")
    assert summary["dropped"] == {"pairs whose scores differ by less than 0.02": 1, "turns with one candidate": 1}
    pairs = list(load_pairs(Source(source=str(tmp_path / "dpo" / "train.jsonl")), "x"))
    assert [(pair.chosen[0].content, pair.rejected[0].content, pair.scores) for pair in pairs] == [
        ("reply 1 to 1", "reply 2 to 1", (0.9, 0.1)),
        ("reply 1 to 3", "reply 2 to 3", (0.9, 0.1)),
    ]
    chosen = list(load_conversations(tmp_path / "dpo" / "train.jsonl"))
    assert [messages[-1].content for messages in chosen] == ["reply 1 to 1", "reply 1 to 3"]
    assert len(load_tasks(tmp_path / "dpo" / "train.jsonl")) == 2
    wider = ["--to", "dpo", "--out", str(tmp_path / "wide"), "--gap", "0.9"]
    assert run("prepare-data", [str(tmp_path / "dpo" / "train.jsonl"), *wider]) == 2
    assert "no rows are left: 2 pairs whose scores differ by less than 0.9" in capsys.readouterr().err


def test_a_pair_is_of_one_prompt(tmp_path: Path) -> None:
    """Candidates for a turn may have been asked after different beginnings."""
    rows = candidates(0, 1, (0.5, 0.9))
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {**rows[0], "prompt": [user("another message")], "score": 0.0}])
    summary = prepared(tmp_path / "rows.jsonl", "dpo", tmp_path / "dpo", "--eval-share", "0")
    assert summary["kept"] == {"train": 1} and summary["dropped"] == {"turns with one candidate": 1}
    (row,) = rows_of(tmp_path / "dpo" / "train.jsonl")
    assert (row["score_chosen"], row["score_rejected"]) == (0.9, 0.5)


def test_supervised_rows_keep_their_tools(tmp_path: Path) -> None:
    """Also where calls have arguments of different kinds, which no column of Arrow holds."""
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    rows = []
    for value in (1, "one", {"x": [1]}):
        call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": value})}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [user(f"add {value}"), reply, {"role": "tool", "content": "2"}, assistant("2")]
        rows.append({"messages": messages, "tools": json.dumps([schema])})
    write_jsonl(tmp_path / "calls.jsonl", rows)
    before = list(load_conversations(tmp_path / "calls.jsonl"))
    (tmp_path / "system.j2").write_text("Be kind.")
    for more, skipped in (((), 0), (("--system-prompt", str(tmp_path / "system.j2")), 1)):
        out = tmp_path / f"sft{skipped}"
        prepared(tmp_path / "calls.jsonl", "sft", out, "--eval-share", "0", *more)
        after: list[Any] = list(load_conversations(out / "train.jsonl"))
        assert [messages[skipped:] for messages in after] == before
        assert [messages.tools for messages in after] == [(schema,)] * 3


def test_whole_conversations_become_prefixes_and_long_ones_are_dropped(tmp_path: Path) -> None:
    byte_level_tokenizer(300).save_pretrained(tmp_path / "model")
    long = [user("hello"), assistant("yes"), user("z" * 300), assistant("no")]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": long}, {"messages": [user("hi"), assistant("yes")]}])
    limit = ["--max-tokens", "64", "--model", str(tmp_path / "model"), "--eval-share", "0"]
    summary = prepared(tmp_path / "chats.jsonl", "rl", tmp_path / "rl", *limit)
    assert summary["dropped"] == {"prefixes of conversations of more than 64 tokens": 1}
    assert [task.messages[-1].content for task in load_tasks(tmp_path / "rl" / "train.jsonl")] == ["hello", "hi"]
    summary = prepared(tmp_path / "chats.jsonl", "sft", tmp_path / "sft", *limit)
    assert summary["kept"] == {"train": 1} and summary["dropped"] == {"rows of more than 64 tokens": 1}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--eval-share", "1"], "--eval-share=1: must be at least 0 and below 1"),
        (["--max-tokens", "5"], "--max-tokens and --model: give both or neither"),
        (["--max-tokens", "5", "--model", "nowhere"], "--model=nowhere: no tokenizer.json there"),
        (["--to", "opened", "--max-tokens", "5", "--model", "m"], "tasks that the user opens have no prompt"),
        (["--system-prompt", "none.j2"], "--system-prompt=none.j2: no such file"),
        (["--system-prompt", "system.txt"], "--system-prompt=system.txt: name the file of a Jinja template, FILE.j2"),
        (["--to", "dpo"], "question_answer, which train.stage=rl reads as tasks; give rows that are read as pairs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    arguments = [str(tmp_path / "rows.jsonl"), "--to", "rl", "--out", str(tmp_path / "out"), *more]
    assert run("prepare-data", arguments) == 2
    assert (error := capsys.readouterr().err).count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl", "train.parquet", "eval.parquet", "summary.json"])
def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [user("hi"), assistant("hello")]}])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert run("prepare-data", [str(tmp_path / "rows.jsonl"), "--to", "sft", "--out", str(tmp_path / "out")]) == 2
    assert f"--out={tmp_path}/out: holds {name}; remove it, or give another folder" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in (tmp_path / "out").iterdir()] == [(name, "mine")]


def test_what_of_messages_is_not_read_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and thoughts are kept."""
    replies = [assistant("4") | more for more in ({"weight": 0, "name": "Ann"}, {"reasoning_content": "two and two"})]
    messages = [{"role": "system", "content": ""}, user("2+2?"), replies[0], user("sure?"), replies[1]]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages, "tools": "null"}] * 3)
    summary = prepared(tmp_path / "rows.jsonl", "sft", tmp_path / "out", "--eval-share", "0")
    assert summary["unread"] == {"key name": 3, "empty system message": 3}
    assert "rows.jsonl: not read: empty system message (3), key name (3)\n" in capsys.readouterr().out
    (row, *_) = rows_of(tmp_path / "out" / "train.jsonl")
    assert row["messages"] == [
        user("2+2?"),
        assistant("4") | {"weight": 0},
        user("sure?"),
        assistant("<think>\ntwo and two\n</think>\n\n4"),
    ]


def test_the_system_message_is_a_prompt(tmp_path: Path) -> None:
    """A built-in one too, as in rollout.system_prompt."""
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [user("hi"), assistant("hello")]}])
    options = ("--eval-share", "0", "--system-prompt", "collaborator.j2")
    prepared(tmp_path / "rows.jsonl", "sft", tmp_path / "out", *options)
    (row,) = rows_of(tmp_path / "out" / "train.jsonl")
    assert row["messages"][0] == {
        "role": "system",
        "content": (PROMPTS / "collaborator.j2").read_text().strip(),
    }
