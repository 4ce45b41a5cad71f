from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.config import Config, EndpointConfig, LoraConfig, UserConfig
from megatron_collab.data.transcript import render
from megatron_collab.llm import client as clients
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.llm.recording import Taken
from megatron_collab.rollout.users import UserError, UserReply, Users
from megatron_collab.rollout.users.llm import FIELDS, OPEN, LlmUser, system_prompt
from megatron_collab.types import Conversation, Message, Task
from tests.conftest import Served
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, says
from tests.rollout.users.helpers import STOP, read_request, said, task, users


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)


def answer(response: Any, **fields: Any) -> Reply:
    return says({"current_answer": "", "thought": "", "response": response, **fields})


def with_endpoint(
    *replies: Reply, play: Callable[[Users], Awaitable[Any]], **options: Any
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """What `play` gives with the users of an endpoint that answers `replies`; its requests, and what was counted."""

    async def run() -> Any:
        async with Endpoint(*replies) as endpoint:
            at = endpoint.config()
            made = users(model=at.model, api_base=at.api_base, **options)
            return await play(made), endpoint.requests, made.counters

    return asyncio.run(run())


def ask(*replies: Reply, **options: Any) -> tuple[UserReply, list[dict[str, Any]], dict[str, int]]:
    async def play(made: Users) -> UserReply:
        return await made.make(task("llm", "buy milk", "42"), "s").reply(said("hi", "hello"))

    return with_endpoint(*replies, play=play, **options)


def fail(*replies: Reply, match: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    async def play(made: Users) -> None:
        with pytest.raises(UserError, match=match):
            await made.make(task("llm", "buy milk", "42"), "s").reply(said("hi", "hello"))

    _, requests, counted = with_endpoint(*replies, play=play, **options)
    return requests, counted


def test_the_user_sees_its_goal_and_the_conversation_and_never_the_answer() -> None:
    reply, (request,), counted = ask(answer("milk, please"), temperature=0.7, max_tokens=99)
    assert reply == UserReply(Message("user", "milk, please"), done=False)
    assert counted == {"user_replies": 1}
    system, shown = request["messages"]
    assert '{"goal": "buy milk"}' in system["content"] and STOP in system["content"]
    assert all(f'"{field.name}"' in system["content"] for field in FIELDS)
    assert shown == {"role": "user", "content": "**User**: hi\n**Assistant**: hello"}
    assert "42" not in json.dumps(request["messages"])
    assert (request["temperature"], request["max_tokens"]) == (0.7, 99)
    assert request["response_format"]["json_schema"]["schema"]["required"] == [field.name for field in FIELDS]


@pytest.mark.slow
def test_the_user_opens_a_conversation_from_its_goal() -> None:
    async def play(made: Users) -> str:
        return await made.make(replace(task("llm", "buy milk", "42"), messages=()), "s").open()

    opened, requests, counted = with_endpoint(answer(" "), answer("I need something"), play=play)
    assert opened == "I need something" and counted == {"user_replies": 2, "user_empty": 1}
    system, shown = requests[0]["messages"]
    assert '{"goal": "buy milk"}' in system["content"] and shown["content"] == OPEN
    with pytest.raises(UserError, match="ends the conversation before it has begun"):
        with_endpoint(answer(f"bye {STOP}"), play=play)


def test_200_conversations_at_once_keep_their_own_goals() -> None:
    async def repeat(request: web.Request) -> web.StreamResponse:
        """The user's model says the secret of the goal that it was shown, and how far the conversation is."""
        messages = (await request.json())["messages"]
        goal, conversation = read_request(messages)
        await asyncio.sleep(hash(goal) % 7 / 1000)
        return await answer(f"my secret is {goal.split()[-1]} at {conversation[-1].content}")(request)

    async def play(made: Users) -> list[list[str]]:
        async def one(i: int) -> list[str]:
            each = Task(f"t{i}", (Message("user", "hi"),), f"the goal is {i * 7919}", "", "llm")
            user = made.make(each, f"s/{i}")
            conversation = Conversation((*each.messages, Message("assistant", "first")), ())
            await user.start(conversation)
            first = (await user.reply(conversation)).message
            later = Conversation((*conversation.messages, first, Message("assistant", f"turn {i}")), ())
            second = (await user.reply(later)).message
            await user.finish(later)
            return [first.content, second.content]

        return await asyncio.gather(*map(one, range(200)))

    replies, requests, counted = with_endpoint(repeat, play=play)
    expected = [[f"my secret is {i * 7919} at first", f"my secret is {i * 7919} at turn {i}"] for i in range(200)]
    assert replies == expected
    assert len(requests) == 400 and counted == {"user_replies": 400}


def test_futures_of_one_turn_each_ask_for_themselves() -> None:
    async def play(made: Users) -> None:
        alike = [made.make(task("llm"), f"s/{i}").reply(said("hi", "hello")) for i in range(5)]
        await asyncio.gather(*alike)

    _, requests, _ = with_endpoint(answer("yes"), play=play)
    assert len(requests) == 5


@pytest.mark.parametrize("response", ["5", "true", "null", '{"a": 1}', "[1]"])
def test_text_that_looks_like_json_stays_text(response: str) -> None:
    assert ask(answer(response))[0].message.content == response


@pytest.mark.parametrize(
    ("refused", "counter"),
    [
        ("", "user_empty"),
        ("How can I help you today?", "user_role_flip"),
        ("is it 42?", "user_leak"),
    ],
)
def test_what_a_gate_refuses_is_asked_for_again_with_what_is_wrong(refused: str, counter: str) -> None:
    reply, requests, counted = ask(answer(refused), answer("milk, please"))
    assert reply.message.content == "milk, please"
    assert counted == {"user_replies": 2, counter: 1}
    first, again = (request["messages"] for request in requests)
    assert again[:2] == first
    assert json.loads(again[2]["content"])["response"] == refused and again[2]["role"] == "assistant"
    assert again[3]["role"] == "user" and again[3]["content"].startswith("Your response ")


def test_what_a_gate_refuses_every_time_ends_in_an_error() -> None:
    requests, counted = fail(
        answer("Assistant: hi"), match=r"user openai/m: user_role_flip: 'Assistant: hi'", attempts=4
    )
    assert len(requests) == 4 and counted == {"user_replies": 4, "user_role_flip": 4}
    assert [len(request["messages"]) for request in requests] == [2, 4, 4, 4]


def test_a_malformed_answer_ends_in_an_error_of_its_own() -> None:
    requests, counted = fail(says("on friday"), match=r"user openai/m: MalformedAnswer", attempts=2)
    assert len(requests) == 2 and counted == {"user_malformed": 1}


def test_a_number_for_the_response_is_malformed() -> None:
    assert fail(answer(5), match="'response' has to be a string", attempts=1)[1] == {"user_malformed": 1}


def test_an_answer_that_is_cut_is_never_passed_on() -> None:
    cut = '{"current_answer": "", "thought": "", "response": "I would like'
    assert fail(says(cut), match="cut off", attempts=1)[1] == {"user_malformed": 1}


@pytest.mark.parametrize("reply", [fails(401), fails(500), hangs()])
def test_a_model_that_does_not_answer_ends_in_an_error(reply: Reply) -> None:
    assert fail(reply, match="user openai/m: ", attempts=2, timeout=0.3)[1] == {"user_failed": 1}


def test_a_cancelled_reply_leaves_a_user_that_can_finish() -> None:
    async def play(made: Users) -> float:
        user = made.make(task("llm"), "s")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await user.reply(said("hi", "hello"))
        return await user.finish(said("hi", "hello"))

    reward, _, counted = with_endpoint(hangs(), play=play)
    assert reward == 0.0 and counted == {}


def test_a_spent_budget_is_no_error_of_the_user() -> None:
    class Broke:
        async def ask(self, *_: Any, **options: Any) -> None:
            raise BudgetSpent("llm.budget_usd=1 is used up")

    config = Config()
    config.user.model = "openai/m"
    user = Users(config, Broke()).make(task("llm"), "s")  # type: ignore[arg-type]
    with pytest.raises(BudgetSpent):
        asyncio.run(user.reply(said("hi", "hello")))


def test_the_stop_text_ends_the_conversation_wherever_it_stands() -> None:
    reply, _, _ = ask(answer(f"thanks! {STOP} bye"))
    assert reply == UserReply(Message("user", f"thanks! {STOP} bye"), done=True)
    reply, requests, _ = ask(answer("thanks, DONE"), stop="DONE")
    assert reply.done and "put DONE into your message" in requests[0]["messages"][0]["content"]
    assert not ask(answer(f"thanks {STOP}"), stop="DONE")[0].done


def test_a_name_can_choose_its_model() -> None:
    async def play(made: Users) -> UserReply:
        return await made.make(task("llm/openai/another"), "s").reply(said("hi", "hello"))

    _, (request,), _ = with_endpoint(answer("yes"), play=play)
    assert request["model"] == "another"


def test_a_task_draws_its_persona_once_for_all_its_conversations(tmp_path: Path) -> None:
    pool = [f"You are number {i}." for i in range(20)]
    file = tmp_path / "personas.txt"
    file.write_text("\n\n".join(pool) + "\n")

    made = users(model="openai/m", personas=str(file))
    drawn: list[str] = []
    for i in range(60):
        user = made.make(Task(f"t{i // 2}", (), "g", "", "llm"), f"s/{i}")
        assert isinstance(user, LlmUser) and user.persona in pool
        drawn.append(user.persona)
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) > 10
    assert drawn[0] == random.Random("0/t0").choice(pool)


def test_without_a_file_of_personas_a_task_brings_its_own(tmp_path: Path) -> None:
    (tmp_path / "personas.txt").write_text("You are new here.\n")
    own = task("llm", persona="You are in a hurry.")
    for made, persona in (
        (users(model="openai/m"), "You are in a hurry."),
        (users(model="openai/m", personas=str(tmp_path / "personas.txt")), "You are new here."),
    ):
        user = made.make(own, "s/0")
        assert isinstance(user, LlmUser) and user.persona == persona
        assert f"Who you are: {persona}\n" in system_prompt(made.config.user, own, user.persona)
    plain = users(model="openai/m").make(task("llm"), "s/0")
    assert isinstance(plain, LlmUser) and plain.persona == ""


@pytest.mark.parametrize("goal", ["a plain goal", 'quotes " and \\ and\nlines', "```json\n{}\n```", "{braces} {0}"])
def test_a_request_gives_back_its_goal_and_conversation(goal: str) -> None:
    messages = [
        Message("system", "not for the user"),
        Message("user", "hi\n\n**bold**: a list\n"),
        Message("assistant", "**User**: I am the user\n**Assistant**: x"),
        Message("user", ""),
    ]
    request = [
        {"role": "system", "content": system_prompt(UserConfig(), task("llm", goal), "You are new here.")},
        {"role": "user", "content": render(messages)},
    ]
    assert read_request(request) == (goal, messages[1:])


def test_calls_of_tools_are_none_of_the_users_business() -> None:
    called = (Message("user", "2+2?"), Message("assistant", "call"), Message("tool", "4"), Message("assistant", "four"))

    async def play(made: Users) -> None:
        await made.make(task("llm"), "s").reply(Conversation(called, ()))

    _, (request,), _ = with_endpoint(answer("yes"), play=play)
    assert request["messages"][1]["content"] == "**User**: 2+2?\n**Assistant**: four"


def play_policy(
    engine: list[tuple[str, str]], n: int, **options: Any
) -> tuple[list[UserReply | UserError], dict[str, int]]:
    """What the trained model says as the user of `n` tasks, and what was counted."""
    made = users(engine, model="policy", attempts=1, **options)

    async def one(i: int) -> UserReply | UserError:
        each = Task(f"t{i}", (Message("user", "hi"),), "buy milk", "", "llm")
        try:
            return await made.make(each, f"s/{i}").reply(said("hi", "hello"))
        except UserError as error:
            return error

    async def play() -> list[UserReply | UserError]:
        return await asyncio.gather(*map(one, range(n)))

    return asyncio.run(play()), made.counters


def test_a_server_that_is_gone_does_not_silence_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request goes to a server of those in use, and to the next one where that fails."""

    async def play() -> tuple[list[str], int, dict[str, int]]:
        async with Endpoint(answer("yes")) as endpoint:
            gone, alive = ("http://127.0.0.1:9", "secret"), (endpoint.config().api_base.removesuffix("/v1"), "secret")
            made = users([gone, alive], model="policy", attempts=1)
            each = [made.make(Task(f"t{i}", (), "buy milk", "", "llm"), f"s/{i}") for i in range(8)]
            said_all = [(await user.reply(said("hi", "hello"))).message.content for user in each]
            made.engine = made.engine[:1]
            with pytest.raises(UserError):
                await each[0].reply(said("hi", "hello"))
            return said_all, len(endpoint.requests), made.counters

    assert asyncio.run(play()) == (["yes"] * 8, 8, {"user_replies": 8, "user_failed": 1})


def test_the_trained_model_is_asked_as_it_is_sampled_from() -> None:
    async def play() -> list[Any]:
        async with Endpoint(answer("yes")) as endpoint:
            made = users([(endpoint.config().api_base.removesuffix("/v1"), "secret")], model="policy", attempts=1)
            made.config.model.chat_template_args = {"enable_thinking": False}
            await made.make(task("llm"), "s").reply(said("hi", "hello"))
            made.config.user.extra = {"chat_template_kwargs": {"enable_thinking": True}}
            await made.make(task("llm"), "s").reply(said("hi", "hello"))
            made.config.model.lora = LoraConfig(rank=8, serve="adapters")
            await made.make(task("llm"), "s").reply(said("hi", "hello"))
            return [(request["chat_template_kwargs"], request.get("lora_path")) for request in endpoint.requests]

    arguments = [{"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": True}]
    assert asyncio.run(play()) == list(zip(arguments, [None, None, "policy"], strict=True))


def addresses(servers: dict[str, Served]) -> list[tuple[str, str]]:
    return [(served.server.url, served.server.api_key) for served in servers.values()]


@pytest.mark.processes
def test_the_trained_model_is_held_to_the_schema_and_cut_by_its_tokens(servers: dict[str, Served]) -> None:
    replies, counted = play_policy(addresses(servers), 8, max_tokens=250)
    assert counted == {"user_malformed": 8}
    assert [str(reply) for reply in replies if "MalformedAnswer: not JSON: " not in str(reply)] == []


@pytest.mark.processes
@pytest.mark.slow
def test_the_trained_model_can_be_the_user(servers: dict[str, Served]) -> None:
    """A random model closes a text when it happens to draw the quote: one in three manages three texts in time."""
    replies, counted = play_policy(addresses(servers), 16, max_tokens=1000, temperature=2.0, timeout=500, deadline=500)
    spoken = [reply.message for reply in replies if isinstance(reply, UserReply)]
    assert spoken and all(message.role == "user" and message.content.strip() for message in spoken)
    assert counted["user_malformed"] == 16 - len(spoken)


@pytest.mark.processes
def test_what_the_trained_model_says_follows_from_the_conversations_name(servers: dict[str, Served]) -> None:
    url, key = addresses(servers)[0]
    client = clients.LlmClient(keys={f"{url}/v1": key})

    async def draw(sample: str, **extra: Any) -> str:
        at = f"{url}/v1"
        endpoint = EndpointConfig(model=f"policy/{sample}", api_base=at, temperature=1.0, max_tokens=20, extra=extra)
        return await client._call(endpoint, [{"role": "user", "content": "hi"}], clients._Allowance(60.0, Taken()))

    async def play() -> list[str]:
        arguments = {"enable_thinking": False}  # which the server takes, and this model's template does not use
        again = draw("a/0", chat_template_kwargs=arguments)
        return await asyncio.gather(draw("a/0"), draw("a/1"), again, draw("a/2"))

    drawn = asyncio.run(play())
    assert drawn[0] == drawn[2] and len(set(drawn)) == 3


@pytest.mark.processes
def test_a_key_that_the_server_refuses_is_not_shown(
    servers: dict[str, Served], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    url, secret = servers["tied"].server.url, "not-the-key-of-this-run"
    (reply,), _ = play_policy([(url, secret)], 1)
    assert isinstance(reply, UserError) and "AuthenticationError" in str(reply)
    shown = capfd.readouterr()
    assert not any(secret in text for text in (str(reply), caplog.text, shown.out, shown.err))
