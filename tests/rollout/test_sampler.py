from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from megatron_collab.rollout.sampler import Sampler, seed_of
from megatron_collab.rollout.sglang import EngineError
from megatron_collab.types import Conversation, Ending, Finish, Message, Task, Turn
from tests.rollout.fakes import CharacterRenderer, FakePolicy, config, decode, encode

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
STOP = "[[TERMINATE CHAT]]"


@pytest.fixture(autouse=True)
def testing_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted user `testing`: ends the chat when it is told to, breaks when told to, else asks on."""

    def reply(goal: str, messages: Sequence[Message]) -> str:
        last = messages[-1].content
        if "break" in last:
            return " "  # never a usable message
        return f"bye {STOP}" if "end" in last else "go on"

    world = ModuleType("testing")
    world.reply = reply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_collab.data.worlds.testing", world)


def play(policy: FakePolicy, futures: int = 1, **rollout: int) -> list[Conversation]:
    """The futures of one trained turn."""
    sampler = Sampler(policy, CharacterRenderer(), config(**rollout))

    async def conversations() -> list[Conversation]:
        start = await sampler.trained_turn(TASK, "step-0", 0)
        return await asyncio.gather(*(sampler.future(start, TASK, "step-0", 0, f) for f in range(futures)))

    return asyncio.run(conversations())


def test_every_user_turn_is_answered_and_the_limit_ends_it() -> None:
    (conversation,) = play(FakePolicy(lambda prompt, seed: "ok"), max_user_turns=2)
    assert [message.role for message in conversation.messages] == ["user"] + ["assistant", "user"] * 2 + ["assistant"]
    assert conversation.ending is Ending.TURN_LIMIT
    assert conversation.messages[-1].content == conversation.turns[-1].text == "ok"


def test_the_user_ends_it_and_the_closing_message_stays() -> None:
    (conversation,) = play(FakePolicy(lambda prompt, seed: "end"))
    assert conversation.ending is Ending.USER_DONE
    assert conversation.messages[-1] == Message("user", f"bye {STOP}")
    assert len(conversation.turns) == 1


def test_tokens_are_appended() -> None:
    (conversation,) = play(FakePolicy(lambda prompt, seed: "ok"), max_user_turns=1)
    first, second = conversation.turns
    assert first.prompt_ids == encode("<user>hi<assistant>")
    assert second.prompt_ids == first.prompt_ids + first.token_ids + encode("<user>go on<assistant>")
    assert conversation.token_ids == second.prompt_ids + second.token_ids


def test_a_turn_cut_by_its_budget_is_played_on() -> None:
    policy = FakePolicy(lambda prompt, seed: "abcdef")
    (conversation,) = play(policy, max_new_tokens=3, future_max_new_tokens=5, max_user_turns=1)
    assert [turn.text for turn in conversation.turns] == ["abc", "abcde"]
    assert conversation.turns[0].finish is Finish.LENGTH
    assert conversation.turns[1].prompt_ids[-len("<user>go on<assistant>") - 1] == 0  # the end that the turn lacked
    assert conversation.ending is Ending.TURN_LIMIT


@pytest.mark.parametrize(
    ("context_length", "turns", "roles"),
    [
        (20, 1, 2),  # the trained turn is cut by the context: 19 tokens of prompt
        (22, 1, 3),  # the user's message does not fit
        (22 + len("<user>go on<assistant>"), 1, 3),  # it fits, but leaves no room for a reply
        (23 + len("<user>go on<assistant>"), 2, 4),  # it leaves room for one token
    ],
)
def test_the_context_length_is_never_exceeded(context_length: int, turns: int, roles: int) -> None:
    (conversation,) = play(FakePolicy(lambda prompt, seed: "ok"), context_length=context_length)
    assert conversation.ending is Ending.LENGTH
    assert (len(conversation.turns), len(conversation.messages)) == (turns, roles)
    assert len(conversation.token_ids) <= context_length


def test_a_task_that_does_not_fit_is_an_error() -> None:
    (conversation,) = play(FakePolicy(lambda prompt, seed: "ok"), context_length=19)
    assert conversation.ending is Ending.ERROR
    assert "rollout.context_length=19" in conversation.error


def test_all_futures_are_played_at_once() -> None:
    class Patient(FakePolicy):
        """Answers a future only once all of them ask."""

        asking = 0

        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            if "go on" in decode(prompt_ids):
                self.asking += 1
                async with asyncio.timeout(60):
                    while self.asking < 200:
                        await asyncio.sleep(0.005)
            return await super().generate(prompt_ids, **options)

    assert len(play(Patient(lambda prompt, seed: "ok"), futures=200)) == 200


def test_the_error_of_one_future_is_its_own() -> None:
    def reply(prompt: str, seed: int) -> str:
        if prompt.endswith("<user>hi<assistant>"):
            return "start"
        return "break" if seed == unlucky else "ok"

    unlucky = seed_of(0, "step-0", 0, 2, 1)
    conversations = play(FakePolicy(reply, wait=0.01), futures=5)
    endings = [conversation.ending for conversation in conversations]
    assert endings == [Ending.TURN_LIMIT, Ending.TURN_LIMIT, Ending.ERROR, Ending.TURN_LIMIT, Ending.TURN_LIMIT]
    assert "scripted/testing: MalformedAnswer: the response is blank" in conversations[2].error
    assert conversations[2].messages[-1] == Message("assistant", "break")


def test_a_failing_engine_ends_the_future_with_the_reason() -> None:
    def reply(prompt: str, seed: int) -> str:
        if "go on" in prompt:
            raise EngineError("connection refused")
        return "ok"

    (conversation,) = play(FakePolicy(reply))
    assert (conversation.ending, conversation.error) == (Ending.ERROR, "connection refused")
    assert len(conversation.turns) == 1


def test_an_aborted_turn_is_an_error() -> None:
    class Aborting(FakePolicy):
        async def generate(
            self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, temperature: float, seed: int
        ) -> Turn:
            return Turn(prompt_ids, (), (), 7, Finish.ABORT, "")

    (conversation,) = play(Aborting(lambda prompt, seed: ""))
    assert conversation.ending is Ending.ERROR
    assert conversation.turns == ()


def test_seeds_are_the_same_in_every_process_and_differ_in_every_part() -> None:
    assert seed_of(0, "train-0-0", 0, 0, 0) == 507381455
    parts = [(r, s, g, f, t) for r in range(3) for s in ("train-0-0", "train-0-1") for g in range(4)
             for f in range(4) for t in range(3)]  # fmt: skip
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_run_that_starts_again_samples_with_the_same_seeds() -> None:
    first, second = (FakePolicy(lambda prompt, seed: "ok", wait=0.01) for _ in range(2))
    play(first, futures=4)
    play(second, futures=4)
    assert sorted(first.seeds) == sorted(second.seeds)
    assert len(set(first.seeds)) == 1 + 4 * 2
