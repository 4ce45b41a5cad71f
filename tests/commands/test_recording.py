"""What `megatron-collab recording` shows, merges and scrubs, on recordings whose contents are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.llm.recording import SUFFIX, Call, CallKey, Recording, Shard, Usage

USER = {"model": "openai/user", "messages": [{"role": "user", "content": "I am Ann, ann@example.org."}], "sample": None}
JUDGE = {"model": "openai/judge", "messages": [{"role": "user", "content": "How good?"}], "sample": "0"}


def write(folder: Path, *calls: tuple[str, dict[str, Any], Any, float], name: str = "runs/a") -> Path:
    """A recording of calls of conversations, with the seconds that each took."""
    shard = Shard(folder, name)
    for time, (conversation, question, answer, seconds) in enumerate(calls):
        failed = ("LlmError", answer) if isinstance(answer, str) else None
        key = CallKey(conversation, 0, question, question["sample"] is not None)
        usage = Usage(100, 20, 0.5, seconds, 1, "m-2026")
        shard.record(key, Call(conversation, 0, time, question, None if failed else answer, failed, usage))
    return folder


def test_it_shows_calls_price_latency_and_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = [(f"t/{number}/0", USER, {"said": "yes"}, number / 100) for number in range(1, 101)]
    folder = write(tmp_path, *timed, ("t/1/0", JUDGE, "openai/judge: no", 3.0))
    assert run("recording", ["show", str(folder), "--calls", "1"]) == 0
    printed = capsys.readouterr().out
    shown, _, summary = printed.partition("\n\n")
    assert shown.splitlines() == [
        "t/1/0 calls openai/user:",
        "  user: I am Ann, ann@example.org.",
        "  -> {'said': 'yes'}",
    ]
    assert summary.splitlines() == [
        "101 calls of runs/a in 1 shards; 0 superseded",
        "",
        "openai/judge: from 1970-01-01 00:01:40 to 1970-01-01 00:01:40 UTC",
        "  calls     1: 0 cached, 1 failed (LlmError 1)",
        "  requests  1",
        "  tokens    100 of prompts, 20 of answers",
        "  price     0.5000 USD",
        "  seconds   p50 3.000, p90 3.000, p99 3.000, longest 3.000",
        "  versions  m-2026",
        "",
        "openai/user: from 1970-01-01 00:00:00 to 1970-01-01 00:01:39 UTC",
        "  calls     100: 0 cached, 0 failed",
        "  requests  100",
        "  tokens    10000 of prompts, 2000 of answers",
        "  price     50.0000 USD",
        "  seconds   p50 0.500, p90 0.900, p99 0.990, longest 1.000",
        "  versions  m-2026",
    ]


def test_several_are_merged_and_of_the_same_call_the_latest_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "one", ("a", USER, {"said": "first"}, 1.0), ("b", USER, {"said": "b"}, 1.0))
    second = write(tmp_path / "two", *[("c", USER, {"said": "c"}, 1.0)] * 2, ("a", USER, {"said": "last"}, 1.0))
    torn = next(first.glob(f"*{SUFFIX}"))
    with torn.open("ab") as file:
        file.write(b"half a call")
    assert run("recording", ["merge", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"{torn}: ends in the middle of a call; complete calls: 2" in printed
    assert "3 calls; 2 superseded ones left out" in printed
    merged = Recording(tmp_path / "out")
    assert merged.runs == {"runs/a"} and not merged.torn
    calls = {name: merged.find(CallKey(name, 0, USER)) for name in ("a", "b", "c")}
    assert {name: call and call.answer["said"] for name, call in calls.items()} == {"a": "last", "b": "b", "c": "c"}


def test_scrubbed_calls_are_found_by_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "nobody-knows-this")
    calls = write(
        tmp_path / "calls",
        ("a", USER, {"thought": "She is Ann.", "said": "Ann, nobody-knows-this"}, 1.0),
        ("b", USER, "refused to Ann", 1.0),
    )
    arguments = ["scrub", str(calls), "--out", str(tmp_path / "out"), "--pattern", r"\bAnn\b", "--pattern", r"\S+@\S+"]
    assert run("recording", [*arguments, "--field", "thought"]) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary == (
        "removed by field: content 2, failed 1, said 1, thought 1; 1 answers changed; a replay gives the new ones"
    )
    (file,) = (tmp_path / "out").glob(f"*{SUFFIX}")
    first = Recording(tmp_path / "out").find(CallKey("a", 0, USER))
    second = Recording(tmp_path / "out").find(CallKey("b", 0, USER))
    assert first and second and "Ann" not in f"{first}{second}" and file.stat().st_mode & 0o077 == 0
    assert first.answer == {"thought": "***", "said": "***, ***"}
    assert first.question["messages"][0]["content"] == "I am ***, ***"
    assert second.failed == ("LlmError", "refused to ***")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "NONE"], "NONE: holds no recorded calls (*.calls)"),
        (["merge", "CALLS"], "merge: give the folder to write as --out=FOLDER"),
        (["merge", "CALLS", "--out", "CALLS"], "--out=CALLS: is not empty; give a new one"),
        (["scrub", "CALLS", "--out", "OUT", "--pattern", "("], "--pattern=(: is not a regular expression (missing ), "),
        (["show", "CALLS", "--calls", "many"], "argument --calls: invalid int value: 'many'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("CALLS"), ("a", USER, {"said": "yes"}, 1.0))
    try:
        code = run("recording", arguments)
    except SystemExit as ended:
        code = int(str(ended.code))
    printed = capsys.readouterr().err
    assert code == 2 and printed.count("\n") == 1
    assert printed.startswith(f"megatron-collab: {message}")
