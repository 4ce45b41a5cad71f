from __future__ import annotations

import json
import math
import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from megatron_collab.config import Config, run_record
from megatron_collab.observability import folder
from megatron_collab.observability.run import Run, Stopwatch, line
from megatron_collab.types import (
    Conversation,
    Ending,
    Failed,
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
from tests.helpers import evaluation_rows, transcript_rows

METRICS = {
    "reward": 0.5,
    "reward_se": 0.01,
    "score/ask_when_missing": 0.25,
    "score/booking_right": 0.75,
    "kl": 0.002,
    "seconds/rollout": 1.5,
    "seconds/update": 0.25,
}
KEY = "sk-proj-0123456789abcdef0123456789"
NAMES = {"needless": "ask_when_complete", "accuracy": "booking_right"}
RESULT_KEYS = {
    "needless_before", "needless_after", "accuracy_before", "accuracy_after", "before", "after", "train_minutes",
    "versions",
}  # fmt: skip


def config(folder: Path) -> Config:
    config = Config()
    config.run.dir, config.train.steps = str(folder), 4
    return config


def opened(folder: Path, start: int = 0, seconds: float = 0.0) -> Run:
    settings = config(folder)
    return Run(run_record(settings), settings.train, start, {"seconds": seconds}, NAMES)


def group(right: Score = 1.0, reply: str = "which day ?") -> Group:
    task = Task("t-1", (Message("user", "a table ."),), "goal", "answer", "scripted/booking")
    turn = Turn((1, 2), (3, 4), (-0.5, -0.25), (7, 7), Finish.STOP, reply)
    played = Conversation(task.messages, (1, 2)).add_turn(turn).end(Ending.USER_DONE)
    future = Future(played, {"booking_right": right, "ask_when_missing": 1.0})
    return Group(task, (Rollout(played, (future,), Reward(right)),))


def rows(file: Path) -> list[dict]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def trained(folder: Path, start: int, stop: int, seconds: float = 0.0) -> dict:
    """One start of a run that ends without notice after step `stop` - 1."""
    with opened(folder, start, seconds) as run:
        for step in range(start, stop):
            run.transcripts(step, [group()])
            run.record(step, METRICS | {"reward": step / 10})
        return run.state()


def test_a_step_is_one_line_in_every_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 0, 1)
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, **METRICS, "reward": 0.0}]
    assert [row["task"] for row in transcript_rows(tmp_path)] == ["t-1"]
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 4
    shown = capsys.readouterr().out
    for part in ("step 1/4", "reward 0.000±0.010", "ask_when_missing 0.250", "kl 0.002", "rollout 1.50s", "left"):
        assert part in shown


def test_steps_that_are_done_again_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files that one process writes in one second are read in the order of their numbers as text: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    trained(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # killed while it wrote
    trained(tmp_path, 2, 4)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in transcript_rows(tmp_path)] == [0, 1, 2, 3]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [0, 1, 2, 3]


