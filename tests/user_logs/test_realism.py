"""Simulated users are told apart from real ones by a planted feature, and not at all if both are drawn alike."""

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
from megatron_collab.observability import transcripts
from megatron_collab.observability.folder import rows_of
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Message, Reward, Rollout, Task, Turn
from megatron_collab.user_logs.personal import PersonalData
from megatron_collab.user_logs.realism import UserMessages, compare, comparison_text, run_messages

STOP = "[[TERMINATE CHAT]]"
WORDS = ["i", "want", "the", "blue", "table", "for", "our", "room", "on", "friday", "but", "not", "so", "large", "and"]


def says(draw: random.Random) -> str:
    """A message of some words, which may begin with a capital and end with a punctuation mark."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(3, 15)))
    return (text.capitalize() if draw.random() < 0.5 else text) + draw.choice(["", ".", "?", "!"])


def spoken(seed: int, people: int = 60, end: str = "") -> list[UserMessages]:
    draw = random.Random(seed)
    speakers = []
    for person in range(people):
        texts = [says(draw) + end for _ in range(draw.randint(2, 4))]
        speakers.append(UserMessages(str(person), (texts[0],), tuple(texts[1:]), len(texts)))
    return speakers


@pytest.mark.parametrize("seed", range(4))
def test_users_drawn_alike_cannot_be_told_apart(seed: int) -> None:
    comparison = compare(spoken(seed), spoken(seed + 100), seed)
    low, high = comparison["interval"]
    assert low < 0.5 < high and 0.05 < high - low < 0.25, comparison["interval"]
    assert compare(spoken(seed), spoken(seed + 100), seed) == comparison


@pytest.mark.parametrize(
    ("end", "feature"), [(" please", "says please"), (" Thanks", "thanks"), ("\n- now", "has a list or markdown")]
)
def test_a_planted_feature_tells_users_apart_and_is_named(end: str, feature: str) -> None:
    comparison = compare(spoken(0), spoken(100, people=20, end=end), 0)
    low, high = comparison["interval"]
    assert comparison["accuracy"] > 0.95 and low > 0.9, "also with few people on one side"
    assert low < high == 1.0, "no error in so many messages is no certainty"
    named = {row["feature"]: row for row in comparison["features"]}
    assert named[feature]["simulated"] == 1 and named[feature]["real"] == 0 and named[feature]["weight"] > 0
    assert comparison["messages"][0] > 2 * comparison["messages"][1]


@pytest.mark.parametrize("seed", range(2))
def test_a_placeholder_on_only_one_side_tells_nothing(seed: int) -> None:
    """For example a name that was replaced in the run, and not in the log."""
    real, placeholders = spoken(seed, end=" _"), spoken(seed + 100, end=" <PERSON_1>")
    low, high = compare(real, placeholders, seed)["interval"]
    assert low < 0.5 < high


def test_a_person_is_not_recognized_by_another_message_of_the_same_person() -> None:
    """Each person has a word that nobody else uses; the two sides share all other words."""

    def people_of(side: str) -> list[UserMessages]:
        draw = random.Random(side)
        words = ["".join(draw.choices(ascii_lowercase, k=6)) for _ in range(10)]
        return [UserMessages(word, (), tuple(f"{says(draw)} {word}" for _ in range(6)), 6) for word in words]

    assert compare(people_of("a"), people_of("b"), 0)["accuracy"] < 0.65


def test_rates_of_both_sides_are_compared() -> None:
    real = [UserMessages(f"{at}", ("Hi, what is it?",), ("no", "never mind, I do it myself"), 3) for at in range(6)]
    simulated = [UserMessages(f"{at}", (), ("Thank you for the very helpful answer",), 2) for at in range(6)]
    comparison = compare(real, simulated, 0)
    assert comparison["rates"] == {
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
    assert comparison["messages"] == [12, 6], "the log's openings are not compared if the run has none"
    lines = comparison_text(comparison).splitlines()
    assert lines[0].startswith("distinguished with accuracy 1.000 (95 % 0.724 to 1.000; by chance 0.5), 12 messages")
    assert lines[5].split() == ["openings:", "words", "4.00", "-"]


def play(task: Task, *futures: tuple[str, ...]) -> Group:
    """A rollout whose futures have these messages of the user after the trained turn."""
    played_futures = []
    for texts in futures:
        conversation = Conversation(task.messages, ()).add_turn(Turn((), (), (), (), Finish.STOP, "ok"))
        for text in texts:
            conversation = conversation.add_messages([Message("user", text)], ())
            conversation = conversation.add_turn(Turn((), (), (), (), Finish.STOP, "ok"))
        played_futures.append(Future(conversation.end(Ending.USER_DONE), {}))
    return Group(task, (Rollout(played_futures[0].conversation, tuple(played_futures), Reward(0.0)),))


def test_messages_of_the_task_are_not_simulated() -> None:
    opened = Task("a", (Message("user", "hello"),), "goal", "", "")
    unopened = Task("b", (), "goal", "", "")
    groups = [
        play(opened, ("more", f"thanks {STOP}"), (STOP,), ("mail a@x.org",)),
        play(unopened.play_on(Message("user", "good day")), ("more",), ("less",)),
    ]
    assert [asdict(messages) for messages in run_messages(groups, STOP, PersonalData())] == [
        {"group": "a", "opening": (), "following": ("more", "thanks"), "turns": 3},
        {"group": "a", "opening": (), "following": (), "turns": 1},
        {"group": "a", "opening": (), "following": ("mail <EMAIL_1>",), "turns": 2},
        {"group": "b", "opening": ("good day",), "following": ("more",), "turns": 2},
        {"group": "b", "opening": (), "following": ("less",), "turns": 2},
    ]


@pytest.mark.processes
def test_a_run_is_compared_with_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the commands of docs/howto/users-from-logs.md."""
    monkeypatch.chdir(tmp_path)
    draw, config = random.Random(0), Config()
    folder = tmp_path / "runs/support"
    folder.mkdir(parents=True)
    config.run.dir, config.data.train, config.model.path = str(folder), str(folder / "tasks.jsonl"), "none"
    tasks = [Task(str(number), (Message("user", says(draw)),), "goal", "", "") for number in range(20)]
    groups = [play(task, *[(f"{says(draw)} please", STOP) for _ in range(3)]) for task in tasks]
    write_jsonl(folder / "tasks.jsonl", [task_row(task) for task in tasks])
    (folder / "config.json").write_text(json.dumps(recorded(config)))
    transcripts.write_step(folder, 3, [[*rows_of([group])] for group in groups])
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
    page = (Path(__file__).resolve().parents[2] / "docs/howto/users-from-logs.md").read_text()
    (command,) = [line for line in page.splitlines() if "--realism runs/support" in line]
    assert run("users-from-logs", [*command.split()[2:], "--out", "realism.json"]) == 0
    printed = capsys.readouterr().out
    assert (
        "log.jsonl: 20 rows, 20 conversations of 20 people by user_id" in printed and "runs/support, step 3" in printed
    )
    comparison = json.loads(Path("realism.json").read_text())
    assert 0.88 < comparison["interval"][0] < 0.89, "of 20 on each side; 20 of 20 alone is 0.84 to 1"
    assert comparison["messages"] == [40, 60]
    assert comparison["features"][0]["feature"] == "says please"
    assert run("users-from-logs", ["log.jsonl", "--realism", "runs/support", "--step", "9"]) == 2
    assert "--step=9: runs/support has no transcripts of that step; the last one is 3" in capsys.readouterr().err
    write_jsonl(tmp_path / "log.jsonl", log[:4])
    assert run("users-from-logs", ["log.jsonl", "--realism", "runs/support"]) == 2
    assert "the log has messages of only 4 people to compare; at least 5" in capsys.readouterr().err
