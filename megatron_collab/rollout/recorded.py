"""Reads a run's rollouts back from its transcripts: conversations as metrics see them, without token ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_collab.data.examples import Examples, load_tasks
from megatron_collab.data.prefixes import at_every_depth
from megatron_collab.data.spec import DataSpec
from megatron_collab.observability import evaluations, records, transcripts
from megatron_collab.settings import ConfigError, require
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
    Score,
    Task,
    Turn,
)

_TASKLESS = "no task of that id has its first messages; the data have changed since"
Row = Mapping[str, Any]
_COLUMNS: dict[str, Any] = {
    **{"task": str, "rollout": int, "future": int, "reward": int | float | None},
    **{"ending": str, "error": str, "messages": list, "scores": dict},
}
_OPTIONAL_COLUMNS = {
    **{"played": int, "turns": list, "cut": list, "turn_rewards": list, "goal": str, "user": str},
    **{"parts": dict, "standard_error": int | float | None, "judgments": dict, "private": dict},
}
_MESSAGE = {"role", "content"}
_JUDGMENT = {"reason", "answer"}


def played_groups(folder: Path, data: DataSpec, step: int | None, evaluation: str | None) -> tuple[str, list[Group]]:
    """A title and the groups that the run in `folder` played in a training step (None: the last) or an evaluation.

    `data`: of the training or the evaluation. Raises ConfigError.
    """
    try:
        if evaluation:
            rows = rows_of_evaluation(folder, evaluation)
            return f"evaluation {evaluation}", groups_of(rows, _evaluated_tasks(data, evaluation))
        found_step, rows = rows_of_step(folder, step)
        return f"step {found_step} of training", groups_of(rows, _training_tasks(data))
    except (ValueError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def rows_of_step(folder: Path, step: int | None) -> tuple[int, list[Row]]:
    """The futures of a training step of the run in `folder`; of the last if `step` is None. Raises ConfigError."""
    files = transcripts.step_files(folder)
    number = max(files, default=None) if step is None else step
    if number in files:
        return number, _futures(files[number])
    old_rows = [row for row in _futures(folder / transcripts.OLD_FILE) if records.of_step(row)]
    last = max([*files, *(row["step"] for row in old_rows)], default=None)
    require(last is not None, f"{folder}: has no transcripts of futures; give the folder of a run with rewards")
    step_rows = [row for row in old_rows if row["step"] == (last if step is None else step)]
    require(bool(step_rows), f"--step={step}: {folder} has no transcripts of that step; the last one is {last}")
    return step_rows[0]["step"], step_rows


def rows_of_evaluation(folder: Path, name: str) -> list[Row]:
    """The conversations of an evaluation, by its name in evaluations.json. Raises ConfigError."""
    known = evaluations.read(folder)
    choices = f"it has {', '.join(known) or 'none'}"
    require(name in known, f"--evaluation={name}: not in {folder / evaluations.FILE}; {choices}")
    return _futures(evaluations.file_of(folder, name))


def _futures(file: Path) -> list[Row]:
    """The recorded futures in `file`, without torn lines. Raises ConfigError if a row is something else."""
    rows = [*transcripts.rows_of_file(file)]
    for number, row in enumerate(rows, 1):
        message = "is not a future of a run; restore the file, or remove the row"
        require(row is None or _is_future(row), f"{file} row {number}: {message}")
    return [row for row in rows if row is not None]


def _is_future(row: Row) -> bool:
    """Whether the row has the columns that observability/folder.py writes, with their types."""
    return (
        row.keys() >= _COLUMNS.keys()
        and all(isinstance(row[name], kind) for name, kind in (_COLUMNS | _OPTIONAL_COLUMNS).items() if name in row)
        and row["ending"] in [*Ending]
        and all(isinstance(message, dict) and message.keys() >= _MESSAGE for message in row["messages"])
        and all(
            isinstance(score, int | float) or (isinstance(score, dict) and "missing" in score)
            for score in row["scores"].values()
        )
        and all(map(_is_judgment, row.get("judgments", {}).values()))
    )


def _is_judgment(why: Any) -> bool:
    return isinstance(why, dict) and why.keys() >= _JUDGMENT and isinstance(why.get("versions", []), list)


def _training_tasks(data: DataSpec) -> list[Examples[Task]]:
    """The tasks that a run trains on, by source."""
    examples = [load_tasks(source, "data.train", data.format) for source in data.train]
    return [at_every_depth(source_examples) for source_examples in examples] if data.prefixes else examples


def _evaluated_tasks(data: DataSpec, name: str) -> list[Examples[Task]]:
    """The tasks of the set of an evaluation, by the evaluation's name."""
    moment = evaluations.moment_of(name)
    named = [eval_set for eval_set in data.eval_sets if evaluations.name_of(eval_set.name, moment) == name]
    return [load_tasks(eval_set, eval_set.setting, data.format) for eval_set in named]