def test_writers_get_conversations_of_some_steps(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.train.steps, settings.train.eval_every, settings.train.checkpoint_every = 8, 2, 3
    (rollout,) = group().rollouts
    large = replace(group(), rollouts=(replace(rollout, futures=rollout.futures * 3),) * 6)
    with Run(run_record(settings), settings.train, 0, {}, {}) as run:
        for step in range(8):
            run.transcripts(step, [large] * 3 if step else [group()])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == [f"train/{number}/text_summary" for number in range(10)], "and not 3 * 6 * 3"
    steps = [[event.step for event in events.Tensors(f"train/{number}/text_summary")] for number in (0, 9)]
    assert steps == [[0, 2, 3, 4, 6, 7], [2, 3, 4, 6, 7]]


def test_a_run_that_starts_over_forgets_its_first_steps(tmp_path: Path) -> None:
    trained(tmp_path, 0, 3)
    trained(tmp_path, 0, 2)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_transcript_has_messages_scores_and_reasons(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.transcripts(0, [group(Missing("judge is down"))])
    (row,) = transcript_rows(tmp_path)
    messages = [(message["role"], message["content"]) for message in row["messages"]]
    assert messages == [("user", "a table ."), ("assistant", "which day ?")]
    assert row["scores"] == {"booking_right": {"missing": "judge is down"}, "ask_when_missing": 1.0}
    assert row["reward"] is None and row["ending"] == "user_done"


def test_a_transcript_keeps_what_was_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal and user once for a group, terms of the reward once for a rollout, judgments and notes for a future."""
    (rollout,) = group().rollouts
    (future,) = rollout.futures
    friday = Message("user", "friday", private={"thought": f"my key is {KEY}"})
    conversation = replace(future.conversation, messages=(*future.conversation.messages, friday))
    judgments = {"booking_right": Judgment("as the goal says", '{"score": 1}', ("judge-1 fp",))}
    futures = (replace(future, conversation=conversation, judgments=judgments), future)
    reward = Reward(1.0, 0.25, {"booking_right": np.float32(1.5), "ask_when_missing": math.nan})
    rollouts = tuple(replace(rollout, futures=futures, reward=value) for value in (reward, Reward(-1.0)))
    with opened(tmp_path) as run:
        run.transcripts(0, [replace(group(), rollouts=rollouts, user="patient")] * 2)
    first, second, *later = transcript_rows(tmp_path)
    assert {name: first[name] for name in ("goal", "user")} == {"goal": "goal", "user": "patient"}
    terms = {"parts": {"booking_right": 1.5, "ask_when_missing": None}, "standard_error": 0.25, "surprise": 0.375}
    assert {name: first[name] for name in terms} == terms
    (judgment,) = judgments.values()
    kept = {"reason": judgment.reason, "answer": judgment.answer, "versions": ["judge-1 fp"]}
    assert first["judgments"] == {"booking_right": kept}
    assert first["private"] == {"2": {"thought": "my key is ***"}}
    keys = {"goal", "user", *terms, "judgments", "private"}
    assert not second.keys() & keys
    without_terms = {"surprise", "judgments", "private"}
    assert [row.keys() & keys for row in later[:3]] == [without_terms, set(), keys]


def test_surprise_is_of_sampled_tokens_alone(tmp_path: Path) -> None:
    """Without the marks that close a thought; and unknown of an endpoint, which counts tokens and names none."""
    (rollout,) = group().rollouts
    turns = [replace(rollout.start.turns[0], forced=(1, 2)), replace(rollout.start.turns[0], token_ids=(-1, -1))]
    rollouts = tuple(replace(rollout, start=replace(rollout.start, turns=(turn,))) for turn in turns)
    with opened(tmp_path) as run:
        run.transcripts(0, [replace(group(), rollouts=rollouts)])
    assert [row.get("surprise") for row in transcript_rows(tmp_path)] == [0.5, None]


def test_an_evaluation_without_a_score_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = group(Missing("judge is down"))
    with opened(tmp_path) as run:
        run.evaluation("before", "", 0, {"score/booking_right": math.nan}, [missing])
    assert capsys.readouterr().out == "evaluation before (1 tasks): no rollout has a score; the first: judge is down\n"


@pytest.mark.seconds
def test_missing_scores_are_counted_in_every_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"score/right": 0.5, "score_low/right": 0.25, "score_high/right": 0.75}
    metrics |= {"missing/right": 14.0, "incomplete": 14.0}
    with opened(tmp_path) as run:
        run.evaluation("before", "", 0, {"score/right": 0.5, "incomplete": 0.0}, [group(0.5)])
        run.evaluation("after", "", 4, metrics, [group(Missing("judge is down")), group(0.5)])
        assert run.evaluation_due("", 0) is None and run.evaluation_due("", 4) == "after"
        run.finish()
    output = capsys.readouterr()
    assert "evaluation after (2 tasks): right 0.500 [0.250, 0.750] (14 missing)\n" in output.out
    remedy = f"`megatron-collab evaluate model.path={tmp_path}@STEP` evaluates a checkpoint again"
    assert output.err.endswith(f"evaluations with conversations that lack a score: after (14); {remedy}\n")
    assert json.loads((tmp_path / "result.json").read_text())["incomplete"] == {"after": 14.0}
    assert "0.500 (1 missing)" in (tmp_path / "report.html").read_text()
    scalars = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert {"eval/right_missing", "eval/incomplete"} <= set(scalars)


def test_the_best_checkpoint_is_not_that_of_an_evaluation_without_all_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path)
    settings.train.steps, settings.train.eval_every, settings.train.keep_best = 8, 2, "eval/right"
    with Run(run_record(settings), settings.train, 0, {}, {}) as run:
        for step, right, incomplete in ((2, 0.25, 0.0), (4, 0.75, 1.0)):
            (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
            run.evaluation(f"step_{step}", "", step, {"score/right": right, "incomplete": incomplete}, [group(right)])
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 2
    message = "evaluation step_4: scores are missing, so train.keep_best does not compare it"
    assert message in capsys.readouterr().err


def test_a_failure_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = [group(Missing("metric right: KeyError: 'facts'")), group(Missing("judge is down"))]
    failing[1] = replace(failing[1], rollouts=(replace(failing[1].rollouts[0], reward=Reward(Failed("mode"))),))
    with opened(tmp_path) as run:
        for step in range(3):
            run.transcripts(step, [group(1.0), *failing[:1], *failing[:1], *failing[1:]])
            assert "KeyError" in str(transcript_rows(tmp_path)[-2])
    message = "step 1: failed and counted as missing: metric right: KeyError: 'facts' (2 times, e.g. task t-1); "
    assert capsys.readouterr().err == f"megatron-collab: {message}2 other reasons are in the transcripts\n"


@pytest.mark.seconds
def test_the_result_compares_the_evaluations(tmp_path: Path) -> None:
    before = {"score/ask_when_missing": 0.25, "score/booking_right": 0.5, "reward": math.nan}
    after = {"score/ask_when_missing": 1.0, "score/booking_right": 0.75, "score/ask_when_complete": 0.0}
    with opened(tmp_path) as run:
        run.evaluation("before", "", 0, before, [group(0.0, "done")])
        run.record(0, METRICS)
        run.evaluation("after", "", 4, after, [group(1.0)])
        assert not (tmp_path / "result.json").exists()
        run.finish()
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == RESULT_KEYS
    assert result["before"] == {"ask_when_missing": 0.25, "booking_right": 0.5}
    assert result["after"] == {"ask_when_missing": 1.0, "booking_right": 0.75, "ask_when_complete": 0.0}
    assert (result["accuracy_before"], result["accuracy_after"]) == (0.5, 0.75)
    assert (result["needless_before"], result["needless_after"]) == (None, 0.0)
    assert result["versions"]["torch"].startswith("2.") and result["train_minutes"] >= 0
    assert "NaN" not in (tmp_path / "evaluations.json").read_text()
    assert (tmp_path / "report.html").exists()


def evaluate(run: Run, eval_set: str, step: int, right: float) -> str | None:
    """The set's evaluation at `step`, if it is due."""
    name = run.evaluation_due(eval_set, step)
    if name:
        metrics = {"score/right": right, "score_low/right": 0.125, "score_high/right": 0.875}
        metrics |= {"ending/malformed": 0.5, "missing": 1.0}
        run.evaluation(name, eval_set, step, metrics, [noted(group(right))])
    return name


def noted(played: Group) -> Group:
    """The group with what a judge and a user wrote, which contains a key, an image and too many words."""
    (rollout,) = played.rollouts
    (future,) = rollout.futures
    thought = Message("user", "friday", private={"thought": f"my key is {KEY}"})
    conversation = replace(future.conversation, messages=(*future.conversation.messages, thought))
    judgments = {"booking_right": Judgment("as the goal says\r![](http://a.b/c)"), "asked": Judgment("", "w " * 30_000)}
    futures = (replace(future, conversation=conversation, judgments=judgments),)
    reward = Reward(rollout.reward.value, 0.25, {"booking_right": 1.5})
    return replace(played, rollouts=(replace(rollout, futures=futures, reward=reward),))


@pytest.mark.seconds
def test_an_evaluation_is_in_every_place_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path) as run:
        assert [evaluate(run, eval_set, 0, 0.5) for eval_set in ("math", "code")] == ["math/before", "code/before"]
        run.finish()
    assert "evaluation math/before (1 tasks): right 0.500 [0.125, 0.875]" in capsys.readouterr().out
    records = json.loads((tmp_path / "evaluations.json").read_text())
    assert records["math/before"]["score_low/right"] == 0.125 and records["math/before"]["set"] == "math"
    assert [row["task"] for row in evaluation_rows(tmp_path, "code/before")] == ["t-1"]
    assert json.loads((tmp_path / "result.json").read_text())["before"] == {"math/right": 0.5, "code/right": 0.5}
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    metrics = ("right", "right_low", "right_high", "ending/malformed")
    names = {f"eval/{eval_set}/{name}" for eval_set in ("math", "code") for name in metrics}
    assert set(events.Tags()["scalars"]) == names
    assert events.Tags()["tensors"] == ["eval/math/0/text_summary", "eval/code/0/text_summary"]
    (text,) = events.Tensors("eval/math/0/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert all(line.startswith("    ") for line in lines), "a block of code"
    of_judge = {"booking_right: as the goal says", "![](http://a.b/c)", "booking_right 1.5", "0.25"}
    dialogue = {"assistant: which day ?", "goal", "message 2, thought: my key is ***"}
    assert of_judge | dialogue <= {line.strip() for line in lines}
    assert max(map(len, lines)) <= 20_004 and any(line.endswith("… [cut]") for line in lines)


@pytest.mark.processes
def test_a_resumed_run_repeats_no_evaluation_that_is_recorded(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.train.steps, settings.train.eval_every = 8, 2
    with Run(run_record(settings), settings.train, 0, {}, {}) as run:
        assert [evaluate(run, "", step, 0.5) for step in (0, 1, 2, 4)] == ["before", None, "step_2", "step_4"]
    time.sleep(1.0)  # TensorBoard reads its files by name, in which the second comes before a number of this process
    with Run(run_record(settings), settings.train, 2, {}, {}) as run:  # from step 2: step 4 is trained again
        assert not (tmp_path / "eval_step_4.parquet").exists()
        assert [evaluate(run, "", step, 0.25) for step in (2, 3, 4, 8)] == [None, None, "step_4", "after"]
        run.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/right")] == [
        (0, 0.5), (2, 0.5), (4, 0.25), (8, 0.25)
    ]  # fmt: skip
    settings.train.steps = 12
    with Run(run_record(settings), settings.train, 8, {}, {}) as run:
        assert evaluate(run, "", 8, 0.0) is None, "it was the last one, and is one between the steps now"
        assert evaluate(run, "", 12, 0.75) == "after"
    records = json.loads((tmp_path / "evaluations.json").read_text())
    assert {name: (r["step"], r["score/right"]) for name, r in records.items()} == {
        "before": (0, 0.5), "step_2": (2, 0.5), "step_4": (4, 0.25), "step_8": (8, 0.25), "after": (12, 0.75)
    }  # fmt: skip
    assert evaluation_rows(tmp_path, "step_8")[0]["scores"]["booking_right"] == 0.25


@pytest.mark.parametrize(("metric", "expected"), [("eval/right", (4, 0.75)), ("-eval/right", (2, 0.25))])
def test_the_best_checkpoint_is_named_and_a_resumed_run_finds_it_again(
    tmp_path: Path, metric: str, expected: tuple[int, float]
) -> None:
    settings = config(tmp_path)
    settings.train.steps, settings.train.eval_every, settings.train.keep_best = 8, 2, metric

    def best() -> tuple[int, float]:
        row = json.loads((tmp_path / "best.json").read_text())
        assert row["checkpoint"] == f"checkpoints/step_{row['step']}" and row["metric"] == metric
        return row["step"], row["value"]

    with Run(run_record(settings), settings.train, 0, {}, {}) as run:
        evaluate(run, "", 0, 1.0 if metric[0] == "e" else 0.0)
        assert not (tmp_path / "best.json").exists(), "there is no checkpoint of the weights before training"
        for step, right in ((2, 0.25), (4, 0.75), (6, 0.75 if metric[0] == "e" else 0.25)):
            (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
            evaluate(run, "", step, right)
        assert best() == expected
    with Run(run_record(settings), settings.train, 6, {}, {}):
        assert best() == expected
    (tmp_path / "checkpoints" / f"step_{expected[0]}").rmdir()  # of a run that kept none until now
    with Run(run_record(settings), settings.train, 6, {}, {}):
        assert best() == (6, expected[1])


def test_what_changed_when_a_run_went_on_is_a_line_of_its_history(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with Run(run_record(settings), settings.train, 0, {}, {}) as run:
        run.finish()
    assert not (tmp_path / "history.jsonl").exists()
    settings.train.steps, settings.optim.lr = 6, 0.5
    with Run(run_record(settings), settings.train, 4, {}, {}):
        assert not (tmp_path / "result.json").exists(), "a run that trains on is not finished"
    with Run(run_record(settings), settings.train, 5, {}, {}):
        pass
    changes = rows(tmp_path / "history.jsonl")
    assert [(row["step"], *map(row.get, ("setting", "before", "after"))) for row in changes] == [
        (4, None, None, None),  # each later start
        (4, "optim.lr", 1e-6, 0.5),
        (4, "train.steps", 4, 6),
        (5, None, None, None),
    ]
    assert all(row["time"].endswith("+00:00") for row in changes)
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 6


def test_a_run_without_an_evaluation_has_a_result(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.finish()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["before"], result["after"], result["accuracy_after"]) == ({}, {}, None)


def test_a_run_ends_without_a_library_that_it_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is not installed with the wheel, and sft and dpo run without it."""
    monkeypatch.setattr(folder, "VERSIONS", ("torch", "not-installed"))
    with opened(tmp_path) as run:
        run.finish()
    assert json.loads((tmp_path / "result.json").read_text())["versions"].keys() == {"megatron-collab", "torch"}


def test_the_time_of_earlier_starts_counts(tmp_path: Path) -> None:
    first = trained(tmp_path, 0, 1)["seconds"]
    assert trained(tmp_path, 1, 2, seconds=1000.0)["seconds"] >= first + 1000.0


def test_another_rank_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with opened(tmp_path / "run") as run:
        assert run.state()["seconds"] > 0
        run.finish()
    assert not (tmp_path / "run").exists()


def recorded_by_wandb(file: Path) -> list[Any]:
    """What W&B would upload. In blocks of 32 KiB come pieces of records: checksum, size, and 1 or 4 for a last one."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (remaining := 32768 - at % 32768) < 7:
            at += remaining
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        at, whole = at + 7 + size, whole + data[at + 7 : at + 7 + size]
        if kind in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
    return records


@pytest.mark.processes
def test_weights_and_biases_gets_one_run_over_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_KEY": "0" * 40, "MODE": "offline", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    settings = config(tmp_path)
    settings.run.wandb_project, settings.run.wandb_name = "p", "first evening"
    settings.run.wandb_group, settings.run.wandb_tags = "g", ["a", "b"]
    for start in (0, 1):
        with suppress(ZeroDivisionError), Run(run_record(settings), settings.train, start, {}, {}) as run:
            evaluate(run, "math", start, 0.5)
            run.transcripts(start, [group()])
            run.record(start, METRICS)
            _ = 1 / start  # the first start fails
        time.sleep(1)  # its folders are named by the second, and a second start within it would have none
    wandb.teardown()
    of_evaluation, of_training, scalars, ids, codes = [], [], {}, set(), []
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        for record in recorded_by_wandb(file):
            if (kind := record.WhichOneof("record_type")) == "run":
                ids.add(record.run.run_id)
                assert [record.run.project, record.run.display_name, record.run.run_group] == [
                    "p",
                    "first evening",
                    "g",
                ]
                assert list(record.run.tags) == ["a", "b"]
            elif kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                scalars[items["_step"]] = items
            elif kind == "exit":
                codes.append(record.exit.exit_code)
        for tables, name in ((of_evaluation, "eval/math"), (of_training, "train")):
            tables += [json.loads(table.read_text()) for table in file.parent.glob(f"files/media/table/{name}/*.json")]
    assert len(ids) == 1 and codes == [1, 0]
    assert all(METRICS.items() <= scalars[step].items() for step in (0, 1))
    assert (scalars[0]["eval/math/right"], scalars[0]["eval/math/right_low"]) == (0.5, 0.125)
    (at_start,) = of_training  # not of step 1, which nothing evaluates or saves
    assert at_start["data"][0][:3] == [0, "t-1", "user: a table .\n\nassistant: which day ?"]
    (table,) = of_evaluation
    (data,) = table["data"]
    row = dict(zip(table["columns"], data, strict=True))
    assert row["conversation"].endswith("assistant: which day ?\n\nuser: friday")
    assert row["reasons"].startswith("booking_right: as the goal says") and len(row.pop("reasons")) == 20_000
    assert row.pop("conversation") and row == {
        "step": 0, "task": "t-1", "ending": "user_done", "reward": 0.5, "standard_error": 0.25, "goal": "goal",
        "scores": "booking_right 0.5, ask_when_missing 1", "parts": "booking_right 1.5",
        "private": "message 2, thought: my key is ***",
    }  # fmt: skip


def test_a_line_shows_what_is_there() -> None:
    shown = line(0, 500, {"loss": 2.5, "grad_norm": 1.25, "lr": 0.002, "seconds/update": 0.25})
    assert shown == "step 1/500 | loss 2.5 | grad_norm 1.25 | lr 0.002 | update 0.25s"


def test_the_stopwatch_parts_a_step_into_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 2.5, 2.75, 10.0])
    monkeypatch.setattr("megatron_collab.observability.run.time.monotonic", lambda: next(times))
    clock = Stopwatch()
    clock.lap("rollout")
    clock.lap("update")
    clock.lap("rollout")
    assert clock.read() == {"seconds/rollout": 2.25, "seconds/update": 0.5}
    clock.lap("save")
    assert clock.read() == {"seconds/save": 7.25}


def test_transcripts_show_what_others_saw_and_apart_from_it_the_thoughts(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.transcripts(0, [group(reply="<think>ask</think>which day ?"), group()])
    thinking, plain = transcript_rows(tmp_path)
    assert thinking["messages"][-1]["content"] == "which day ?"
    assert thinking["turns"] == ["<think>ask</think>which day ?"]
    assert "turns" not in plain and "turn_rewards" not in plain
