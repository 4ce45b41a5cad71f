"""Rollouts read back from transcripts equal the written ones, except for token ids."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.data.examples import load_tasks
from megatron_collab.observability import transcripts
from megatron_collab.observability.folder import append, rows_of
from megatron_collab.rollout.recorded import groups_of, rows_of_step
from megatron_collab.settings import ConfigError
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Judgment,
    Message,
    Missing,
    Reward,
    Rollout,
    Task,
    Turn,
)

TASKS = [
    Task(name, (Message("user", text),), "goal", "18", "llm", {"k": 1}) for name, text in (("a", "hi"), ("b", "ho"))
]


def turn(text: str, finish: Finish = Finish.STOP) -> Turn:
    return Turn((), (), (), (), finish, text)


def future(task: Task, *texts: str, ending: Ending = Ending.USER_DONE, finish: Finish = Finish.STOP) -> Future:
    """Messages of policy and user in turn, the policy first; `call` is a tool call with its answer."""
    played = Conversation(task.messages, ())
    for at, text in enumerate(texts):
        if at % 2:
            played = played.add_messages([Message("user", text)], ())
        elif text.startswith("call"):
            played = played.add_turn(turn(text)).add_messages([Message("tool", "4")], ()).add_turn(turn("so 4"))
        else:
            played = played.add_turn(turn(text, finish)).add_reward(0.25)
    return Future(played.end(ending), {"right": 1.0, "judged": Missing("down")})


def rollout(*futures: Future, reward: float | Missing = 0.5) -> Rollout:
    return Rollout(futures[0].conversation, futures, Reward(reward))


A, B = TASKS
GROUPS = [
    Group(
        A,
        (rollout(future(A, "<think>x</think>one", "why?", "two"), future(A, "one", "bye")), rollout(future(A, "call"))),
    ),
    Group(A, (rollout(future(A, "cut", finish=Finish.LENGTH), reward=Missing("down")),)),
    Group(B, (rollout(future(B, "", ending=Ending.MALFORMED), reward=-1.0), rollout(future(B, "three")))),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "tasks.jsonl", map(task_row, TASKS))
    for step in (0, 1):
        transcripts.write_step(tmp_path, step, [[*rows_of([group])] for group in GROUPS])
    return tmp_path


@pytest.fixture
def old_folder(folder: Path) -> Path:
    """The same run, of an earlier version."""
    append(folder / "transcripts.jsonl", transcripts.run_rows(folder))
    shutil.rmtree(folder / "transcripts")
    return folder


def test_written_groups_are_read_back(folder: Path) -> None:
    step, rows = rows_of_step(folder, None)
    groups = groups_of(rows, [load_tasks(folder / "tasks.jsonl")])
    assert step == 1 and [group.task for group in groups] == [A, A, B], "the same task twice are two groups"
    for group, expected in zip(groups, GROUPS, strict=True):
        for restored, other in zip(group.rollouts, expected.rollouts, strict=True):
            assert restored.futures == other.futures and restored.malformed == other.malformed
            missing = isinstance(other.reward.value, Missing)
            assert (
                isinstance(restored.reward.value, Missing) if missing else restored.reward.value == other.reward.value
            )


def test_judgments_are_read_back_and_rows_of_earlier_versions_have_none(tmp_path: Path) -> None:
    judgments = {"judged": Judgment("", "no JSON"), "right": Judgment("is 18", "{}", ("judge-1",))}
    judged = replace(future(A, "one", "why?"), judgments=judgments)
    noted = replace(judged.conversation.messages[-1], private={"thought": "odd"})
    conversation = replace(judged.conversation, messages=(*judged.conversation.messages[:-1], noted))
    group = Group(
        A, (replace(rollout(replace(judged, conversation=conversation)), reward=Reward(0.5, 0.1, {"m": 0.5})),)
    )
    write_jsonl(tmp_path / "tasks.jsonl", [task_row(A)])
    new = [{"step": 0, **row} for row in rows_of([group])]
    keys = {"goal", "user", "parts", "standard_error", "judgments", "private"}
    assert new[0].keys() >= keys
    old = [{name: value for name, value in row.items() if name not in keys} for row in new]
    for row_list, expected in ((new, judgments), (old, {})):
        (tmp_path / "transcripts.jsonl").unlink(missing_ok=True)
        append(tmp_path / "transcripts.jsonl", row_list)
        (restored,) = groups_of(rows_of_step(tmp_path, 0)[1], [load_tasks(tmp_path / "tasks.jsonl")])
        assert restored.rollouts[0].futures == (replace(judged, judgments=expected),)


def test_a_run_of_an_earlier_version_is_read_and_continued(old_folder: Path) -> None:
    assert rows_of_step(old_folder, None)[0] == 1
    old = rows_of_step(old_folder, 1)[1]
    transcripts.write_step(old_folder, 2, [[*rows_of([group])] for group in GROUPS])
    step, rows = rows_of_step(old_folder, None)
    assert step == 2 and rows == [{**row, "step": 2} for row in old] and rows_of_step(old_folder, 1)[1] == old


def test_the_users_opening_message_is_read_back(tmp_path: Path) -> None:
    unopened = replace(A, messages=())
    task = unopened.play_on(Message("user", "hello"))
    transcripts.write_step(tmp_path, 0, [[*rows_of([Group(task, (rollout(future(task, "one")),))])]])
    write_jsonl(tmp_path / "tasks.jsonl", [task_row(unopened)])
    (group,) = groups_of(rows_of_step(tmp_path, None)[1], [load_tasks(tmp_path / "tasks.jsonl")])
    assert group.task == task and group.rollouts[0].start.replies == ("one",)


def test_a_task_is_found_by_its_messages_if_its_id_is_not_unique(folder: Path) -> None:
    other = replace(A, messages=(Message("user", "another"),))
    write_jsonl(folder / "tasks.jsonl", map(task_row, (other, *TASKS)))
    groups = groups_of(rows_of_step(folder, 0)[1], [load_tasks(folder / "tasks.jsonl")])
    assert [group.task.messages[0].content for group in groups] == ["hi", "hi", "ho"]


def test_changed_data_and_unknown_steps_are_refused(folder: Path) -> None:
    write_jsonl(folder / "tasks.jsonl", [task_row(B)])
    with pytest.raises(ConfigError, match="task a: no task of that id has its first messages; the data have changed"):
        groups_of(rows_of_step(folder, 0)[1], [load_tasks(folder / "tasks.jsonl")])
    with pytest.raises(ConfigError, match=r"--step=7: .* has no transcripts of that step; the last one is 1"):
        rows_of_step(folder, 7)


@pytest.mark.parametrize(
    "change",
    [
        *({"future": None}, {"messages": 3}, {"messages": [1]}, {"messages": [{"content": "x"}]}, {"task": [1]}),
        *({"scores": [1]}, {"scores": {"right": "x"}}, {"reward": "x"}, {"ending": "bored"}, {"rollout": "x"}),
        *({"cut": 3}, {"turns": 3}, {"error": None}, {"goal": 3}, {"private": []}, {"parts": 1}),
        *({"judgments": []}, {"judgments": {"right": "x"}}, {"judgments": {"right": {"reason": "x"}}}),
        {"judgments": {"right": {"reason": "x", "answer": "x", "versions": 1}}},
    ],
    ids=str,
)
def test_a_row_that_is_no_future_is_named(old_folder: Path, change: dict[str, Any]) -> None:
    """Torn lines, of a run that goes on or was killed, are left out."""
    folder = old_folder
    file = folder / "transcripts.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, '{"step": 1, "ta']))
    assert len(rows_of_step(folder, 1)[1]) == len(lines) // 2
    file.write_text("\n".join([lines[0], json.dumps({**json.loads(lines[1]), **change})]))
    with pytest.raises(ConfigError, match=r"transcripts\.jsonl row 2: is not a future of a run; restore the file"):
        rows_of_step(folder, None)
    file.unlink()
    transcripts.write_step(folder, 0, [[json.loads(lines[0]), {**json.loads(lines[1]), **change}]])
    with pytest.raises(ConfigError, match=r"step_000000\.parquet row 2: is not a future of a run; restore the file"):
        rows_of_step(folder, None)
