"""What `megatron-collab recording` shows, merges and scrubs, on recordings whose contents are known."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megatron_collab.commands.__main__ import run
from megatron_collab.llm import recording
from megatron_collab.llm.recording import SUFFIX, Call, CallKey, Recording, Shard, Usage
from megatron_collab.runtime import console

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
        (["show", "CALLS", "--calls", "-1"], "--calls=-1: must be 0 or more"),
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


CALL: dict[str, Any] = {
    "name": "a",
    "number": 0,
    "time": 1.0,
    "question": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "answer": {"said": "yes"},
    "failed": None,
    "taken": {},
}
ESCAPES = {
    "name": "\x1b[31mred",
    "question": {"model": "\x1b]0;title\x07", "messages": [{"role": "\x1b[2J", "content": "\x9b2J\u202e"}]},
    "answer": {"\x1b[1m": "\x1b[2m"},
    "taken": {"version": "\x1b[5mv\r"},
}
READABLE: dict[str, dict[str, Any]] = {
    "escapes": ESCAPES,
    "failure": {"answer": None, "failed": ["\x1b[1m", "\x1b[2m"]},
    "surrogates": {"name": "\ud83d", "question": {"model": "\ud800", "messages": [{"content": "\udfff"}]}},
    "lines": {"name": "a\nmegatron-collab: b", "question": {"model": "m\rn"}},
    "other question": {"question": {"model": "m", "pairs": [1]}},
    "unknown price": {"taken": {"usd": None}},
}
DAMAGED: dict[str, Any] = {
    "no model": {"question": {}},
    "question": {"question": []},
    "messages": {"question": {"model": "m", "messages": ["x"]}},
    "one message": {"question": {"model": "m", "messages": "x"}},
    "model": {"question": {"model": ["m"], "messages": []}},
    "usd": {"taken": {"usd": "x"}},
    "seconds": {"taken": {"seconds": float("nan")}},
    "null seconds": {"taken": {"seconds": None}},
    "tokens": {"taken": {"prompt_tokens": 10**400}},
    "negative": {"taken": {"answer_tokens": -1}},
    "version": {"taken": {"version": [1]}},
    "usage": {"taken": []},
    "other usage": {"taken": {"\x1b[1m": 1}},
    "time": {"time": 1e300},
    "early": {"time": -1e13},
    "text as time": {"time": "\x1b[1m"},
    "number": {"number": "x"},
    "failed": {"failed": 5},
    "other field": {"\x1b[1m": 1},
}


def foreign(folder: Path, call: bytes, header: bytes = b'{"format": 1, "run": "\\u001b[31mr"}\n') -> str:
    """A shard with one call of this content, whose checksums are right."""
    folder.mkdir()
    content = zstandard.ZstdCompressor(write_checksum=True).compress(call)
    head = recording._HEAD.pack(len(content), 1.0, b"k" * 16, b"d" * 16, b"n" * 16)
    (folder / f"x{SUFFIX}").write_bytes(header + head + recording._CRC.pack(zlib.crc32(head)) + content)
    return str(folder)


def runs(folder: str, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    """Exit code and output of each command."""
    outcomes = []
    for command in (["show", "--calls", "9"], ["merge", "--out", f"{folder}-1"], ["scrub", "--out", f"{folder}-2"]):
        console.begin()
        code = run("recording", [command[0], folder, *command[1:]])
        captured = capsys.readouterr()
        assert not {"\x1b", "\x9b", "\r", "\x07"} & {*captured.out, *captured.err}
        outcomes.append((code, captured.out + captured.err))
    return outcomes


@pytest.mark.parametrize("changes", READABLE.values(), ids=READABLE.keys())
def test_nothing_of_a_recording_reaches_the_terminal_as_it_is(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = runs(foreign(tmp_path / "x", json.dumps({**CALL, **changes}).encode()), capsys)
    assert [code for code, _ in outcomes] == [0, 0, 0]
    assert "1 calls of \\x1b[31mr in 1 shards" in outcomes[0][1] and "\nmegatron-collab:" not in outcomes[0][1]


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_call_with_other_contents_is_refused_in_a_line(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, output in runs(foreign(tmp_path / "x", json.dumps({**CALL, **changes}).encode()), capsys):
        assert (code, output.count("\n")) == (2, 1)
        assert output.startswith("megatron-collab: a recorded call is damaged: ")


@pytest.mark.parametrize(
    ("call", "header", "reason"),
    [
        (b"[]", b'{"format": 1, "run": "r"}\n', "a recorded call is damaged"),
        (b"[" * 100_000, b'{"format": 1, "run": "r"}\n', "a recorded call is damaged"),
        (b"{}", b'{"format": "\\u001b[1m", "run": "r"}\n', r"has format \x1b[1m, but this version reads 1"),
        (b"{}", b"hello\n", "not a shard of a recording"),
        (b"{}", b"[" * 4000 + b"\n", "not a shard of a recording"),
        (b"{}", b"[" * 5000, "not a shard of a recording"),
        (b"{}", b"[]\n", "not a shard of a recording"),
        (b"{}", b"\xff\xfe\n", "not a shard of a recording"),
    ],
    ids=["list", "deep", "format", "text", "deep header", "long header", "header", "bytes"],
)
def test_a_file_that_is_no_shard_is_refused_in_a_line(
    call: bytes, header: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code, output in runs(foreign(tmp_path / "x", call, header), capsys):
        assert (code, output.count("\n")) == (2, 1) and reason in output


def test_a_pipe_is_no_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x" / f"x{SUFFIX}")
    for code, output in runs(str(tmp_path / "x"), capsys):
        assert (code, output.count("\n")) == (2, 1) and "is a named pipe, not a file" in output
