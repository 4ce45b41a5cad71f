from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import play_spec, user_directory
from megatron_collab.llm.client import LlmClient
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.users import UserError, Users
from megatron_collab.types import Conversation, Ending, Task
from tests.rollout.fakes import CharacterRenderer, FakePolicy, config
from tests.rollout.users.helpers import STOP, check_user, dialogue, task

PAYS = {"right": 1.0, "wrong": -0.25}

pytestmark = pytest.mark.processes  # math-verify runs in its own process


def play(replies: list[str], answer: str = "42", turns: int = 5, **options: Any) -> tuple[Conversation, Users]:
    """A conversation with the user feedback; the policy says `replies` in turn and repeats the last one."""
    settings = config(max_user_turns=turns, max_assistant_turns=turns + 1)
    settings.user.options = options
    users = Users(user_directory(settings), LlmClient())
    policy = FakePolicy(lambda prompt, seed: replies[min(prompt.count("<assistant>"), len(replies)) - 1])
    player = FuturesPlayer(policy, CharacterRenderer(), users, None, play_spec(settings))  # type: ignore[arg-type]

    async def conversation() -> Conversation:
        question, place = task("feedback", answer=answer), RolloutPlace("s", 0)
        start = await player.trained_turn(question, place)
        return await player.play_on(start, question, place, settings.rollout.future)

    return asyncio.run(conversation()), users


def test_it_ends_once_the_answer_is_right_and_every_turn_has_its_reward() -> None:
    played, users = play(["what is it?", r"so \boxed{41}", r"so \boxed{84/2}"], **PAYS)
    assert played.ending is Ending.USER_DONE
    texts = [message.content for message in played.messages if message.role == "user"]
    assert texts == ["hi", *["That is not right. Please think again."] * 2, f"That is right. {STOP}"]
    assert played.turn_rewards == (-0.25, -0.25, 1.0)
    assert users.counters == {"user_replies": 3}


def test_the_last_turn_has_its_reward_too_and_the_text_can_be_set(tmp_path: Path) -> None:
    file = tmp_path / "told.j2"
    file.write_text("No. {{ attempt }} of {{ question | upper }}: {{ reply }}\n")
    played, _ = play([r"\boxed{1}", r"\boxed{2}", r"\boxed{42}"], turns=2, text=str(file), **PAYS)
    assert played.ending is Ending.TURN_LIMIT and played.turn_rewards == (-0.25, -0.25, 1.0)
    texts = [message.content for message in played.messages if message.role == "user"]
    assert texts == ["hi", r"No. 1 of HI: \boxed{1}", r"No. 2 of HI: \boxed{2}"]
    played, _ = play([r"\boxed{1}"], turns=1, text="Wrong {{ x }}!", **PAYS)
    assert played.messages[2].content == "Wrong {{ x }}!" and played.turn_rewards == (-0.25, -0.25)


def test_an_answer_that_cannot_be_checked_ends_in_an_error() -> None:
    played, _ = play(["x"], answer="maybe tomorrow")
    assert played.ending is Ending.ERROR and "cannot read the answer of task t" in played.error
    nothing = Users(user_directory(Config()), LlmClient()).make(Task("t", (), "g", " ", "feedback"), "s")
    with pytest.raises(UserError, match="task t has no answer to check against"):
        asyncio.run(nothing.start(dialogue("hi", "x")))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"txt": "x"}, "users.coach.options.txt: no such setting; the nearest is text"),
        ({"text": "none.j2"}, "user coach: text=none.j2: no such file"),
        ({"right": "much"}, "users.coach.options.right=much: "),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], why: str) -> None:
    assert str(check_user("coach", Config(users={"coach": {"class": "feedback", "options": options}}))).startswith(why)
    assert check_user("feedback/x", Config()) == "user feedback/x: takes no argument, but got 'x'"
