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

from megatron_collab.config import Config
from megatron_collab.data.transcript import render
from megatron_collab.inference import adapters
from megatron_collab.launch.play_specs import user_directory
from megatron_collab.llm import client as clients
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.llm.recording import Usage
from megatron_collab.rollout.users import UserError, UserReply, Users
from megatron_collab.rollout.users.llm import FIELDS, OPEN, LlmUser, system_prompt
from megatron_collab.settings import EndpointConfig, UserConfig
from megatron_collab.settings.schema import CHAT, USER_MODEL
from megatron_collab.types import Conversation, Message, Task
from tests.conftest import Served
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, says
from tests.rollout.users.helpers import STOP, dialogue, make_users, read_request, task


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)


def answer(response: Any, **fields: Any) -> Reply:
    return says({"current_answer": "", "thought": "", "response": response, **fields})


def with_endpoint(
    *replies: Reply, play: Callable[[Users], Awaitable[Any]], **options: Any
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """The result of `play` with users whose endpoint answers `replies`, the endpoint's requests, and the counters."""

    async def run() -> Any:
        async with Endpoint(*replies) as endpoint:
            at = endpoint.config()
            users = make_users(model=at.model, api_base=at.api_base, **options)
            return await play(users), endpoint.requests, users.counters

    return asyncio.run(run())


def ask(*replies: Reply, **options: Any) -> tuple[UserReply, list[dict[str, Any]], dict[str, int]]:
    async def play(users: Users) -> UserReply:
        return await users.make(task("llm", "buy milk", "42"), "s").reply(dialogue("hi", "hello"))

    return with_endpoint(*replies, play=play, **options)


def fail(*replies: Reply, match: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    async def play(users: Users) -> None:
        with pytest.raises(UserError, match=match):
            await users.make(task("llm", "buy milk", "42"), "s").reply(dialogue("hi", "hello"))

    _, requests, counted = with_endpoint(*replies, play=play, **options)
    return requests, counted


@pytest.mark.seconds
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


def test_what_the_user_keeps_to_itself_is_noted_and_shown_to_nobody(tmp_path: Path) -> None:
    """Not even to the model in its next turn; a rejected message leaves no notes, and the persona is noted once."""
    (tmp_path / "people.txt").write_text("a nurse\n")
    first = {"thought": "lacks the amount", "current_answer": "milk"}

    async def play(users: Users) -> list[Message]:
        user, begun = users.make(task("llm", "buy milk", "42"), "s"), dialogue("hi", "hello")
        first_message = (await user.reply(begun)).message
        later = Conversation((*begun.messages, first_message, Message("assistant", "how much?")), ())
        return [first_message, (await user.reply(later)).message]

    replies = answer(" ", thought="rejected"), answer("milk, please", **first), answer("two", thought="enough")
    messages, requests, _ = with_endpoint(*replies, play=play, personas=str(tmp_path / "people.txt"))
    assert [message.private for message in messages] == [
        {"persona": "a nurse", **first},
        {"thought": "enough", "current_answer": ""},
    ]
    assert "lacks the amount" not in json.dumps(requests[-1]["messages"])


@pytest.mark.slow
def test_the_user_opens_a_conversation_from_its_goal() -> None:
    async def play(users: Users) -> str | Message:
        return await users.make(replace(task("llm", "buy milk", "42"), messages=()), "s").open()

    opened, requests, counted = with_endpoint(answer(" "), answer("I need something"), play=play)
    assert (
        opened == Message("user", "I need something")
        and "thought" in opened.private
        and counted == {"user_replies": 2, "user_empty": 1}
    )
    system, shown = requests[0]["messages"]
    assert '{"goal": "buy milk"}' in system["content"] and shown["content"] == OPEN
    with pytest.raises(UserError, match="ended the conversation before it began"):
        with_endpoint(answer(f"bye {STOP}"), play=play)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.processes, pytest.mark.slow])])
