"""The registry, and the metrics of the booking world."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from megatron_collab.config import ConfigError
from megatron_collab.environments import booking
from megatron_collab.reward import metrics
from megatron_collab.types import Conversation, Message, Score, Task
from tests.reward.fakes import about, play
from tests.reward.fakes import score as score_of

GOAL = {"people": "4", "day": "friday", "time": "7pm"}


def task(*given: str) -> Task:
    messages = (Message("user", " ".join([booking.REQUEST, booking.say(GOAL, given), "."])),)
    return Task("t", messages, json.dumps(GOAL), booking.final(GOAL), booking.USER)


def played(task: Task, *replies: str) -> Conversation:
    """The policy's replies, each but the last followed by the scripted user's message."""
    said: list[str] = []
    for text in replies[:-1]:
        conversation = play(task, *said, text)
        said += [text, booking.reply(task.goal, conversation.messages)]
    return play(task, *said, *replies[-1:])


def score(name: str, task: Task, *replies: str) -> Score | None:
    return score_of(name, task, played(task, *replies))


ALL = ("people", "day", "time")
RIGHT, WRONG = booking.final(GOAL), booking.final({**GOAL, "day": "monday"})


def test_the_last_reply_is_what_is_judged() -> None:
    assert score("booking_right", task("day"), booking.ask(["people", "time"]), RIGHT) == 1.0
    assert score("booking_right", task("day"), booking.ask(["people", "time"]), WRONG) == 0.0
    assert score("booking_right", task("day"), booking.ask(["people", "time"])) == 0.0


def test_the_closing_message_of_the_user_does_not_hide_the_last_reply() -> None:
    assert score_of("booking_right", task(*ALL), play(task(*ALL), RIGHT, booking.STOP)) == 1.0


def test_asking_is_judged_by_what_the_task_leaves_open() -> None:
    question = booking.ask(["time"])
    assert score("ask_when_missing", task("day"), question, RIGHT) == 1.0
    assert score("ask_when_missing", task("day"), WRONG, question) == 0.0
    assert score("ask_when_missing", task(*ALL), question) is None
    assert score("ask_when_complete", task(*ALL), question, RIGHT) == 1.0
    assert score("ask_when_complete", task(*ALL), RIGHT) == 0.0
    assert score("ask_when_complete", task("day"), question) is None


def test_missing_questions_are_those_not_asked_before_the_answer() -> None:
    assert score("missing_questions", task("day"), RIGHT) == 2.0
    assert score("missing_questions", task("day"), booking.ask(["time"]), WRONG) == 1.0
    assert score("missing_questions", task("day"), booking.ask(["time"]), booking.ask(["people"]), RIGHT) == 0.0
    assert score("missing_questions", task("day"), WRONG, booking.ask(["time", "people"])) == 2.0
    assert score("missing_questions", task(*ALL), RIGHT) == 0.0


def test_needless_questions_are_those_already_answered() -> None:
    assert score("needless_questions", task("day"), booking.ask(["time", "people"]), RIGHT) == 0.0
    assert score("needless_questions", task("day"), booking.ask(["time", "day"]), RIGHT) == 1.0
    assert score("needless_questions", task("day"), booking.ask(["time"]), booking.ask(["time", "day"])) == 2.0


def test_a_question_mark_is_asking() -> None:
    assert score("asks", task("day"), "how many?", "6") == 1.0
    assert score("asks", task("day"), "6", "how many?") == 0.0


@pytest.mark.parametrize("name", ["booking_right", "ask_when_missing", "missing_questions", "needless_questions"])
def test_booking_metrics_do_not_apply_to_other_worlds(name: str) -> None:
    other = about("5")
    assert score_of(name, other, play(other, "5")) is None


def test_turn_rewards_are_summed_up_from_the_trained_turn_on() -> None:
    about_it = about("5")
    given = play(about_it, "one").add_reward(0.5).add_messages([Message("user", "so?")], ())
    later = play(about_it, "one", "so?", "two")
    assert score_of("turn_rewards", about_it, later) == 0.0
    both = Conversation(given.messages, (1,), later.turns, (0.5, -0.25))
    assert score_of("turn_rewards", about_it, both) == 0.25


def test_every_metric_is_a_file_with_a_class_of_its_name() -> None:
    assert metrics.known() == sorted(metrics.known())
    for name in metrics.known():
        found = metrics.find(name)
        assert issubclass(found, metrics.Metric)
        assert asyncio.iscoroutinefunction(found.score) and found.score is not metrics.Metric.score


NEW_METRIC = """
from dataclasses import dataclass
from megatron_collab.reward.metrics import Metric

@dataclass(frozen=True)
class Options:
    word: str = "please"

class PoliteWords(Metric):
    Options = Options

    async def score(self, task, conversation):
        return float(sum(reply.count(self.options.word) for reply in conversation.replies))
"""


def test_adding_a_metric_is_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "polite_words.py").write_text(NEW_METRIC)
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    assert "polite_words" in metrics.known()
    conversation = play(about("5"), "when, please?", "at 5", "thanks")
    assert score_of("polite_words", about("5"), conversation) == 1.0
    assert score_of("polite_words", about("5"), conversation, word="thanks") == 1.0
    with pytest.raises(ConfigError, match=r"polite_words.words: no such setting; the nearest is word; there are word"):
        score_of("polite_words", about("5"), conversation, words="thanks")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("token_amount", {"count": "bytes"}, "count=bytes: choose one of policy, cl100k, words"),
        ("interactivity", {"rubric": "whole"}, "rubric=whole: choose one of holistic, parts"),
        ("bleu", {"level": "word"}, "level=word: choose one of token, character"),
        ("generative", {}, "write the rubric with {conversation}"),
        ("generative", {"prompt": "{conversation} {anwser}"}, "{anwser} is not known; there are {conversation}"),
        ("generative", {"prompt": "{conversation}", "low": 1, "high": 1}, "low must be below high"),
        ("reward_model", {}, "give the address of an SGLang server"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        metrics.split(name, settings)
    assert re.match(rf"reward\.metrics\.{name}[.:]", str(refused.value)) and said in str(refused.value)


def test_metrics_that_need_a_judge_say_so() -> None:
    def judged(name: str, **settings: object) -> bool:
        kind, options = metrics.split(name, settings)
        return kind.judged(options)

    assert judged("interactivity") and judged("generative", prompt="{conversation}") and judged("bleu")
    assert not judged("bleu", extract=False) and not judged("accuracy") and not judged("token_amount")
    assert judged("accuracy", judge=True)
