from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from megatron_collab.rollout.users import User, UserError
from megatron_collab.rollout.users.scripts import ASK_ME, NO_MORE, TOLD_ALREADY, requested_facts
from megatron_collab.types import Conversation, Message, Task
from tests.rollout.users.helpers import dialogue, make_users, task

FACTS = ["Ann has 5 red apples.", "Bob ate 2 apples.", "A pear costs $1.50."]


class Talk:
    """A conversation with a reveal user."""

    def __init__(self, facts: Sequence[str], *before: str) -> None:
        goal = json.dumps({"question": "How many?", "facts": list(facts)})
        self.messages = list(dialogue("How many?", *before).messages)
        self.user: User = make_users().make(Task("t", tuple(self.messages[:1]), goal, "", "reveal"), "s")
        asyncio.run(self.user.start(Conversation(tuple(self.messages), ())))

    def __call__(self, text: str) -> str:
        self.messages.append(Message("assistant", text))
        reply = asyncio.run(self.user.reply(Conversation(tuple(self.messages), ())))
        self.messages.append(reply.message)
        return "END" if reply.done else reply.message.content


@pytest.mark.parametrize(
    ("question", "facts"),
    [
        ("How many apples did Bob eat?", [1]),
        ("What does a pear cost, and what do pears weigh?", [2]),
        ("How many apples are there?", [0, 1]),
        ("Who are Ann and Bob?", [0, 1]),
        ("What colour are Ann's apples?", [0]),
        ("What else do you know?", [0, 1, 2]),
        ("Could you share all the details?", [0, 1, 2]),
        ("?", [0, 1, 2]),
    ],
)
def test_a_question_asks_for_the_facts_that_share_its_words(question: str, facts: list[int]) -> None:
    assert requested_facts(question, FACTS) == facts


def test_facts_are_told_when_asked_for_and_only_once() -> None:
    says = Talk(FACTS)
    assert says("Let me think.") == ASK_ME
    assert says("How much is a pear?") == FACTS[2]
    assert says("What does a pear cost?") == TOLD_ALREADY
    assert says("What else?") == f"{FACTS[0]} {FACTS[1]}"
    assert says("Anything more?") == NO_MORE
    assert says("Thank you, the answer is 5. Right?") == "END"


def test_only_the_sentences_that_ask_count() -> None:
    says = Talk(FACTS)
    assert says("Pears are fruit. Bob is a friend of Ann. How many did Bob eat?") == FACTS[1]
    assert says("Please tell me what Ann has. I like pears.") == FACTS[0]


@pytest.mark.parametrize("text", [r"so \boxed{5}", "The answer is 5. Is that right?", "#### 5"])
def test_a_stated_answer_ends_the_conversation(text: str) -> None:
    assert Talk(FACTS)(text) == "END"


def test_the_question_opens_the_conversation() -> None:
    assert asyncio.run(Talk(FACTS).user.open()) == "How many?"
    other = make_users().make(Task("t", (), json.dumps({"facts": FACTS}), "", "reveal"), "s")
    with pytest.raises(UserError, match="the goal of task t has no question for the first message"):
        asyncio.run(other.open())


def test_facts_said_before_the_start_are_not_told_again() -> None:
    says = Talk(FACTS, "Who?", FACTS[0])
    assert says("What else?") == f"{FACTS[1]} {FACTS[2]}"


def test_the_user_of_a_problem_without_facts_knows_nothing_more() -> None:
    assert Talk([])("who?") == NO_MORE


def test_conversations_of_one_task_tell_their_facts_separately() -> None:
    first, second = Talk(FACTS), Talk(FACTS)
    assert first("What else?") == second("What else?") == " ".join(FACTS)


@pytest.mark.parametrize("goal", ["a plain goal", "[]", "{}", '{"facts": "Ann has 2."}', '{"facts": [2]}'])
def test_a_goal_without_facts_is_refused_with_its_task(goal: str) -> None:
    with pytest.raises(UserError, match="task t: the goal must be a JSON object"):
        asyncio.run(make_users().make(task("reveal", goal), "s").start(dialogue("hi", "hello")))