def test_conversations_at_once_keep_their_own_goals(count: int) -> None:
    async def repeat(request: web.Request) -> web.StreamResponse:
        """The user's model repeats the secret of the goal in its prompt, and the last message of the conversation."""
        messages = (await request.json())["messages"]
        goal, conversation = read_request(messages)
        await asyncio.sleep(hash(goal) % 7 / 1000)
        return await answer(f"my secret is {goal.split()[-1]} at {conversation[-1].content}")(request)

    async def play(users: Users) -> list[list[str]]:
        async def converse(i: int) -> list[str]:
            new_task = Task(f"t{i}", (Message("user", "hi"),), f"the goal is {i * 7919}", "", "llm")
            user = users.make(new_task, f"s/{i}")
            conversation = Conversation((*new_task.messages, Message("assistant", "first")), ())
            await user.start(conversation)
            first = (await user.reply(conversation)).message
            later = Conversation((*conversation.messages, first, Message("assistant", f"turn {i}")), ())
            second = (await user.reply(later)).message
            await user.finish(later)
            return [first.content, second.content]

        return await asyncio.gather(*map(converse, range(count)))

    replies, requests, counted = with_endpoint(repeat, play=play)
    expected = [[f"my secret is {i * 7919} at first", f"my secret is {i * 7919} at turn {i}"] for i in range(count)]
    assert replies == expected
    assert len(requests) == 2 * count and counted == {"user_replies": 2 * count}


def test_futures_of_one_turn_each_ask_for_themselves() -> None:
    async def play(users: Users) -> None:
        alike = [users.make(task("llm"), f"s/{i}").reply(dialogue("hi", "hello")) for i in range(5)]
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
def test_a_refused_message_is_requested_again_with_the_reason(refused: str, counter: str) -> None:
    reply, requests, counted = ask(answer(refused), answer("milk, please"))
    assert reply.message.content == "milk, please"
    assert counted == {"user_replies": 2, counter: 1}
    first, second = (request["messages"] for request in requests)
    assert second[:2] == first
    assert json.loads(second[2]["content"])["response"] == refused and second[2]["role"] == "assistant"
    assert second[3]["role"] == "user" and second[3]["content"].startswith("Your response ")


def test_a_message_refused_at_every_attempt_ends_in_an_error() -> None:
    requests, counted = fail(
        answer("Assistant: hi"), match=r"user openai/m: user_role_flip: 'Assistant: hi'", attempts=4
    )
    assert len(requests) == 4 and counted == {"user_replies": 4, "user_role_flip": 4}
    assert [len(request["messages"]) for request in requests] == [2, 4, 4, 4]


def test_malformed_answers_end_in_their_own_error() -> None:
    requests, counted = fail(says("on friday"), match=r"user openai/m: MalformedAnswer", attempts=2)
    assert len(requests) == 2 and counted == {"user_malformed": 1}


def test_a_number_for_the_response_is_malformed() -> None:
    assert fail(answer(5), match="'response' has to be a string", attempts=1)[1] == {"user_malformed": 1}


def test_a_truncated_answer_is_malformed() -> None:
    cut = '{"current_answer": "", "thought": "", "response": "I would like'
    assert fail(says(cut), match="cut off", attempts=1)[1] == {"user_malformed": 1}


@pytest.mark.seconds
@pytest.mark.parametrize("reply", [fails(401), fails(500), hangs()])
def test_a_model_that_does_not_answer_ends_in_an_error(reply: Reply) -> None:
    assert fail(reply, match="user openai/m: ", attempts=2, timeout=0.3)[1] == {"user_failed": 1}


@pytest.mark.seconds
def test_a_cancelled_reply_leaves_a_user_that_can_finish() -> None:
    async def play(users: Users) -> float:
        user = users.make(task("llm"), "s")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await user.reply(dialogue("hi", "hello"))
        return await user.finish(dialogue("hi", "hello"))

    reward, _, counted = with_endpoint(hangs(), play=play)
    assert reward == 0.0 and counted == {}


def test_a_spent_budget_is_not_an_error_of_the_user() -> None:
    class Broke:
        async def ask(self, *_: Any, **options: Any) -> None:
            raise BudgetSpent("llm.budget_usd=1 is used up")

    config = Config()
    config.user.model = "openai/m"
    user = Users(user_directory(config), Broke()).make(task("llm"), "s")  # type: ignore[arg-type]
    with pytest.raises(BudgetSpent):
        asyncio.run(user.reply(dialogue("hi", "hello")))


