from __future__ import annotations

import pickle
from typing import Any

import pytest

from megatron_collab.types import (
    Conversation,
    Finish,
    Future,
    Group,
    Judgment,
    Message,
    Task,
    Turn,
    visible,
    without_private,
)


def turn(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> Turn:
    return Turn(prompt_ids, token_ids, (-0.5,) * len(token_ids), (0,) * len(token_ids), Finish.STOP, "hello")


def test_a_conversation_holds_the_tokens_as_they_were_sampled() -> None:
    begun = Conversation((Message("user", "hi"),), token_ids=(1, 2, 3))
    answered = begun.add_turn(turn((1, 2, 3), (7, 8))).add_messages([Message("user", "go on")], (4, 5))
    assert answered.token_ids == (1, 2, 3, 7, 8, 4, 5)
    assert [message.role for message in answered.messages] == ["user", "assistant", "user"]
    assert begun.token_ids == (1, 2, 3), "a conversation is never changed in place: futures share it"


def test_replies_are_the_assistant_texts_since_the_task() -> None:
    history = (Message("user", "hi"), Message("assistant", "old"), Message("user", "and?"))
    conversation = Conversation(history, (1,)).add_turn(
        Turn((1,), (2,), (-1.0,), (0,), Finish.STOP, "<think>x</think>call")
    )
    conversation = conversation.add_messages([Message("tool", "42")], (3,))
    conversation = conversation.add_turn(Turn((1, 2, 3), (4,), (-1.0,), (0,), Finish.STOP, "it is 42"))
    conversation = conversation.add_messages([Message("user", "thanks")], (5,))
    assert conversation.replies == ("it is 42",)
    assert conversation.messages[3].content == "call"
    assert conversation.add_turn(turn((1, 2, 3, 4, 5), (6,))).replies == ("it is 42", "hello")
    assert Conversation(history, (1,)).replies == ()


def test_rewards_are_added_to_the_last_turn() -> None:
    first = Conversation((), (1,)).add_turn(turn((1,), (2,))).add_reward(1.0).add_reward(0.5)
    second = first.add_messages([], (3,)).add_turn(turn((1, 2, 3), (4,))).add_reward(2.0)
    assert (first.turn_rewards, second.turn_rewards) == ((1.5,), (1.5, 2.0))


def test_rewards_may_be_for_an_earlier_turn() -> None:
    first = Conversation((), (1,)).add_turn(turn((1,), (2,)))
    second = first.add_messages([], (3,)).add_turn(turn((1, 2, 3), (4,)))
    assert second.add_reward(1.0, 0).add_reward(0.5, -2).add_reward(0.25, 1).turn_rewards == (1.5, 0.25)
    for number in (2, -3):
        with pytest.raises(ValueError, match=f"a reward for turn {number}, but the conversation has 2 turns"):
            second.add_reward(1.0, number)


def test_one_changed_prompt_token_is_refused() -> None:
    begun = Conversation((Message("user", "hi"),), token_ids=(1, 2, 3))
    with pytest.raises(ValueError, match="prompt differs from"):
        begun.add_turn(turn((1, 9, 3), (7, 8)))


def test_a_turn_needs_a_log_prob_and_a_version_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 log_probs"):
        Turn((1,), (7, 8), (-0.5,), (0, 0), Finish.STOP, "hello")
    with pytest.raises(ValueError, match="2 tokens has 3 versions"):
        Turn((1,), (7, 8), (-0.5, -0.5), (0, 0, 1), Finish.STOP, "hello")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("<think>secret</think>\n\nsaid", "said"),
        ("a <think>x</think>b <think>y</think>c", "a b c"),
        ("opened in the prompt</think>\nsaid", "said"),
        ("said <think>cut by the bud", "said "),
        ("<think>only", ""),
        ("<think>a<think>b</think>c</think>said", "said"),
        ("1 < 2 and <b>", "1 < 2 and <b>"),
    ],
)
def test_thoughts_are_hidden(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("said", None),
        ("<think>x</think>said", None),
        ("", "an empty reply"),
        (" \n", "an empty reply"),
        ("<think>x</think> ", "an empty reply"),
        ("<think>x", "<think> without </think>"),
        ("x</think>said", "</think> without <think>"),
        ("<think>a</think></think>b", "</think> without <think>"),
        ("<think>a<think>b</think></think>c", "nested <think>"),
    ],
)
def test_a_faulty_reply_is_named(text: str, why: str | None) -> None:
    assert Turn((), (), (), (), Finish.STOP, text).fault() == why


@pytest.mark.parametrize(
    ("record", "name", "empty"),
    [
        (Message("user", "hi", private={"thought": "x"}), "private", {}),
        (Future(Conversation((), ()), {"m": 1.0}), "judgments", {}),
        (Group(Task("t", (), "g", "a", "llm"), ()), "user", ""),
        (Judgment("as it is", "{}", ("judge-1",)), "versions", ()),
    ],
    ids=["message", "future", "group", "judgment"],
)
def test_a_record_that_an_earlier_version_pickled_reads_as_empty(record: Any, name: str, empty: object) -> None:
    del record.__dict__[name]
    restored = pickle.loads(pickle.dumps(record))
    assert name not in vars(restored)
    assert getattr(restored, name) == empty


def test_private_notes_are_in_no_message_that_is_sent_and_change_nothing_that_compares() -> None:
    plain, noted = Message("user", "hi"), Message("user", "hi", private={"thought": "a secret"})
    assert noted == plain and hash(noted) == hash(plain)
    assert noted.as_dict() == {"role": "user", "content": "hi"} and "a secret" not in repr(noted)
    (public,) = without_private([noted])
    assert public == noted and not public.private and noted.private == {"thought": "a secret"}
