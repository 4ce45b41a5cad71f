"""Simulated users can be told from real ones by what is planted, and not at all where both are drawn alike."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from string import ascii_lowercase

import pytest

from megatron_collab.commands.__main__ import run
from megatron_collab.config import Config, recorded
from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.data.personal import PersonalData
from megatron_collab.observability.folder import append, rows_of
from megatron_collab.rollout.users.realism import Spoken, compare, shown, simulated
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Message, Reward, Rollout, Task, Turn

STOP = "[[TERMINATE CHAT]]"
WORDS = ["i", "want", "the", "blue", "table", "for", "our", "room", "on", "friday", "but", "not", "so", "large", "and"]


def says(draw: random.Random) -> str:
    """A message of some words, which may begin with a capital and end with a mark."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(3, 15)))
    return (text.capitalize() if draw.random() < 0.5 else text) + draw.choice(["", ".", "?", "!"])


def spoken(seed: int, people: int = 60, end: str = "") -> list[Spoken]:
    draw = random.Random(seed)
    found = []
    for person in range(people):
        said = [says(draw) + end for _ in range(draw.randint(2, 4))]
        found.append(Spoken(str(person), (said[0],), tuple(said[1:]), len(said)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_those_drawn_alike_cannot_be_told_apart(seed: int) -> None:
    found = compare(spoken(seed), spoken(seed + 100), seed)
    low, high = found["interval"]
    assert low < 0.5 < high and 0.05 < high - low < 0.25, found["interval"]
    assert compare(spoken(seed), spoken(seed + 100), seed) == found


@pytest.mark.parametrize(
    ("end", "feature"), [(" please", "says please"), (" Thanks", "thanks"), ("\n- now", "has a list or markdown")]
)
def test_what_is_planted_tells_them_apart_and_is_named(end: str, feature: str) -> None:
    found = compare(spoken(0), spoken(100, people=20, end=end), 0)
    low, _ = found["interval"]
    assert found["accuracy"] > 0.95 and low > 0.9, "however few there are of one side"
    named = {each["feature"]: each for each in found["features"]}
    assert named[feature]["simulated"] == 1 and named[feature]["real"] == 0 and named[feature]["weight"] > 0
    assert found["messages"][0] > 2 * found["messages"][1]


@pytest.mark.parametrize("seed", range(2))
def test_what_was_replaced_on_one_side_alone_tells_nothing(seed: int) -> None:
    """As a name that the describing model has listed, and the log still holds."""
    real, placeholders = spoken(seed, end=" _"), spoken(seed + 100, end=" <PERSON_1>")
    low, high = compare(real, placeholders, seed)["interval"]
    assert low < 0.5 < high


def test_nobody_is_recognised_by_another_message_of_theirs() -> None:
    """Each person has a word of their own; the sides have none."""

    def own(side: str) -> list[Spoken]:
        draw = random.Random(side)
        words = ["".join(draw.choices(ascii_lowercase, k=6)) for _ in range(10)]
        return [Spoken(word, (), tuple(f"{says(draw)} {word}" for _ in range(6)), 6) for word in words]

    assert compare(own("a"), own("b"), 0)["accuracy"] < 0.65


def test_rates_stand_side_by_side() -> None:
    real = [Spoken(f"{at}", ("Hi, what is it?",), ("no", "never mind, I do it myself"), 3) for at in range(6)]
    others = [Spoken(f"{at}", (), ("Thank you for the very helpful answer",), 2) for at in range(6)]
    found = compare(real, others, 0)
    assert found["rates"] == {
        "conversations": [6, 6],
        "messages of the user": [3, 2],
        "openings: words": [4, None],
        "openings: with a question": [1, None],
        "openings: with a greeting": [1, None],
        "later messages: words": [3.5, 7],
        "later messages: words, median": [3.5, 7],
        "later messages: with a question": [0, 0],
        "conversations given up": [1, 0],
    }
    assert found["messages"] == [12, 6], "the log's openings are not compared where the run has none"
    lines = shown(found).splitlines()
    assert lines[0].startswith("told apart with accuracy 1.000 (95 % 1.000 to 1.000; by chance 0.5), 12 messages")
    assert lines[5].split() == ["openings:", "words", "4.00", "-"]


def play(task: Task, *futures: tuple[str, ...]) -> Group:
    """A rollout in which the user says each of these, after a trained turn."""
    found = []
    for said in futures:
        conversation = Conversation(task.messages, ()).add_turn(Turn((), (), (), (), Finish.STOP, "ok"))
        for text in said:
            conversation = conversation.add_messages([Message("user", text)], ())
            conversation = conversation.add_turn(Turn((), (), (), (), Finish.STOP, "ok"))
        found.append(Future(conversation.end(Ending.USER_DONE), {}))
    return Group(task, (Rollout(found[0].conversation, tuple(found), Reward(0.0)),))


def test_what_the_task_gives_is_not_simulated() -> None:
    given = Task("a", (Message("user", "hello"),), "goal", "", "")
    unopened = Task("b", (), "goal", "", "")
    groups = [
        play(given, ("more", f"thanks {STOP}"), (STOP,), ("mail a@x.org",)),
        play(unopened.play_on(Message("user", "good day")), ("more",), ("less",)),
    ]
    assert [asdict(one) for one in simulated(groups, STOP, PersonalData())] == [
        {"group": "a", "opening": (), "following": ("more", "thanks"), "turns": 3},
        {"group": "a", "opening": (), "following": (), "turns": 1},
        {"group": "a", "opening": (), "following": ("mail <EMAIL_1>",), "turns": 2},
        {"group": "b", "opening": ("good day",), "following": ("more",), "turns": 2},
        {"group": "b", "opening": (), "following": ("less",), "turns": 2},
    ]


def test_a_run_is_compared_with_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of the page."""
    monkeypatch.chdir(tmp_path)
    draw, config = random.Random(0), Config()
    folder = tmp_path / "runs/support"
    folder.mkdir(parents=True)
    config.run.dir, config.data.train, config.model.path = str(folder), str(folder / "tasks.jsonl"), "none"
    tasks = [Task(str(number), (Message("user", says(draw)),), "goal", "", "") for number in range(20)]
    groups = [play(task, *[(f"{says(draw)} please", STOP) for _ in range(3)]) for task in tasks]
    write_jsonl(folder / "tasks.jsonl", [task_row(task) for task in tasks])
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    append(folder / "transcripts.jsonl", [{"step": 3, **row} for row in rows_of(groups)])
    log = [
        {
            "user_id": f"person {at}",
            "messages": [
                {"role": role, "content": f"{says(draw)} from {at}@example.org"}
                for role in ("user", "assistant", "user", "assistant", "user")
            ],
        }
        for at in range(20)
    ]
    write_jsonl(tmp_path / "log.jsonl", log)
    page = (Path(__file__).resolve().parents[3] / "docs/howto/users-from-logs.md").read_text()
    (command,) = [line for line in page.splitlines() if "--realism runs/support" in line]
    assert run("users-from-logs", [*command.split()[2:], "--out", "realism.json"]) == 0
    shown = capsys.readouterr().out
    assert "log.jsonl: 20 rows, 20 conversations of 20 people by user_id" in shown and "runs/support, step 3" in shown
    found = json.loads(Path("realism.json").read_text())
    assert found["interval"][0] > 0.9 and found["messages"] == [40, 60]
    assert found["features"][0]["feature"] == "says please"
    assert run("users-from-logs", ["log.jsonl", "--realism", "runs/support", "--step", "9"]) == 2
    assert "--step=9: runs/support/transcripts.jsonl has none; its last one is 3" in capsys.readouterr().err
    write_jsonl(tmp_path / "log.jsonl", log[:4])
    assert run("users-from-logs", ["log.jsonl", "--realism", "runs/support"]) == 2
    assert "the log has messages of 4 people to compare; there must be at least 5" in capsys.readouterr().err