def test_the_stop_text_ends_the_conversation_anywhere_in_a_message() -> None:
    reply, _, _ = ask(answer(f"thanks! {STOP} bye"))
    assert reply == UserReply(Message("user", f"thanks! {STOP} bye"), done=True)
    reply, requests, _ = ask(answer("thanks, DONE"), stop="DONE")
    assert reply.done and "put DONE into your message" in requests[0]["messages"][0]["content"]
    assert not ask(answer(f"thanks {STOP}"), stop="DONE")[0].done


def test_a_name_can_choose_its_model() -> None:
    async def play(users: Users) -> UserReply:
        return await users.make(task("llm/openai/another"), "s").reply(dialogue("hi", "hello"))

    _, (request,), _ = with_endpoint(answer("yes"), play=play)
    assert request["model"] == "another"


def test_a_task_draws_its_persona_once_for_all_its_conversations(tmp_path: Path) -> None:
    pool = [f"You are number {i}." for i in range(20)]
    file = tmp_path / "personas.txt"
    file.write_text("\n\n".join(pool) + "\n")

    users = make_users(model="openai/m", personas=str(file))
    drawn: list[str] = []
    for i in range(60):
        user = users.make(Task(f"t{i // 2}", (), "g", "", "llm"), f"s/{i}")
        assert isinstance(user, LlmUser) and user.persona in pool
        drawn.append(user.persona)
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) > 10
    assert drawn[0] == random.Random("0/t0").choice(pool)


def test_without_a_file_of_personas_a_task_brings_its_own(tmp_path: Path) -> None:
    (tmp_path / "personas.txt").write_text("You are new here.\n")
    hurried_task = task("llm", persona="You are in a hurry.")
    for users, persona in (
        (make_users(model="openai/m"), "You are in a hurry."),
        (make_users(model="openai/m", personas=str(tmp_path / "personas.txt")), "You are new here."),
    ):
        user = users.make(hurried_task, "s/0")
        assert isinstance(user, LlmUser) and user.persona == persona
        assert f"Who you are: {persona}\n" in system_prompt(users.settings, hurried_task, user.persona)
    plain = make_users(model="openai/m").make(task("llm"), "s/0")
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


def test_the_user_does_not_see_tool_calls() -> None:
    called = (Message("user", "2+2?"), Message("assistant", "call"), Message("tool", "4"), Message("assistant", "four"))

    async def play(users: Users) -> None:
        await users.make(task("llm"), "s").reply(Conversation(called, ()))

    _, (request,), _ = with_endpoint(answer("yes"), play=play)
    assert request["messages"][1]["content"] == "**User**: 2+2?\n**Assistant**: four"


def play_policy(
    engine: list[tuple[str, str]], n: int, **options: Any
) -> tuple[list[UserReply | UserError], dict[str, int]]:
    """Replies of the trained model as the user of `n` tasks, and the counters."""
    users = make_users(engine, model="policy", attempts=1, **options)

    async def converse(i: int) -> UserReply | UserError:
        new_task = Task(f"t{i}", (Message("user", "hi"),), "buy milk", "", "llm")
        try:
            return await users.make(new_task, f"s/{i}").reply(dialogue("hi", "hello"))
        except UserError as error:
            return error

    async def play() -> list[UserReply | UserError]:
        return await asyncio.gather(*map(converse, range(n)))

    return asyncio.run(play()), users.counters


