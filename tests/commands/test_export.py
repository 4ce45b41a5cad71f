"""`megatron-collab export` writes the lines that earlier versions wrote themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.commands.__main__ import run as command
from megatron_collab.data.examples import load_pairs
from megatron_collab.data.sources import Source
from megatron_collab.observability import evaluations, ratings, transcripts
from megatron_collab.observability.ratings import RatedSide, Rating
from tests.observability.test_transcripts import ODD, group, old_lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 0 (of an earlier version) and 1, and an evaluation."""
    folder = tmp_path / "run"
    folder.mkdir()
    old_lines(folder, 0)
    transcripts.write_step(folder, 1, [group(ODD, text=ODD), group("b")])
    transcripts.write(folder / "eval_math_after.parquet", [group("m", 1, 1)])
    (folder / "evaluations.json").write_text(json.dumps({"math/after": {"step": 2, "set": "math"}}))
    return folder


def lines_of(*groups: list[dict], **first: int) -> list[str]:
    return [json.dumps({**first, **future}) for rows in groups for future in rows]


def test_lines_are_those_of_earlier_versions(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = [lines_of(group("old-0"), step=0), lines_of(group(ODD, text=ODD), group("b"), step=1)]
    assert command("export", [str(run), "--jsonl"]) == 0
    assert capfd.readouterr().out.split("\n") == [*steps[0], *steps[1], ""]
    out = tmp_path / "new" / "out.jsonl"
    assert command("export", [str(run), "--step", "1", "--out", str(out)]) == 0
    assert out.read_text().split("\n") == [*steps[1], ""] and capfd.readouterr().out == ""
    assert command("export", [str(run), "--evaluation", "math/after"]) == 0
    assert capfd.readouterr().out.split("\n") == [*lines_of(group("m", 1, 1)), ""]
    old_run = tmp_path / "again"
    old_run.mkdir()
    out.rename(old_run / "transcripts.jsonl")
    assert [*transcripts.run_rows(old_run)] == [*transcripts.run_rows(run, 1)], "it can be read as an old run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "has no transcripts of step 7; give the folder of a run"),
        (["--step", "1", "--evaluation", "math/after"], "--step, --evaluation and --ratings: give one of them"),
        (["--evaluation", "before"], "evaluations.json; it has math/after"),
        (["--out", "/dev/null/x.jsonl"], "--out=/dev/null/x.jsonl: cannot be used"),
        (["--out", "/dev/null"], "--out=/dev/null: is a device, not a file"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command("export", [str(run), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_damaged_transcripts_leave_no_part_of_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transcripts.write_step(run, 2, [group()])
    transcripts.step_file(run, 2).write_bytes(b"PAR1")
    assert command("export", [str(run), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "step_000002.parquet: cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert command("export", [str(tmp_path), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "has no transcripts of futures" in capsys.readouterr().err


@pytest.mark.processes
def test_a_reader_may_stop_reading(run: Path) -> None:
    transcripts.write_step(run, 3, [group(text="x" * 100_000)])
    program = [sys.executable, "-m", "megatron_collab.commands", "export", str(run)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["step"] == 0
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.processes
def test_a_full_disk_is_a_failure(run: Path) -> None:
    program = [sys.executable, "-m", "megatron_collab.commands", "export", str(run)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr


def evaluated(run: Path, name: str, *conversations: list[str], path: str = ".", **more: list[Any]) -> list[RatedSide]:
    """Write an evaluation: for each task its messages, user and assistant in turn. Its conversations as rated sides.

    `more`: by column, its value for each task.
    """
    run.mkdir(exist_ok=True, parents=True)
    rows = list[dict[str, Any]]()
    for at, texts in enumerate(conversations):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        columns = {column: values[at] for column, values in more.items()}
        rows.append({"task": f"t{at}", "rollout": 0, "messages": messages, "scores": {}, **columns})
    transcripts.write(evaluations.file_of(run, name), [[row] for row in rows])
    return [RatedSide(path, name, ratings.digest(row["messages"])) for row in rows]


def rate(run: Path, task: int, sides: tuple[RatedSide, RatedSide], **verdicts: str) -> None:
    for rater, verdict in verdicts.items():
        ratings.append(run, Rating(f"2026-01-0{len(ratings.read(run)) + 1}", rater, f"t{task}", sides, "left", verdict))


def test_ratings_become_pairs_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two runs; with a conversation that ends with the user, and one that begins otherwise on both sides."""
    run = tmp_path / "run"
    texts = ["good", "thanks"], ["a", "r", "b"], ["x"], ["y"], ["z"]
    good = evaluated(run, "after", *([f"{'other ' * (at == 3)}q", *of] for at, of in enumerate(texts)))
    poor_texts = ["poor"], ["a", "s", "c"], ["y"], ["y"], ["y"]
    poor = evaluated(tmp_path / "other", "x", *(["q", *of] for of in poor_texts), path="../other")
    sides = [*zip(poor, good, strict=True)]
    rate(run, 0, sides[0], Ada="right", Bo="tie", Cy="right", Di="left")
    rate(run, 1, sides[1][::-1], Ada="right")
    rate(run, 2, sides[2], Ada="right", Bo="left")  # nobody knows
    rate(run, 3, sides[3], Ada="left")  # no common message
    rate(run, 4, sides[4], Ada="skip")
    out = tmp_path / "pairs.jsonl"
    assert command("export", [str(run), "--ratings", "--out", str(out)]) == 0
    assert "1 rated pairs cannot be trained on: 1 whose chosen and rejected" in capsys.readouterr().err
    loaded = [*load_pairs(Source(source=str(out)), "data.train")]
    contents = [[[message.content for message in side] for side in pair[:3]] for pair in loaded]
    assert contents == [[["q"], ["good"], ["poor"]], [["q"], ["a", "s", "c"], ["a", "r", "b"]]]


def test_a_cut_or_malformed_conversation_is_not_trained_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the better one; as the other one it does no harm."""
    run = tmp_path / "run"
    texts = [["q", f"reply {at}"] for at in range(4)]
    cut, endings = [[0], [], [], [0]], ["turn_limit", "malformed", "turn_limit", "turn_limit"]
    after = evaluated(run, "after", *texts, cut=cut, ending=endings)
    before = evaluated(run, "before", *(["q", "other"] for _ in texts))
    for task, verdict in enumerate(["right", "right", "right", "left"]):
        rate(run, task, (before[task], after[task]), Ada=verdict)
    assert command("export", [str(run), "--ratings"]) == 0
    printed = capfd.readouterr()
    assert [json.loads(line)["task"] for line in printed.out.splitlines()] == ["t2", "t3"]
    assert "2 rated pairs cannot be trained on: 2 whose better conversation was cut" in printed.err


def test_an_outdated_rating_does_not_block_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    before, after = (evaluated(run, name, *(["q", f"{name} {at}"] for at in range(2))) for name in ("before", "after"))
    for task in range(2):
        rate(run, task, (before[task], after[task]), Ada="right")
    lost = RatedSide("../lost", "after", after[1].digest), RatedSide("nul\0", "after", after[1].digest)
    for side in lost:
        rate(run, 1, (before[1], side), Ada="right")
    evaluated(run, "after", ["q", "again"], ["q", "after 1"])
    assert command("export", [str(run), "--ratings"]) == 0
    printed = capfd.readouterr()
    assert [json.loads(line)["task"] for line in printed.out.splitlines()] == ["t1"]
    assert "2 rated pairs cannot be trained on: 1 rated before after of . was replaced or moved" in printed.err
    assert "1 rated before after of ../lost was" in printed.err


def test_runs_with_the_same_folder_name_are_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, other = tmp_path / "b" / "run", tmp_path / "a" / "run"
    good = evaluated(run, "after", ["q", "good"])
    poor = evaluated(other, "after", ["q", "poor"], path=ratings.path_of(other, run))
    assert (good[0].run, poor[0].run) == (".", "../../a/run")
    rate(run, 0, (poor[0], good[0]), Ada="right")
    link = tmp_path / "link"
    link.symlink_to(run)
    for folder in (run, link):
        assert command("export", [str(folder), "--ratings"]) == 0
        row = json.loads(capfd.readouterr().out)
        assert [row[side][-1]["content"] for side in ("chosen", "rejected")] == ["good", "poor"]


def test_ratings_of_other_conversations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    sides = tuple(evaluated(run, name, ["q", name])[0] for name in ("before", "after"))
    assert command("export", [str(run), "--ratings"]) == 2
    assert "has no ratings from which a pair can be made" in capsys.readouterr().err
    rate(run, 0, (sides[0], sides[1]), Ada="right")
    assert command("export", [str(run), "--ratings", "--step", "1"]) == 2
    assert "--step, --evaluation and --ratings: give one of them" in capsys.readouterr().err
    evaluated(run, "after", ["q", "again"])
    assert command("export", [str(run), "--ratings"]) == 2
    error = capsys.readouterr().err
    assert "1 rated before after of . was replaced or moved" in error and error.count("\n") == 1
