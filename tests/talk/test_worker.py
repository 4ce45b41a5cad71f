"""Chats as they are played: rows that grow while the model writes, over a policy that streams, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megatron_collab.inference.client import ServerGone
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.talk import ChatError
from megatron_collab.talk.worker import ROW_SECONDS, Row, TalkPlayer, TalkWorker
from megatron_collab.types import Future, Message, Task, Turn
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
KEY = "sk-proj-0123456789abcdef0123456789"
pytestmark = pytest.mark.usefixtures("virtual_time")


class StreamingPolicy(FakePolicy):
    """Writes a character each time that a row is due; with `cut`, the server is lost after so many."""

    def __init__(self, reply: str, cut: int | None = None) -> None:
        super().__init__(lambda prompt, seed: reply)
        self.cut = cut

    async def generate(self, *prompt: Any, progress: Callable[[str], None] | None = None, **options: Any) -> Turn:
        turn = await super().generate(*prompt, **options)
        for length in range(1, len(turn.text)) if progress else ():
            assert progress
            progress(turn.text[:length])
            await asyncio.sleep(ROW_SECONDS)
            if length == self.cut:
                raise ServerGone("the stream ended before the turn")
        return turn


class NoRewards:
    async def future(self, task: Task, conversation: Any) -> Future:
        return Future(conversation, {"right": 1.0})


def talk_worker(policy: FakePolicy, **rollout: Any) -> TalkWorker:
    """One that plays with the policy, without its process."""
    settings: Any = config(**rollout)
    users: Any = FakeUsers(lambda goal, messages: "go on")
    talker = TalkWorker.__new__(TalkWorker)
    talker._chats = {}
    talker.talkers = [TalkPlayer(policy, CharacterRenderer(), users, NoRewards(), play_spec(settings))]
    return talker


async def rows_of(changes: Any) -> list[Row]:
    return [change["row"] async for change in changes]


def chat(policy: FakePolicy, *actions: Callable[[TalkWorker], Any], **rollout: Any) -> list[list[Row]]:
    """The rows of each action, one after the other."""

    async def play() -> list[list[Row]]:
        talker = talk_worker(policy, **rollout)
        return [await rows_of(action(talker)) for action in actions]

    return asyncio.run(play())


def begin(worker: TalkWorker) -> Any:
    return worker.begin(0, TASK)


def say(worker: TalkWorker) -> Any:
    return worker.say(0, "more")


def replies(rows: list[Row]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows if row["messages"][-1]["role"] == "assistant"]


def test_a_reply_grows_and_ends_in_the_record_of_a_whole_one() -> None:
    text = "one two three four"
    begun, continued = chat(StreamingPolicy(text), begin, say)
    assert begun[0]["messages"] == [{"role": "user", "content": "hi"}]
    for rows in (begun, continued):
        shown = replies(rows)
        assert len({*shown}) == 4 and shown[-1] == text and all(text.startswith(part) for part in shown)
        assert all(row["ending"] is None for row in rows)
    question = {"role": "user", "content": "more"}
    assert any(row["messages"][-1] == question for row in continued), "before there is an answer"
    whole = chat(FakePolicyThatDoesNotStream(text), begin, say)
    assert [rows[-1] for rows in whole] == [begun[-1], continued[-1]]


class FakePolicyThatDoesNotStream(FakePolicy):
    def __init__(self, reply: str) -> None:
        super().__init__(lambda prompt, seed: reply)

    async def generate(self, *prompt: Any, progress: object = None, **options: Any) -> Turn:
        return await super().generate(*prompt, **options)


@pytest.mark.parametrize("budget", [None, 3])
def test_a_thought_is_not_shown_as_a_reply(budget: int | None) -> None:
    """Whether the model closes it or its budget does."""

    def reply(prompt: str, seed: int) -> str:
        return "the reply is" if "</think>" in prompt or "}" in prompt else "so so </think> the reply is"

    policy = StreamingPolicy("")
    policy.reply = reply
    budgets: dict[str, Any] = {} if budget is None else {"turn": 40}

    async def play() -> list[Row]:
        talker = talk_worker(policy, **budgets)
        (player,) = talker.talkers
        player.rollout.turn.enable_thinking, player.rollout.turn.thinking_budget = True, budget
        return await rows_of(begin(talker))

    rows = asyncio.run(play())
    raw = [row["turns"][-1] for row in rows if row.get("turns")]
    assert all(text.startswith("<think>") for text in raw) and len({*raw}) > 3
    assert all("so" not in content for content in replies(rows)) and replies(rows)[-1].strip() == "the reply is"


def test_a_key_is_not_shown_while_it_is_written() -> None:
    (rows,) = chat(StreamingPolicy(f"it is {KEY} , keep it"), begin)
    assert len(rows) > 3 and not [reply for reply in replies(rows) if "sk-" in reply]
    assert replies(rows)[-1] == "it is *** , keep it"


@pytest.mark.parametrize("key", ["correct horse battery staple", "ümläut-ünd-söweiter", "pass word pass word"])
def test_the_value_of_a_variable_is_not_shown_while_it_is_written(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_PASSPHRASE", key)
    (rows,) = chat(StreamingPolicy(f"it is {key}. Keep it"), begin)
    shown = dict.fromkeys(replies(rows))
    assert [*shown] == ["it ", "it is ", "it is ***. ", "it is ***. Keep ", "it is ***. Keep it"]


class LatePolicy(FakePolicy):
    """Writes another piece while the first one is passed on, and ends."""

    async def generate(self, *prompt: Any, progress: Any = None, **options: Any) -> Turn:
        turn = await super().generate(*prompt, **options)
        progress("the ")
        await asyncio.sleep(1.5 * ROW_SECONDS)
        progress("the first ")
        return turn


def test_the_last_piece_of_a_reply_is_not_shown_in_the_next_action(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(changes: Any) -> list[Row]:
        rows = []
        async for change in changes:
            rows.append(change["row"])
            await asyncio.sleep(ROW_SECONDS)
        return rows

    async def play() -> None:
        talker = talk_worker(LatePolicy(lambda prompt, seed: "the first reply"))
        (player,) = talker.talkers
        answer = player.answer

        async def answer_late(*arguments: Any) -> Any:
            await asyncio.sleep(2 * ROW_SECONDS)
            return await answer(*arguments)

        monkeypatch.setattr(player, "answer", answer_late)
        begun, continued = await slowly(begin(talker)), await slowly(say(talker))
        assert replies(begun) == ["the ", "the first reply"]
        assert all(row["messages"][:2] == begun[-1]["messages"] for row in continued)

    asyncio.run(play())


def test_a_cut_stream_ends_the_conversation_with_its_fault() -> None:
    async def play() -> None:
        talker = talk_worker(policy := StreamingPolicy("one two three four", cut=12))
        rows = await rows_of(begin(talker))
        assert replies(rows)[-1].strip() in ("one two", "one two three"[:8])
        last = rows[-1]
        assert (last["ending"], last["error"]) == ("error", "the stream ended before the turn")
        with pytest.raises(ChatError, match=r"has ended: error \(the stream ended before the turn\); undo"):
            await rows_of(say(talker))
        policy.cut = None
        assert replies(await rows_of(begin(talker)))[-1] == "one two three four"

    asyncio.run(play())


def test_what_a_chat_cannot_do_is_refused() -> None:
    async def refusal(changes: Any) -> str:
        with pytest.raises(ChatError) as error:
            await rows_of(changes)
        return str(error.value)

    async def play() -> None:
        talker = talk_worker(StreamingPolicy("ok"))
        assert await refusal(say(talker)) == "there is no conversation; begin another one"
        await rows_of(begin(talker))
        assert await refusal(talker.undo(0)) == "no message to undo"
        before = (await rows_of(say(talker)))[-1]
        await rows_of(say(talker))
        assert await rows_of(talker.undo(0)) == [before]
        assert "is blank" in await refusal(talker.say(0, " "))
        assert "at most" in await refusal(talker.say(0, "x" * 200_000))
        assert "give a number from 1 to 16" in await refusal(talker.futures(0, 17))
        await rows_of(talker.begin(0, None))
        assert "has no task" in await refusal(talker.user(0))
        assert await refusal(talker.refuse(0, "no such task")) == "no such task"
        assert await refusal(say(talker)) == "there is no conversation; begin another one"

    asyncio.run(play())


def test_a_lost_chat_leaves_nothing_running() -> None:
    """The reader of the rows may go away in the middle of a turn."""

    async def play() -> None:
        rows = begin(talk_worker(StreamingPolicy("one two three four")))
        await anext(rows)
        await anext(rows)
        await rows.aclose()
        await asyncio.sleep(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
