"""Recorded calls: what is kept of them, how they are found, what a replay says of one that was not recorded."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.config import Config
from megatron_collab.llm.answer import Answer, AnswerTooLong, Field, LlmError
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.caller import ask_as
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.recording import SUFFIX, Call, CallKey, Recording, Shard, Usage
from megatron_collab.llm.tape import NotRecorded, Tape, open_tape
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import EndpointConfig
from tests.helpers import configured
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, says

FIELDS = [Field("said", str)]
QUESTION = [{"role": "system", "content": "You are a user."}, {"role": "user", "content": "What next?"}]
KEY = "sk-proj-0123456789abcdef0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def numbered(*, key: str = "") -> Reply:
    """An endpoint that never says the same twice."""
    count = iter(range(1000))

    async def reply(request: web.Request) -> web.StreamResponse:
        return await says({"said": f"{next(count)}{key}"})(request)

    return reply


def taped(folder: Path, **settings: Any) -> Tape:
    config = configured(Config(), {f"llm.{name}": value for name, value in settings.items()})
    tape = open_tape(config.llm, folder / "run")
    assert tape is not None
    return tape


def recorded(
    folder: Path, *replies: Reply, ask: Callable[[LlmClient, EndpointConfig], Awaitable[Any]], **changes: Any
) -> tuple[Any, EndpointConfig]:
    """What `ask` gives where its calls are recorded, and the endpoint, which is not there any more."""

    async def session() -> Any:
        async with Endpoint(*replies) as endpoint:
            config = endpoint.config(**{"attempts": 1, **changes})
            client = LlmClient(tape=taped(folder, record=f"{folder}/calls"), prices={"openai/m": [10, 100]})
            return await ask(client, config), config

    return asyncio.run(session())


def replay(
    folder: Path, endpoint: EndpointConfig, ask: Callable[[LlmClient, EndpointConfig], Awaitable[Any]], **options: Any
) -> Any:
    tape = taped(folder, replay=f"{folder}/calls", **options)
    return asyncio.run(ask(LlmClient(tape=tape), endpoint))  # type: ignore[arg-type]  # a coroutine


async def once(client: LlmClient, endpoint: EndpointConfig) -> Any:
    return await client.ask(endpoint, QUESTION, FIELDS)


def futures(order: list[int]) -> Callable[[LlmClient, EndpointConfig], Awaitable[dict[int, list[str]]]]:
    """Conversations that ask the same, each twice, begun in this order."""

    async def ask(client: LlmClient, endpoint: EndpointConfig) -> dict[int, list[str]]:
        async def future(number: int) -> list[str]:
            ask_as(f"train-0-0/0/{number}")
            return [(await client.ask(endpoint, QUESTION, FIELDS))["said"] for _ in range(2)]

        answers = await asyncio.gather(*(future(number) for number in order))
        return dict(zip(order, answers, strict=True))

    return ask


def test_equal_questions_get_the_answers_of_their_own_conversations(tmp_path: Path) -> None:
    """In whatever order they are asked, by one client or several."""
    answers, endpoint = recorded(tmp_path, numbered(), ask=futures([0, 1, 2]))
    assert len({text for texts in answers.values() for text in texts}) == 6
    assert replay(tmp_path, endpoint, futures([2, 0, 1])) == answers
    assert replay(tmp_path, endpoint, futures([1])) == {1: answers[1]}


def test_a_conversation_that_was_played_again_counts_as_the_last_time(tmp_path: Path) -> None:
    async def twice(client: LlmClient, endpoint: EndpointConfig) -> Any:
        return [await futures([0])(client, endpoint) for _ in range(2)]

    (_, last), endpoint = recorded(tmp_path, numbered(), ask=twice)
    assert replay(tmp_path, endpoint, futures([0])) == last


def test_a_call_says_what_it_took(tmp_path: Path) -> None:
    recorded(tmp_path, says("no JSON"), says({"said": "yes"}), ask=once, attempts=2)
    folder = tmp_path / "calls"
    (shard,) = folder.glob(f"*{SUFFIX}")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, shard)] == [0o700, 0o600]
    recording = Recording(folder)
    call = recording.stored(0).call()
    assert (len(recording), recording.runs, recording.torn) == (1, {f"{tmp_path}/run"}, [])
    assert call.answer == {"said": "yes", "<text>": '{"said": "yes"}', "<version>": "m"} and call.failed is None
    assert call.question["messages"] == QUESTION, "as it was asked, without the corrections"
    usage = call.taken
    assert (usage.prompt_tokens, usage.answer_tokens, usage.requests, usage.version) == (200, 40, 2, "m")
    assert usage.usd == pytest.approx((200 * 10 + 40 * 100) * 1e-6) and usage.seconds > 0 and not usage.cached


def test_failures_are_replayed_as_they_were(tmp_path: Path) -> None:
    async def failing(client: LlmClient, endpoint: EndpointConfig) -> Any:
        with pytest.raises(LlmError) as error:
            await once(client, endpoint)
        return type(error.value), str(error.value), error.value.answer

    outcome, endpoint = recorded(tmp_path, fails(400, f"bad request with {KEY}"), ask=failing)
    assert "bad request with ***" in outcome[1]
    assert replay(tmp_path, endpoint, failing) == outcome
    long, endpoint = recorded(tmp_path / "long", says("x" * (1 << 20) + "x"), ask=failing)
    assert long[0] is AnswerTooLong
    assert replay(tmp_path / "long", endpoint, failing) == long
    unusable, endpoint = recorded(tmp_path / "unusable", says(f"no JSON, {KEY}"), ask=failing)
    assert unusable[2] == "no JSON, ***"
    assert replay(tmp_path / "unusable", endpoint, failing) == unusable

    arrived = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        arrived.set()
        return await hangs()(request)

    async def impatient(client: LlmClient, endpoint: EndpointConfig) -> None:
        task = asyncio.create_task(once(client, endpoint))
        await arrived.wait()
        task.cancel()
        await asyncio.wait([task])

    _, endpoint = recorded(tmp_path / "cut", hang, ask=impatient)
    assert replay(tmp_path / "cut", endpoint, failing) == (LlmError, "openai/m: cut off while it was recorded", "")


def test_the_text_of_an_answer_is_replayed_as_it_was(tmp_path: Path) -> None:
    async def judged(client: LlmClient, endpoint: EndpointConfig) -> Any:
        return await client.answer(endpoint, QUESTION, FIELDS, sample="0")

    text = f'My answer: {{"said": "yes"}} {KEY}'
    answer, endpoint = recorded(tmp_path, says(text), ask=judged)
    assert answer == Answer({"said": "yes"}, 'My answer: {"said": "yes"} ***', "m")
    assert replay(tmp_path, endpoint, judged) == answer


def test_a_recording_of_an_earlier_version_lacks_texts(tmp_path: Path) -> None:
    async def judged(client: LlmClient, endpoint: EndpointConfig) -> Any:
        return await client.answer(endpoint, QUESTION, FIELDS)

    _, endpoint = recorded(tmp_path, says({"said": "yes"}), ask=judged)
    stored = Recording(tmp_path / "calls").stored(0)
    old = Shard(tmp_path / "old" / "calls", "run")
    old.append(stored.containing(replace(stored.call(), answer={"said": "yes"})))
    assert replay(tmp_path / "old", endpoint, judged) == Answer({"said": "yes"}, "")


def test_no_key_is_recorded_and_the_run_goes_on_with_what_is(tmp_path: Path) -> None:
    async def leaking(client: LlmClient, endpoint: EndpointConfig) -> Any:
        return await client.ask(endpoint, [{"role": "user", "content": f"my key is {KEY}"}], FIELDS)

    answer, endpoint = recorded(tmp_path, numbered(key=f" {KEY}"), ask=leaking)
    assert answer == {"said": "0 ***"}
    call = Recording(tmp_path / "calls").stored(0).call()
    assert KEY not in str(call) and call.question["messages"][0]["content"] == "my key is ***"
    assert "api_base" not in call.question
    assert replay(tmp_path, endpoint, leaking) == answer


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"temperature": 0.5}, "temperature: 0.5, recorded 0.0"),
        ({"model": "openai/n"}, 'model: "openai/n", recorded "openai/m"'),
        ({"extra": {"seed": 1}}, 'extra: {"seed": 1}, recorded null'),
    ],
)
def test_a_call_that_was_not_recorded_names_the_nearest(tmp_path: Path, changed: Any, differs: str) -> None:
    _, endpoint = recorded(tmp_path, numbered(), ask=once)
    assert differs in missed(tmp_path, EndpointConfig(**{**vars(endpoint), **changed}))


def missed(folder: Path, endpoint: EndpointConfig, messages: list[dict[str, str]] = QUESTION, name: str = "") -> str:
    async def ask_question(client: LlmClient, endpoint: EndpointConfig) -> Any:
        ask_as(name)
        return await client.ask(endpoint, messages, FIELDS)

    with pytest.raises(NotRecorded) as error:
        replay(folder, endpoint, ask_question)
    message = str(pickle.loads(pickle.dumps(error.value)))  # as Ray does
    assert message.startswith(f"llm.replay={folder}/calls: no recorded call matches (caller: ") and "\n" not in message
    assert message.endswith(
        "replay with the settings and data of the recorded run, or set llm.replay_missing=live to call the model"
    )
    return message


def test_the_nearest_call_is_of_the_same_conversation_and_says_which_message_differs(tmp_path: Path) -> None:
    async def named(client: LlmClient, endpoint: EndpointConfig) -> None:
        for name, last in (("a/0/0", "What next?"), ("b/0/0", "What nix?"), ("b/0/0", "no")):
            ask_as(name)
            await client.ask(endpoint, [QUESTION[0], {"role": "user", "content": last}], FIELDS)

    _, endpoint = recorded(tmp_path, numbered(), ask=named)
    message = missed(tmp_path, endpoint, name="b/0/0")
    assert '(caller: b/0/0) differs in message 2 (user) from character 7 on: "ext?", recorded "ix?";' in message
    assert "(caller: a/0/0) differs in the caller;" in missed(tmp_path, endpoint, name="c/0/0")
    more = [*QUESTION, {"role": "user", "content": "And?"}]
    assert "differs in the number of messages: 3, recorded 2;" in missed(tmp_path, endpoint, more, "a/0/0")


def test_what_was_not_recorded_may_go_live_and_is_counted(tmp_path: Path) -> None:
    answers, _ = recorded(tmp_path, numbered(), ask=futures([0]))

    async def session() -> None:
        async with Endpoint(numbered(key=" live")) as endpoint:
            tape = taped(tmp_path, replay=f"{tmp_path}/calls", replay_missing="live", record=f"{tmp_path}/more")
            client = LlmClient(tape=tape)
            replayed = await futures([0, 1])(client, endpoint.config())
            assert replayed[0] == answers[0] and replayed[1] == ["0 live", "1 live"]
            assert len(endpoint.requests) == 2
            counts = tape.take_counters()
            assert (counts["llm/replayed"], counts["llm/live"]) == (2, 2)
            assert counts["llm/replayed_usd"] == pytest.approx(2 * (100 * 10 + 20 * 100) * 1e-6)
            assert tape.take_counters() == {}

    asyncio.run(session())
    assert len(Recording(tmp_path / "more")) == 2, "those that went live"
    both = Recording(tmp_path / "calls", tmp_path / "more")
    assert len(both) == 4


@pytest.mark.seconds
def test_a_replay_may_take_its_time(tmp_path: Path) -> None:
    async def timed(client: LlmClient, endpoint: EndpointConfig) -> float:
        began = asyncio.get_running_loop().time()
        await once(client, endpoint)
        return asyncio.get_running_loop().time() - began

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await says({"said": "yes"})(request)

    _, endpoint = recorded(tmp_path, slow, ask=timed)
    seconds = Recording(tmp_path / "calls").stored(0).call().taken.seconds
    assert replay(tmp_path, endpoint, timed, replay_latency=2.0) >= 2 * seconds >= 0.4


def test_the_answers_of_a_cache_are_recorded_and_those_of_judges_serve_every_conversation(tmp_path: Path) -> None:
    async def judged(client: LlmClient, endpoint: EndpointConfig) -> list[str]:
        client._cache = Cache(tmp_path / "cache")
        answers = []
        for name in ("a", "b"):
            ask_as(name)
            answers.append((await client.ask(endpoint, QUESTION, FIELDS, sample="0"))["said"])
        return answers

    answers, endpoint = recorded(tmp_path, numbered(), ask=judged)
    assert answers == ["0", "0"]
    calls = Recording(tmp_path / "calls")
    assert [calls.stored(number).call().taken.cached for number in range(2)] == [False, True]

    async def other_conversation(client: LlmClient, endpoint: EndpointConfig) -> Any:
        ask_as("c")
        return await client.ask(endpoint, QUESTION, FIELDS, sample="0")

    assert replay(tmp_path, endpoint, other_conversation) == {"said": "0"}


def test_replies_of_an_assistant_and_policies_and_served_models(tmp_path: Path) -> None:
    """The policy is asked itself: what it says depends on its weights. A served model is known by its name."""

    async def replies(client: LlmClient, endpoint: EndpointConfig) -> Any:
        return await client.reply(endpoint, QUESTION)

    reply, endpoint = recorded(tmp_path, says("hello"), ask=replies)
    assert reply.text == "hello" and replay(tmp_path, endpoint, replies) == reply

    async def session() -> None:
        async with Endpoint(numbered()) as policy:
            base = f"http://127.0.0.1:{policy.port}/v1"
            for settings in ({"record": f"{tmp_path}/policy"}, {"replay": f"{tmp_path}/calls"}):
                client = LlmClient(keys={base: "key"}, tape=taped(tmp_path, **settings))
                await client.ask(EndpointConfig(model="policy/a/0/0", api_base=base), QUESTION, FIELDS)
            assert len(policy.requests) == 2 and not (tmp_path / "policy").exists()

    asyncio.run(session())
    shard = Shard(tmp_path / "calls", "run")
    question = {"model": "served/helper", "temperature": 0.0, "max_tokens": 2048, "messages": QUESTION}
    question |= {"schema": None, "sample": None}
    shard.record(CallKey("", 0, question), Call("", 0, 1.0, question, ["from served", 2, "stop"], None, Usage()))
    helper = EndpointConfig(model="served/helper/train-0-0/0/0")
    assert replay(tmp_path, helper, replies).text == "from served", "with no server there"


def make_shard(folder: Path, calls: int) -> Path:
    shard = Shard(folder, "run")
    for number in range(calls):
        call_key = CallKey("a", number, {"model": "m", "messages": []})
        shard.record(call_key, Call("a", number, float(number), dict(call_key.question), {"n": number}, None, Usage()))
    return shard.file


@pytest.mark.parametrize("remaining", ["content", "head", "line", "nothing"])
def test_a_torn_shard_is_read_up_to_the_tear_and_named(tmp_path: Path, remaining: str) -> None:
    file = make_shard(tmp_path, 3)
    content = file.read_bytes()
    size = (len(content) - content.index(b"\n") - 1) // 3
    kept = {"content": len(content) - 5, "head": len(content) - size + 9, "line": 7, "nothing": 0}[remaining]
    os.truncate(file, kept)
    recording = Recording(tmp_path)
    calls = 2 if kept > 100 else 0
    assert len(recording) == calls
    assert recording.torn == [f"{file}: ends in the middle of a call; complete calls: {calls}"]
    assert recording.find(CallKey("a", 0, {"model": "m", "messages": []})) is not None or not calls
    make_shard(tmp_path, 1)
    assert len(Recording(tmp_path)) == calls + 1, "a resumed run writes another shard"


def test_what_is_damaged_or_no_recording_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no recorded calls"):
        Recording(tmp_path)
    file = make_shard(tmp_path, 2)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    recording = Recording(tmp_path)
    keys = [CallKey("a", number, {"model": "m", "messages": []}) for number in range(2)]
    first = recording.find(keys[0])
    assert first is not None and first.answer == {"n": 0}
    with pytest.raises(ValueError, match="a recorded call is damaged"):
        recording.find(keys[1])
    with pytest.raises(RunStopped, match="damaged"):
        asyncio.run(_replayed(tmp_path))
    for line, why in ((b"{}", "not a shard"), (json.dumps({"format": 2, "run": ""}).encode(), "has format 2")):
        file.write_bytes(line + b"\n")
        with pytest.raises(ValueError, match=why):
            Recording(tmp_path)
    with pytest.raises(RunStopped, match=f"llm.replay={tmp_path}: .*has format 2"):
        taped(tmp_path, replay=str(tmp_path))


async def _replayed(folder: Path) -> None:
    async def never(usage: Usage) -> None:
        raise AssertionError

    tape = taped(folder, replay=str(folder))
    ask_as("a")
    for _ in range(2):
        await tape.answer({"model": "m", "messages": []}, never)
