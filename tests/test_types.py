from __future__ import annotations

import pytest

from megatron_collab.types import Conversation, Finish, Message, Turn


def turn(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> Turn:
    return Turn(prompt_ids, token_ids, (-0.5,) * len(token_ids), 0, Finish.STOP, "hello")


def test_a_conversation_holds_the_tokens_as_they_were_sampled() -> None:
    begun = Conversation((Message("user", "hi"),), token_ids=(1, 2, 3))
    answered = begun.add_turn(turn((1, 2, 3), (7, 8))).add_user(Message("user", "go on"), (4, 5))
    assert answered.token_ids == (1, 2, 3, 7, 8, 4, 5)
    assert [message.role for message in answered.messages] == ["user", "assistant", "user"]
    assert begun.token_ids == (1, 2, 3), "a conversation is never changed in place: futures share it"


def test_one_changed_prompt_token_is_refused() -> None:
    begun = Conversation((Message("user", "hi"),), token_ids=(1, 2, 3))
    with pytest.raises(ValueError, match="another prompt"):
        begun.add_turn(turn((1, 9, 3), (7, 8)))


def test_a_turn_needs_a_log_prob_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 log-probs"):
        Turn((1,), (7, 8), (-0.5,), 0, Finish.STOP, "hello")
