"""How conversations of a log are read, and which of them are duplicates."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.rows import open_rows
from megatron_collab.data.sources import Source
from megatron_collab.user_logs.logs import LoggedConversation, distinct, read_log
from megatron_collab.user_logs.personal import PersonalData


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant, alternating."""
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


def read(folder: Path, rows: list[Any], person: str | None = None) -> tuple[list[LoggedConversation], Counter[str]]:
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dropped = Counter[str]()
    return read_log(open_rows(Source(source=str(file)), "LOG"), PersonalData(), person, dropped), dropped


def test_only_messages_of_user_and_assistant_count(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    begun = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "How can I help?"}]
    answered = [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "42."}]
    rows = [
        {"messages": [*begun, *turns("hi")[:1], *turns("a table")[:1], called, *answered, *turns("thanks")[:1]]},
        {"conversations": [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "that"}]},
        {"conversation": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
        {"messages": begun},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": []},
    ]
    logged, dropped = read(tmp_path, rows)
    roles = [[message.role for message in entry.messages] for entry in logged]
    assert roles == [["assistant", "user", "user", "assistant", "user"], ["user", "assistant"], ["user"]]
    assert logged[0].opening == ["hi", "a table"] and logged[0].user_texts == ["hi", "a table", "thanks"]
    assert [entry.opening for entry in logged[1:]] == [["what?"], ["in parts"]]
    assert dropped == {"without a message of the user": 2, "with content that is no text": 1}
    assert len({entry.name for entry in logged}) == len({entry.person for entry in logged}) == 3


def test_the_column_names_the_person_and_texts_do_not(tmp_path: Path) -> None:
    rows = [
        {"who": person, "messages": turns(f"I am {person}, {at}")}
        for at, person in enumerate(["blue77", "blue77", 7, None, None])
    ]
    logged, _ = read(tmp_path, rows, "who")
    assert [entry.person for entry in logged[:3]] == ["blue77", "blue77", "7"] and len(
        {entry.person for entry in logged}
    ) == 4
    assert [entry.user_texts[0] for entry in logged[:3]] == ["I am <PERSON_1>, 0", "I am <PERSON_1>, 1", "I am 7, 2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"messages": turns("hi")}, {"text": "hi"}],
            "row 2: no messages; give a list of messages {role, content}, or",
        ),
        ([{"messages": "hi"}], "row 1: messages is not a list of messages {role, content}"),
        ([{"messages": [{"role": "boss", "content": "hi"}]}], "row 1: messages has a message of role 'boss'"),
        ([{"conversations": [{"from": "me", "value": "hi"}]}], "row 1: conversations has a message of role 'me'"),
        # What is personal is not in the message either, also if another part of the row introduces it.
        (
            [{"messages": [{"role": "ann@example.org", "content": "hi"}]}],
            "row 1: messages has a message of role '<EMAIL_1>'",
        ),
        (
            [{"messages": [*turns("my name is Ann Meyer"), {"role": "Meyer", "content": "hi"}]}],
            "row 1: messages has a message of role '<PERSON_1>'",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(tmp_path, rows)
    assert str(refused.value).startswith(f"LOG={tmp_path / 'log.jsonl'} {message}")


def test_duplicates_are_left_out_exactly(tmp_path: Path) -> None:
    """A word of twenty-one is a near duplicate (17 of 21 runs of three words), one of thirteen is not (8 of 14)."""
    long = (
        "please help me to plan a birthday party for twelve children in our garden with games and a small cake tomorrow"
    )
    short = "I want a table for two on friday evening please"
    rows = [
        {"messages": turns(short, "when?", "at eight")},
        {"messages": turns(short, "when?", "at eight", "done", "thanks")},  # the first as it went on
        {
            "messages": turns(f"{short.upper()}!", "what time?", "At eight.", "ok", "Thanks")
        },  # the same, answered otherwise
        {"messages": turns(short.replace("two", "six"), "when?", "at eight", "done", "thanks")},
        {"messages": turns(long)},
        {"messages": turns(f"{long} then")},
        {"messages": turns(long.replace("cake", "fire"))},
        {"messages": turns("mail me at a@x.org")},
        {"messages": turns("mail me at b@x.org")},
    ]
    logged, _ = read(tmp_path, rows)
    dropped = Counter[str]()
    kept = distinct(logged, dropped)
    assert [logged.index(entry) for entry in kept] == [1, 3, 4, 7]
    assert {reason[:28]: count for reason, count in dropped.items()} == {
        "that were logged again as th": 1,
        "whose user says the same as ": 2,
        "whose user says nearly the s": 2,
    }
