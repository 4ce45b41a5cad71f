"""What the page can ask about a run, in folders of runs that are being written, resumed or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.observability import metric_kinds, tokens, transcripts
from megatron_collab.observability.transcript_index import Index
from megatron_collab.settings import ConfigError, RewardConfig
from megatron_collab.view import runs
from megatron_collab.view.runs import RunView
from megatron_collab.view.selection import selection
from tests.observability.test_tokens import learned
from tests.observability.test_transcripts import ODD, group, old_lines, row


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """As a run does when it resumes: another file in the place of this one."""
    draft = file.with_name("draft")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft.replace(file)


def append(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "metrics.jsonl", [{"step": step, "reward": step / 10, "kl": None} for step in range(3)])
    return tmp_path


def steps(answer: Mapping[str, Any]) -> list[int]:
    return [row["step"] for row in answer["rows"]]


def test_a_run_is_listed(folder: Path) -> None:
    (folder / "config.json").write_text('{"program": "train", "run": {"dir": "runs/a"}}')
    listed = {
        "name": folder.name,
        "folder": str(folder),
        "program": "train",
        "finished": False,
        "steps": 3,
        "has_transcripts": False,
        "evaluations": [],
    }
    assert RunView(folder).summary() == listed
    (folder / "result.json").write_text("{}")
    assert RunView(folder).summary() == listed | {"finished": True}


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb\x1b[31m"
    with pytest.raises(ConfigError, match="no such folder") as error:
        RunView(odd)
    assert str(error.value).isprintable()
    odd.mkdir()
    (odd / "config.json").write_text('{"model_type": "qwen3"}')  # of a model's folder
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl, evaluations\.json or settings") as error:
        RunView(odd)
    assert str(error.value).isprintable()
    (odd / "config.json").write_text('{"run": {"dir": "x"}}')  # of a run before its first step
    assert RunView(odd).metrics(-1) == {"rows": [], "finished": False, "start": 0, "records": "- - -"}


def test_a_folder_has_a_name_whatever_it_is_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert RunView(Path(".")).name == folder.name


def test_metrics_after_a_step(folder: Path) -> None:
    run = RunView(folder)
    assert run.metrics(-1) == {
        "rows": [{"step": step, "reward": step / 10, "kl": None} for step in range(3)],
        "finished": False,
        "start": 1,
        "records": "- - -",
    }
    assert steps(run.metrics(1)) == [2] and run.metrics(2)["rows"] == []


def test_the_page_knows_when_evaluations_and_events_are_new(folder: Path) -> None:
    run, known = RunView(folder), set[str]()
    for n, name in enumerate(("evaluations.json", "history.jsonl", "alarms.jsonl", "alarms.jsonl")):
        known.add(run.metrics(-1)["records"])
        append(folder / name, "{}\n")
        assert len(known) == n + 1
    assert run.metrics(-1)["records"] not in known and run.metrics(-1) == run.metrics(-1)


def test_metrics_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "a": NaN, "b": 1e999, "c": "x", "d": true, "e": {}, "f": 2}\n'
        '{"step": -1}\n{"step": true}\n[1]\nx\n'
    )
    assert RunView(tmp_path).metrics(-1)["rows"] == [
        {"step": 0, "a": None, "b": None, "c": None, "d": None, "e": None, "f": 2}
    ]


def test_a_line_that_is_being_written_comes_when_it_is_finished(folder: Path) -> None:
    run, file = RunView(folder), folder / "metrics.jsonl"
    append(file, '{"step": 3, "rew')
    assert steps(run.metrics(1)) == [2]
    append(file, 'ard": 1}')
    assert steps(run.metrics(1)) == [2, 3], "whole, if its line feed is missing"
    append(file, '\n{"step": 4, "reward": 0.5}\n')
    assert run.metrics(2)["rows"] == [{"step": 3, "reward": 1}, {"step": 4, "reward": 0.5}]


def test_only_what_was_appended_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    parse = runs._metrics_row
    monkeypatch.setattr(runs, "_metrics_row", lambda line: read.append(line) or parse(line))
    run = RunView(folder)
    assert len(run.metrics(-1)["rows"]) == len(read) == 3
    append(folder / "metrics.jsonl", '{"step": 3}\n')
    assert len(run.metrics(-1)["rows"]) == len(read) == 4


def test_steps_that_a_resume_repeats_are_gone(folder: Path) -> None:
    run, file = RunView(folder), folder / "metrics.jsonl"
    run.metrics(-1)
    write(file, [{"step": 0, "reward": 0.0}])
    answer = run.metrics(2, 1)
    assert (answer["rows"], answer["finished"], answer["start"]) == ([{"step": 0, "reward": 0.0}], False, 2)
    assert run.metrics(0, 2)["rows"] == []
    append(file, '{"step": 1, "reward": 0.7}\n')
    assert run.metrics(-1)["rows"] == [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 0.7}]
    write(file, [{"step": step, "reward": 0.25} for step in range(9)])
    assert run.metrics(-1)["rows"][1] == {"step": 1, "reward": 0.25}, "another file, if it is longer too"
    file.write_text('{"step": 0, "reward": 0.125}\n')
    assert run.metrics(-1)["rows"] == [{"step": 0, "reward": 0.125}], "cut in its place"
    file.unlink()
    assert (run.metrics(1, 4)["rows"], run.metrics(-1)["start"]) == ([], 5)


def test_a_long_run_comes_in_parts_and_is_finished_with_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST_ROWS", 2)
    (folder / "result.json").write_text("{}")
    first = RunView(folder).metrics(-1)
    assert steps(first) == [0, 1] and not first["finished"]
    last = RunView(folder).metrics(1)
    assert steps(last) == [2] and last["finished"]


def test_a_pipe_in_place_of_a_file_is_not_read(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "evaluations.json").write_text("{}")
    for name in ("metrics.jsonl", "config.json", "history.jsonl", "alarms.jsonl"):
        os.mkfifo(folder / name)
    run = RunView(folder)
    assert run.metrics(-1)["rows"] == [] and run.events() == [] and run.summary()["program"] is None
    with pytest.raises(ConfigError, match="named pipe"):
        run.settings()


def test_a_folder_that_cannot_be_written_is_read(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    folder.chmod(0o500)
    run = RunView(folder)
    assert len(run.metrics(-1)["rows"]) == 3 and run.evaluations() == [] and run.events() == []
    folder.chmod(0o700)
    assert sorted(os.listdir(folder)) == before


def test_evaluations_have_intervals(folder: Path) -> None:
    record = {
        "step": 4, "set": "hard", "tasks": 50, "reward": 0.4, "reward_low": 0.3, "reward_high": None,
        "score/right": 0.5, "score_low/right": 0.4, "score_high/right": 0.6, "score/odd": None,
        "gap/right": -0.1, "missing/right": 2.0, "incomplete": 2.0,
    }  # fmt: skip
    content = {"before": {"step": 0, "score/right": 0.1}, "hard/step_4": record, "bad": {"step": "x"}}
    (folder / "evaluations.json").write_text(json.dumps(content))
    before, hard = RunView(folder).evaluations()
    unknown = {"low": None, "high": None}
    assert before == {
        "name": "before", "step": 0, "set": "", "tasks": None, "missing": {},
        "estimates": {"score/right": {"value": 0.1, **unknown}},
    }  # fmt: skip
    assert hard == {
        "name": "hard/step_4", "step": 4, "set": "hard", "tasks": 50, "missing": {"right": 2.0},
        "estimates": {
            "score/right": {"value": 0.5, "low": 0.4, "high": 0.6},
            "score/odd": {"value": None, **unknown},
            "gap/right": {"value": -0.1, **unknown},
            "reward": {"value": 0.4, "low": 0.3, "high": None},
        },
    }  # fmt: skip


def test_evaluations_that_cannot_be_read_are_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "evaluations.json").write_text('{"before": ')
    with caplog.at_level("WARNING", "megatron_collab"):
        assert RunView(folder).evaluations() == []
    (message,) = caplog.messages
    assert "evaluations.json: cannot be read as JSON" in message


def test_events_are_lines_in_order_of_step(folder: Path) -> None:
    change = {"time": "…", "step": 7, "setting": "optim.lr", "before": 1e-6, "after": 2e-06}
    long = {"step": 9, "setting": "run.wandb_tags", "before": None, "after": ["x\n\x1b[31m\u202e" * 100]}
    write(folder / "history.jsonl", [{"time": "…", "step": 7}, change, long, {"setting": "no step"}])
    alarm = {"step": 8, "sentinel": "questions", "value": 1.23456, "baseline": 0.5, "conversations": ["t-1/0/0"]}
    write(folder / "alarms.jsonl", [alarm, {"step": 3}])
    events = RunView(folder).events()
    assert [(event["step"], event["kind"]) for event in events] == [
        (3, "alarm"),
        (7, "restart"),
        (7, "setting"),
        (8, "alarm"),
        (9, "setting"),
    ]
    assert events[1]["text"] == "restart at step 7"
    assert events[2]["text"] == "optim.lr: 1e-06 → 2e-06"
    assert events[3]["text"] == "sentinel questions: 1.235, baseline 0.5; conversations t-1/0/0"
    assert events[4]["text"].startswith("run.wandb_tags: null → [") and len(events[4]["text"]) < 200
    assert all(event["text"].isprintable() for event in events)


def test_settings_are_those_of_the_file(folder: Path) -> None:
    (folder / "config.json").write_text('{"program": "train", "run": {"dir": "<b>"}}')
    assert RunView(folder).settings() == {"program": "train", "run": {"dir": "<b>"}}
    (folder / "config.json").write_text('{"program": ')
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        RunView(folder).settings()
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        RunView(folder).settings()


def test_the_reward_is_that_of_the_settings(folder: Path) -> None:
    reward = RewardConfig(mode="verl", mode_options={"a": 1}, weights={"accuracy": 1.0, ODD: -5e-4}, malformed=None)
    (folder / "config.json").write_text(json.dumps({"reward": asdict(reward)}))
    names = ("mode", "mode_options", "weights", "clamp", "metrics", "malformed", "malformed_worst")
    assert RunView(folder).reward() == {name: getattr(reward, name) for name in names}
    (folder / "config.json").write_text('{"reward": {"weights": {"bleu": 1}}}')  # of an earlier version
    assert RunView(folder).reward() == {name: getattr(RewardConfig(), name) for name in names} | {
        "weights": {"bleu": 1}
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {}}, "has no reward.weights: this run computed no rewards"),
        ({"weights": [1]}, "reward.weights is no setting"),
        ({"mode": 1}, "reward.mode is no setting"),
        ({"weights": {"a": "1"}}, "reward.weights.a is no number"),
        ({"weights": {"a\n": True}}, "reward.weights.a is no number"),
        ({"weights": {"a": 1}, "clamp": {"a": None}}, "reward.clamp.a is no number"),
        ({"weights": {"a": 1}, "malformed": "-1"}, "reward.malformed is no number"),
    ],
)
def test_settings_of_a_reward_that_are_none_get_one_line(folder: Path, settings: Any, message: str) -> None:
    (folder / "config.json").write_text(json.dumps({"reward": settings}))
    with pytest.raises(ConfigError, match=f"config.json: {message}") as error:
        RunView(folder).reward()
    assert str(error.value).isprintable()


def test_scores_are_what_rewards_are_computed_from(folder: Path) -> None:
    transcripts.write_step(folder, 7, [group("a"), group("b", reward=None)])
    names = ("rollout", "future", "ending", "reward", "scores")
    b, a = RunView(folder).scores([(7, 1), (7, 0)])
    assert (b["step"], b["position"], a["position"]) == (7, 1, 0)
    assert b["rows"] == [{name: future[name] for name in names} for future in group("b", reward=None)]
    with pytest.raises(LookupError):
        RunView(folder).scores([(7, 0), (7, 2)])


def test_futures_are_rows_without_their_conversations(folder: Path) -> None:
    scores = {"right": 0.6, "judged": {"missing": "judge is down"}}
    transcripts.write_step(folder, 7, [group("a", 1, 1), [row("b", 0, 0, reward=None, ending=None, scores=scores)]])
    answer = RunView(folder).futures(selection([("offset", "1")]))
    assert answer == {
        "total": 2, "endings": ["user_done"], "columns": ["reward", "right", "judged"], "evaluations": [],
        "rows": [
            {
                "step": 7, "position": 1, "task": "b", "rollout": 0, "future": 0, "ending": None, "reward": None,
                "scores": {"right": 0.6, "judged": None},
            }
        ],
    }  # fmt: skip


def test_a_group_comes_whole(folder: Path) -> None:
    rows = group("a", goal={"day": "friday"}, private={"1": {"thought": ODD}})
    transcripts.write_step(folder, 7, [group("other"), rows])
    assert RunView(folder).group(7, 1) == {
        "evaluation": "", "step": 7, "position": 1, "has_tokens": False,
        "task": "a", "goal": {"day": "friday"}, "user": None,
        "rows": [{"step": 7, **future} for future in rows],
    }  # fmt: skip
    for step, position in ((7, 2), (8, 0), (10**30, 0)):
        with pytest.raises(LookupError):
            RunView(folder).group(step, position)


def test_transcripts_of_an_earlier_version_are_shown_and_their_torn_line_is_not(folder: Path) -> None:
    file = old_lines(folder, 0, 1)
    run = RunView(folder)
    assert run.summary()["has_transcripts"] and run.futures(selection([]))["total"] == 12
    append(file, '{"step": 2, "task": "torn')
    assert run.futures(selection([]))["total"] == 12
    assert run.group(1, 0)["rows"] == [{"step": 1, **future} for future in group("old-1")]
    assert run.group(1, 0)["goal"] is None


def test_steps_come_and_go_as_the_run_writes_and_resumes(folder: Path) -> None:
    run, steps = RunView(folder), [("sort", "step"), ("descending", "1"), ("limit", "1")]
    assert run.futures(selection([])) == {
        "total": 0,
        "rows": [],
        "endings": [],
        "columns": ["reward"],
        "evaluations": [],
    }
    for step in range(3):
        transcripts.write_step(folder, step, [[row(f"of-{step}")]])
        assert run.futures(selection(steps))["rows"][0]["step"] == step
    transcripts.forget(folder, 1)
    assert run.futures(selection([]))["total"] == 1
    transcripts.write_step(folder, 1, [[row("again")]])
    assert run.group(1, 0)["task"] == "again"


def test_a_run_is_indexed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcripts.write_step(folder, 0, [group()])
    opened: list[Path] = []
    monkeypatch.setattr(runs, "Index", lambda path, *more: opened.append(path) or Index(path, *more))
    run = RunView(folder)
    assert not opened, "the command answers before it has read a large run"
    for _ in range(2):
        assert run.futures(selection([]))["total"] == 6 and len(run.group(0, 0)["rows"]) == 6
    assert opened == [folder]


def test_an_evaluation_is_asked_for_by_its_name(folder: Path) -> None:
    records = {name: {"step": step, "set": "", "tasks": 1} for name, step in (("before", 0), ("../x", 1), ("after", 9))}
    (folder / "evaluations.json").write_text(json.dumps(records))
    transcripts.write(folder / "eval_after.parquet", [group("evaluated", 2, 1)])
    transcripts.write_step(folder, 9, [group("trained")])
    run = RunView(folder)
    assert run.summary()["evaluations"] == ["after"] == run.futures(selection([]))["evaluations"]
    answer = run.futures(selection([("task", "evaluated")]), "after")
    assert [(of["step"], of["position"], of["rollout"]) for of in answer["rows"]] == [(9, 0, 0), (9, 0, 1)]
    assert run.futures(selection([]))["total"] == 6, "those of training are others"
    shown = run.group(9, 0, "after")
    assert (shown["task"], shown["evaluation"], shown["has_tokens"]) == ("evaluated", "after", False)
    assert run.scores([(9, 0)], "after")[0]["rows"][1]["rollout"] == 1
    assert run.group(9, 0)["task"] == "trained"
    for name in ("before", "../x", "none\n"):
        with pytest.raises(LookupError, match="has no conversations of"):
            run.futures(selection([]), name)


def test_a_judge_is_above_the_facts_if_the_run_says_which_metrics_are_which(folder: Path) -> None:
    scores = {"judged": 0.5, "right": 1.0}
    transcripts.write_step(folder, 0, [[row(scores=scores)]])
    kinds = [{"opinions": ["judged"], "ground_truths": ["right"]}, {"opinions": "judged"}, [], {"opinions": [1]}]
    for kind in kinds:
        (folder / metric_kinds.FILE).write_text(json.dumps(kind))
        above = [name for name in RunView(folder).futures(selection([]))["columns"] if "above" in name]
        assert above == (["judged above right"] if kind is kinds[0] else [])


def test_tokens_are_there_if_they_were_recorded(folder: Path) -> None:
    transcripts.write_step(folder, 1, [group("a")])
    run = RunView(folder)
    assert not run.group(1, 0)["has_tokens"]
    tokens.write(folder, 1, [learned(0, 0), learned(0, 1, pieces=["b", "c"])])
    assert run.group(1, 0)["has_tokens"]
    assert [turn["pieces"] for turn in run.tokens(1, 0, 1)] == [["b", "c"]]
    for place in ((1, 0, 2), (2, 0, 0)):
        with pytest.raises(LookupError, match="has no tokens of rollout"):
            run.tokens(*place)
