"""verl's interactions as users, without an edit of their files."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import play_spec, user_directory
from megatron_collab.llm.client import LlmClient
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.users import Users
from megatron_collab.runtime import verl
from megatron_collab.types import Conversation, Ending
from tests.rollout.fakes import CharacterRenderer, FakePolicy, config
from tests.rollout.foreign import FEEDBACK
from tests.rollout.users.helpers import check_user, task


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "feedback.py"
    path.write_text(FEEDBACK)
    return path


def play(
    interaction: str, *conversations: list[str], turns: int = 3, deadline: float = 60.0, **options: Any
) -> list[Conversation]:
    """Conversations at the same time, in each of which the policy says the replies in turn and repeats the last one."""
    settings = config(max_user_turns=turns, max_assistant_turns=turns + 1, deadline=deadline)
    settings.user.options = {"interaction": interaction, **options}
    users = Users(user_directory(settings), LlmClient())

    async def conversation(number: int, replies: list[str]) -> Conversation:
        policy = FakePolicy(lambda prompt, seed: replies[min(prompt.count("<assistant>"), len(replies)) - 1])
        player = FuturesPlayer(policy, CharacterRenderer(), users, None, play_spec(settings))  # type: ignore[arg-type]
        kwargs = {"interaction_kwargs": {"ground_truth": None, "number": number}}  # as Parquet fills it
        question, place = task("verl", answer="42", **kwargs), RolloutPlace(f"s{number}", 0)
        start = await player.trained_turn(question, place)
        return await player.play_on(start, question, place, settings.rollout.future)

    async def played() -> list[Conversation]:
        return await asyncio.gather(*(conversation(i, replies) for i, replies in enumerate(conversations)))

    return asyncio.run(played())


def module(file: Path) -> dict[str, Any]:
    return vars(sys.modules[verl.load(f"{file}:MathInteraction", "user").__module__])


def test_each_conversation_has_an_object_of_its_own_and_each_turn_its_score(file: Path) -> None:
    log = module(file)["LOG"]
    log.clear()
    right, other = play(f"{file}:MathInteraction", ["41?", "so 42"], ["no"], turns=2, config={"wrong": -0.5})
    assert right.ending is Ending.USER_DONE and right.turn_rewards == (-0.5, 1.0)
    assert [message.content for message in right.messages] == ["hi", "41?", "Wrong, try again.", "so 42", "Correct."]
    assert other.ending is Ending.TURN_LIMIT and other.turn_rewards == (-0.5, -0.5, 0.0)
    kwargs = [{"query": "hi", "single_turn_prompt": "the goal", "number": number} for number in (0, 1)]
    assert sorted(log, key=str) == [("math", 1, of_one) for of_one in kwargs]


def test_the_older_interface_has_no_ids_and_its_last_score_may_count(file: Path) -> None:
    (played,) = play(f"{file}:Older", ["a", "b"], final_score=True)
    assert played.ending is Ending.USER_DONE and played.turn_rewards == (0.25, 0.25 + 1.0)
    assert [message.content for message in played.messages if message.role == "user"] == ["hi", "hi 2", "hi 4"]


@pytest.mark.seconds
def test_failures_have_a_reason_and_a_blocking_class_delays_no_other(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("megatron_collab.rollout.conversation.FINISH_SECONDS", 0.1)
        (slow,) = play(f"{file}:MathInteraction", ["slow"], deadline=0.3)
    assert slow.ending is Ending.DEADLINE
    replies = [["bug"], ["nothing"], ["exit"], ["42"]]
    bug, nothing, ended, right = play(f"{file}:MathInteraction", *replies)
    module(file)["GO"].set()
    assert (bug.ending, bug.error) == (Ending.ERROR, "user verl: KeyError: 'bug'")
    assert nothing.error == "user verl: generate_response returned ' ' as the user's message"
    assert ended.error == "user verl: RuntimeError: it raised SystemExit: 3"
    assert right.ending is Ending.USER_DONE
    (strange,) = play(f"{file}:Strange", ["a"])
    assert strange.error == "user verl: generate_response returned str, not (done, text, score, data)"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "options.interaction: is not set; give package.module:NAME or ./file.py:NAME"),
        (
            "{}:Mathinteraction",
            "options.interaction={}:Mathinteraction: {} has no Mathinteraction; the nearest is Math",
        ),
        ("{}:compute_score", "options.interaction={}:compute_score: has no method start_interaction; give a class"),
        ("{}:NoUser", "options.interaction={}:NoUser: has no method start_interaction"),
        ("{}:Broken", "options.interaction={}:Broken: cannot be constructed with options.config (KeyError: 'model')"),
    ],
)
def test_what_is_no_interaction_is_refused_before_the_run(file: Path, name: str, why: str) -> None:
    settings = Config()
    settings.user.options = {"interaction": name.format(file)}
    assert str(check_user("verl", settings)).startswith(why.format(file, file))
    settings.user.options = {"interaction": f"{file}:Older"}
    assert check_user("verl", settings) is None
