"""Token budgets of a thought and of a reply, with a policy that continues a text from any position."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_collab.rollout import thinking
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Finish, Turn
from tests.rollout.fakes import END, CharacterRenderer, decode, encode, routing

CHAT = CharacterRenderer()
OPENED, PLAIN = encode("<user>hi<assistant><think>"), encode("<user>hi<assistant>")


def shown(text: str) -> str:
    """The text with closing marks as a brace, which is their single token in the fakes."""
    return text.replace("</think>", "}")


class Reciter:
    """Continues `text` from where the prompt ends, or says `reply` after a thought that was closed."""

    def __init__(self, prompt: tuple[int, ...], text: str, reply: str) -> None:
        self.prompt, self.text, self.reply, self.requests = prompt, shown(text), reply, list[dict[str, Any]]()

    async def __call__(
        self,
        prompt_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        stop: int | None = None,
        routing_from: int | None = None,
    ) -> Turn:
        self.requests.append({"max_new_tokens": max_new_tokens, "stop": stop})
        recited = decode(prompt_ids[len(self.prompt) :])
        whole = (*encode(self.text.removeprefix(recited) if self.text.startswith(recited) else self.reply), END)
        if stop in whole:
            whole = whole[: whole.index(stop) + 1]
        ids = whole[:max_new_tokens]
        finish = Finish.STOP if len(ids) == len(whole) else Finish.LENGTH
        text = decode(ids[:-1] if stop is not None and ids[-1:] == (stop,) else ids)
        text, n = text.replace("}", "</think>"), len(ids)
        experts = routing(prompt_ids + ids, routing_from, len(self.requests))
        return Turn(prompt_ids, ids, (-0.5,) * n, (7,) * n, finish, text, routing=experts)


def sampled(
    prompt: tuple[int, ...],
    text: str,
    budget: int | None,
    reply: int,
    room: int = 1000,
    routing_from: int | None = None,
) -> Turn:
    policy = Reciter(prompt, text, "so")
    sampling = SamplingConfig(max_new_tokens=reply, thinking_budget=budget)
    return asyncio.run(thinking.sample_turn(policy, CHAT, prompt, sampling, room, routing_from))


def test_a_thought_within_its_budget_leaves_the_reply_its_whole_budget() -> None:
    turn = sampled(OPENED, "hm hm</think>which day", 10, 9)
    assert turn.token_ids == encode(shown("hm hm</think>which day")) and turn.finish is Finish.LENGTH
    assert turn.text == "<think>hm hm</think>which day" and turn.forced == (0, 0)
    assert sampled(OPENED, "hm hm</think>which day", 10, 10).finish is Finish.STOP
    assert sampled(OPENED, "hm hm</think>which day", None, 100).text == turn.text, "the opening is in the text"


@pytest.mark.parametrize(("prompt", "begun"), [(OPENED, ""), (PLAIN, "<think>")])
def test_a_thought_over_its_budget_is_closed_by_tokens_that_are_not_trained(
    prompt: tuple[int, ...], begun: str
) -> None:
    text, budget = f"{begun}hm hm hm hm", len(begun) + 5
    turn = sampled(prompt, text, budget, 10)
    closing = CHAT.tokens(thinking.CLOSED)
    assert turn.token_ids == (*encode(f"{begun}hm hm"), *closing, *encode("so"), END)
    assert turn.forced == (budget, budget + len(closing))
    assert turn.log_probs == (-0.5,) * budget + (0.0,) * len(closing) + (-0.5,) * 3
    assert set(turn.versions) == {7} and turn.finish is Finish.STOP
    assert turn.text == "<think>hm hm\n</think>\n\nso" and turn.fault() is None


def test_a_turn_that_does_not_think_has_the_budget_of_its_reply() -> None:
    assert sampled(PLAIN, "which day", 4, 10).text == "which day"
    cut = sampled(PLAIN, "which day", 4, 6)
    assert (cut.text, cut.finish) == ("which ", Finish.LENGTH)
    assert sampled(PLAIN, "yes", 4, 6).finish is Finish.STOP


def test_the_context_length_bounds_thought_and_reply() -> None:
    """A thought without room for its end and a reply stays cut, and no more tokens are added."""
    closed = len(CHAT.tokens(thinking.CLOSED))
    for room in range(1, 30):
        turn = sampled(OPENED, "hm hm hm hm hm", 5, 10, room)
        assert len(turn.token_ids) <= room
        assert (turn.finish is Finish.LENGTH) == (room < 5 + closed + 3)
    cut = sampled(OPENED, "hm</think>which day", 5, 10, 3)
    assert (cut.text, cut.finish, len(cut.token_ids)) == ("<think>hm</think>", Finish.LENGTH, 3)


@pytest.mark.parametrize("text", ["hm hm hm hm hm", "hm</think>which day", "hm</think>"])
def test_both_requests_of_a_turn_return_the_experts_of_their_tokens(text: str) -> None:
    """The request for the reply reads the tokens that close a thought and the last token of the thought."""
    turn = sampled(OPENED, text, 5, 10, routing_from=3)
    assert turn.routing is not None
    thought = len(OPENED) + (5 if turn.forced[1] else len("hm}"))
    positions = range(3, len(turn.stream) - 1)
    assert turn.routing.tolist() == [[position, 1 + (position >= thought - 1)] for position in positions]
    assert sampled(OPENED, text, 5, 10).routing is None
