from __future__ import annotations

import json

import pytest

from megatron_collab.rollout.users.guardrails import COMPLAINTS, EMPTY, FLIPPED, LEAKED, refusal
from megatron_collab.rollout.users.llm import system_prompt
from megatron_collab.settings import UserConfig
from megatron_collab.types import Message, Task

FACTS = (
    "my grandmother owns a farm with twelve hens and each hen lays five eggs in a week. "
    "she keeps ten eggs for her own breakfast, and the bakery in the village pays two dollars for every other egg"
)
GOAL = f"Find out how many dollars a week it brings: {FACTS}."
TASK = Task("t", (Message("user", "how many dollars a week?"),), GOAL, "100", "llm")
HISTORY = [*TASK.messages, Message("assistant", "Sure! Which farm is that, and what does it sell?")]
INSTRUCTIONS = system_prompt(UserConfig(stop="[[STOP]]"), Task("t", (), "", "", "llm"))


def refused(text: str, task: Task = TASK, before: list[Message] = HISTORY) -> str | None:
    return refusal(text, task, INSTRUCTIONS, before)


@pytest.mark.parametrize("text", ["", " \n\t", "\u00a0"])
def test_an_empty_message_is_refused(text: str) -> None:
    assert refused(text) is EMPTY


@pytest.mark.parametrize(
    "text",
    [
        "**Assistant**: which farm?",
        "Assistant: which farm?",
        " AI: which farm?",
        "As an AI language model, I cannot say.",
        "Well, as an AI I do not eat eggs.",
        "I'm just an AI.",
        "Hello! How can I help you today?",
        "how may I assist you",
        "sure, which farm is that and what does it sell",
    ],
)
def test_a_user_that_answers_as_the_assistant_is_refused(text: str) -> None:
    assert refused(text) is FLIPPED


@pytest.mark.parametrize(
    "text",
    [
        "Are you an AI: yes or no?",
        "You are an assistant: help me.",
        "As an aid, I use a calculator.",
        "How can I help the farmers?",
        "Sure!",
        "My grandmother's. It sells eggs.",
    ],
)
def test_a_user_that_speaks_about_assistants_is_not_refused(text: str) -> None:
    assert refused(text) is None


def test_a_short_message_may_say_what_the_assistant_said() -> None:
    before = [*TASK.messages, Message("assistant", "Thank you very much!")]
    assert refused("thank you very much", before=before) is None


@pytest.mark.parametrize("text", [GOAL, f"ok: {FACTS.upper()}", json.dumps({"goal": GOAL}), f"What I know is: {FACTS}"])
def test_the_whole_goal_at_once_is_refused(text: str) -> None:
    assert refused(text) is LEAKED


def test_facts_in_the_users_own_words_are_not_refused() -> None:
    assert refused("it has 12 hens, each lays five a week; she eats ten and sells the rest for two dollars") is None


def test_a_fact_may_be_quoted() -> None:
    assert refused(FACTS.partition(".")[0]) is None


def test_the_goal_may_be_told_piece_by_piece() -> None:
    first, _, second = FACTS.partition(". ")
    before = [*HISTORY, Message("user", first), Message("assistant", "and then?")]
    assert refused(second, before=before) is None


def test_earlier_messages_may_be_repeated() -> None:
    assert refused(f"yes, {FACTS}", before=[*HISTORY, Message("user", FACTS), Message("assistant", "Really?")]) is None
    whole = Task("t", (Message("user", GOAL),), GOAL, "100", "llm")
    assert refused(GOAL, whole, [*whole.messages, Message("assistant", "What?")]) is None


def test_only_the_part_of_the_goal_that_the_task_hides_counts() -> None:
    long_question = "please tell me " + " ".join(f"word{i}" for i in range(100))
    task = Task("t", (Message("user", long_question),), f"{long_question}. {FACTS}", "100", "llm")
    assert refused(FACTS, task, [*task.messages, Message("assistant", "What?")]) is LEAKED


def test_a_goal_of_a_few_words_may_be_said() -> None:
    task = Task("t", TASK.messages, "book a table for four people on friday", "", "llm")
    assert refused("book a table for four people on friday", task) is None


def test_the_instructions_are_not_recited() -> None:
    assert refused("Reveal what you know only as far as the conversation calls for it, in your own words") is LEAKED
    assert refused("do not invent facts, please") is None


@pytest.mark.parametrize("text", ["so it is 100, right?", "$100."])
def test_the_answer_is_left_to_the_assistant(text: str) -> None:
    assert refused(text) is LEAKED


@pytest.mark.parametrize("text", ["about 1000", "1,100", "100.5 maybe"])
def test_another_number_is_not_the_answer(text: str) -> None:
    assert refused(text) is None


def test_an_answer_that_is_known_may_be_said() -> None:
    assert refused("why 100?", before=[*HISTORY, Message("assistant", "100 dollars")]) is None
    assert refused("a hundred is 100", Task("t", TASK.messages, "what is 100 in words", "100", "llm")) is None


@pytest.mark.parametrize(("answer", "text"), [("yes", "yes please"), ("A", "a farm"), ("", "a farm"), ("-", "a - b")])
def test_an_answer_that_is_said_by_chance_does_not_count(answer: str, text: str) -> None:
    assert refused(text, Task("t", TASK.messages, GOAL, answer, "llm")) is None


def test_the_complaint_about_the_answer_does_not_confirm_it() -> None:
    assert "answer" not in COMPLAINTS[LEAKED] and "100" not in COMPLAINTS[LEAKED]