@pytest.mark.seconds
def test_requests_go_to_the_next_server_if_one_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes to one of the servers in use, and to the next one if that fails."""

    async def play() -> tuple[list[str], int, dict[str, int]]:
        async with Endpoint(answer("yes")) as endpoint:
            gone, alive = ("http://127.0.0.1:9", "secret"), (endpoint.config().api_base.removesuffix("/v1"), "secret")
            users = make_users([gone, alive], model="policy", attempts=1)
            user_list = [users.make(Task(f"t{i}", (), "buy milk", "", "llm"), f"s/{i}") for i in range(8)]
            replies = [(await user.reply(dialogue("hi", "hello"))).message.content for user in user_list]
            users.engine = users.engine[:1]
            with pytest.raises(UserError):
                await user_list[0].reply(dialogue("hi", "hello"))
            return replies, len(endpoint.requests), users.counters

    assert asyncio.run(play()) == (["yes"] * 8, 8, {"user_replies": 8, "user_failed": 1})


def test_requests_to_the_trained_model_have_its_template_arguments_and_adapter() -> None:
    async def play() -> list[Any]:
        async with Endpoint(answer("yes")) as endpoint:
            users = make_users([(endpoint.config().api_base.removesuffix("/v1"), "secret")], model="policy", attempts=1)
            users.directory = replace(users.directory, template_args={"enable_thinking": False})
            await users.make(task("llm"), "s").reply(dialogue("hi", "hello"))
            users.settings.extra = {"chat_template_kwargs": {"enable_thinking": True}}
            await users.make(task("llm"), "s").reply(dialogue("hi", "hello"))
            users.adapter = adapters.NAME
            await users.make(task("llm"), "s").reply(dialogue("hi", "hello"))
            return [(request["chat_template_kwargs"], request.get("lora_path")) for request in endpoint.requests]

    arguments = [{"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": True}]
    assert asyncio.run(play()) == list(zip(arguments, [None, None, "policy"], strict=True))


def addresses(servers: dict[str, Served]) -> list[tuple[str, str]]:
    return [(served.server.url, served.server.api_key) for served in servers.values()]


@pytest.mark.processes
def test_the_trained_model_follows_the_schema_until_max_tokens(servers: dict[str, Served]) -> None:
    replies, counted = play_policy(addresses(servers), 8, max_tokens=250)
    assert counted == {"user_malformed": 8}
    assert [str(reply) for reply in replies if "MalformedAnswer: not JSON: " not in str(reply)] == []


@pytest.mark.processes
@pytest.mark.slow
def test_the_trained_model_can_be_the_user(servers: dict[str, Served]) -> None:
    """A random model closes a text when it draws the quote by chance: one in three closes three texts in time."""
    replies, counted = play_policy(addresses(servers), 16, max_tokens=1000, temperature=2.0, timeout=500, deadline=500)
    spoken = [reply.message for reply in replies if isinstance(reply, UserReply)]
    assert spoken and all(message.role == "user" and message.content.strip() for message in spoken)
    assert counted["user_malformed"] == 16 - len(spoken)


@pytest.mark.processes
def test_the_trained_model_can_be_the_user_in_a_chat(servers: dict[str, Served]) -> None:
    """Half of all tokens end a message here, since a random model ends none: it is empty, or stands as it is."""
    for form in (CHAT, USER_MODEL):
        ends = {"stop_token_ids": [*range(0, 1000, 2)]}
        replies, counted = play_policy(addresses(servers), 8, form=form, max_tokens=24, extra=ends)
        spoken = [reply.message for reply in replies if isinstance(reply, UserReply)]
        assert spoken and all(message.role == "user" and message.content for message in spoken)
        assert counted["user_replies"] == 8 and "user_failed" not in counted
        assert counted["user_empty"] + counted["user_cut"] == 8 - len(spoken)


@pytest.mark.processes
def test_samples_of_the_trained_model_are_seeded_by_the_conversation(servers: dict[str, Served]) -> None:
    url, key = addresses(servers)[0]
    client = clients.LlmClient(keys={f"{url}/v1": key})

    async def draw(sample: str, **extra: Any) -> str:
        at = f"{url}/v1"
        endpoint = EndpointConfig(model=f"policy/{sample}", api_base=at, temperature=1.0, max_tokens=20, extra=extra)
        allowance = clients._Allowance(60.0, Usage())
        return (await client._call(endpoint, [{"role": "user", "content": "hi"}], allowance)).text

    async def play() -> list[str]:
        arguments = {"enable_thinking": False}  # which the server takes, and this model's template does not use
        repeated = draw("a/0", chat_template_kwargs=arguments)
        return await asyncio.gather(draw("a/0"), draw("a/1"), repeated, draw("a/2"))

    drawn = asyncio.run(play())
    assert drawn[0] == drawn[2] and len(set(drawn)) == 3


@pytest.mark.processes
def test_a_refused_key_is_not_printed(
    servers: dict[str, Served], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    url, secret = servers["tied"].server.url, "not-the-key-of-this-run"
    (reply,), _ = play_policy([(url, secret)], 1)
    assert isinstance(reply, UserError) and "AuthenticationError" in str(reply)
    shown = capfd.readouterr()
    assert not any(secret in text for text in (str(reply), caplog.text, shown.out, shown.err))