def groups_of(rows: Sequence[Row], tasks: Iterable[Examples[Task]]) -> list[Group]:
    """The groups recorded in `rows`, in order, with their scores and rewards.

    Turns have no tokens; `finish` is LENGTH if the token budget cut the turn. Raises ConfigError if a row's task is not
    in `tasks`.
    """
    known = _by_id({row.get("task") for row in rows}, tasks)
    groups, rollouts = list[Group](), list[Rollout]()
    for _, futures in groupby(_numbered(rows), key=lambda pair: pair[0]):
        rollout_rows = [row for _, row in futures]
        task = _task_of(rollout_rows[0], known)
        if rollouts and (rollout_rows[0]["rollout"] == 0 or groups[-1].task != task):
            rollouts = []
        if not rollouts:
            groups.append(Group(task, ()))
        rollouts.append(_rollout(rollout_rows, task))
        groups[-1] = replace(groups[-1], rollouts=tuple(rollouts))
    return groups


def _numbered(rows: Iterable[Row]) -> Iterable[tuple[int, Row]]:
    """The rows with the number of their rollout; a row with future 0 begins a rollout."""
    number = -1
    for row in rows:
        number += row["future"] == 0
        yield number, row


def _by_id(task_ids: set[Any], tasks: Iterable[Examples[Task]]) -> dict[str, list[Task]]:
    by_id = defaultdict(list)
    for examples in tasks:
        for number, row in examples.numbered():
            try:
                task = examples.read(row, number)
            except ValueError:  # the run skipped it too
                continue
            if task.id in task_ids:
                by_id[task.id].append(task)
    return by_id


def _task_of(row: Row, known: Mapping[str, Sequence[Task]]) -> Task:
    for task in known.get(row["task"], ()):
        length, messages = len(task.messages), row["messages"]
        if [message.as_dict() for message in task.messages] == messages[:length]:
            played = messages[length : length + row.get("played", 0)]
            return task.play_on(*(Message(message["role"], message["content"]) for message in played))
    raise ConfigError(f"task {row['task']}: {_TASKLESS}")


def _rollout(rows: Sequence[Row], task: Task) -> Rollout:
    futures = tuple(Future(_conversation(row, task), _scores(row), _judgments(row)) for row in rows)
    value = rows[0]["reward"]
    reward = Reward(Missing("no reward was recorded") if value is None else float(value))
    return Rollout(futures[0].conversation, futures, reward)


def _conversation(row: Row, task: Task) -> Conversation:
    conversation = Conversation(task.messages, ())
    texts, cut, turns = row.get("turns"), row.get("cut", ()), 0
    for message in row["messages"][len(task.messages) :]:
        if message["role"] != "assistant":
            conversation = conversation.add_messages([Message(message["role"], message["content"])], ())
            continue
        finish = Finish.LENGTH if turns in cut else Finish.STOP
        text = texts[turns] if texts else message["content"]
        conversation = conversation.add_turn(Turn((), (), (), (), finish, text))
        turns += 1
    for number, value in enumerate(row.get("turn_rewards", ())):
        conversation = conversation.add_reward(value, number)
    return conversation.end(Ending(row["ending"]), row["error"])


def _scores(row: Row) -> dict[str, Score]:
    scores = row["scores"].items()
    return {name: Missing(score["missing"]) if isinstance(score, dict) else float(score) for name, score in scores}


def _judgments(row: Row) -> dict[str, Judgment]:
    judgments = row.get("judgments", {}).items()
    return {
        name: Judgment(str(why["reason"]), str(why["answer"]), tuple(map(str, why.get("versions", ()))))
        for name, why in judgments
    }
