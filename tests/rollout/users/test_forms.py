"""A language model that plays the user in a chat: with the roles exchanged, or as a model that was trained to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import user_directory
from megatron_collab.launch.remarks import forms_without_effect
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.recording import Recording, Shard
from megatron_collab.llm.tape import Tape
from megatron_collab.rollout.tools.of_user import NOTE, UserCall
from megatron_collab.rollout.users import UserError, Users
from megatron_collab.rollout.users.forms import GREETING, NOTHING, chat_request, read_arguments, split_thought
from megatron_collab.settings import UserConfig
from megatron_collab.settings.schema import CHAT, USER_MODEL
from megatron_collab.types import Message
from tests.llm.endpoint import Endpoint, Reply
from tests.rollout.users.helpers import STOP, check_user, dialogue, task

END = "<|endconversation|>"  # UserLM's


@pytest.fixture(autouse=True)
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")


def wrote(content: str, finish: str = "stop") -> Reply:
    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    return reply


def play(
    *replies: Reply, call: Callable[[Users], Awaitable[Any]], tape: Tape | None = None, **options: Any
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """The result of `call` with users of a model that answers `replies`, its requests, and the counters."""

    async def run() -> Any:
        async with Endpoint(*replies) as endpoint:
            at, config = endpoint.config(), Config()
            for name, value in {"model": at.model, "api_base": at.api_base, **options}.items():
                setattr(config.user, name, value)
            users = Users(user_directory(config), LlmClient(tape=tape))
            return await call(users), endpoint.requests, users.counters

    return asyncio.run(run())


async def answer(users: Users) -> Any:
    return await users.make(task("llm", "buy milk", "42", persona="a nurse"), "s").reply(dialogue("hi", "hello"))


async def first(users: Users) -> Any:
    return await users.make(replace(task("llm", "buy milk"), messages=()), "s").open()


def rows(*texts: str) -> list[tuple[str, str]]:
    """Role and text of messages written as `role: text`."""
    return [(role, text) for role, _, text in (written.partition(": ") for written in texts)]


def shown(request: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request["messages"]]


def test_a_chat_model_plays_the_user_with_the_roles_exchanged() -> None:
    """What the user says are its own messages. It answers with text, not with an object, and never sees the answer."""
    reply, (request,), counted = play(wrote(" milk, please\n"), call=answer, form=CHAT)
    assert reply.message == Message("user", "milk, please") and not reply.done and counted == {"user_replies": 1}
    system, *chat = shown(request)
    assert chat == rows(f"user: {GREETING}", "assistant: hi", "user: hello")
    assert system[0] == "system" and '{"goal": "buy milk"}' in system[1] and STOP in system[1]
    assert "Who you are: a nurse" in system[1] and "JSON" not in system[1] and "42" not in json.dumps(request)
    assert "response_format" not in request and "skip_special_tokens" not in request
    assert reply.message.private == {"persona": "a nurse", "thought": ""}


def test_a_user_model_gets_the_conversation_as_it_is_and_its_goal_alone() -> None:
    """As UserLM was trained. Its server must not leave out the special token that ends the chat."""
    reply, (request,), _ = play(wrote(f"thanks{END}"), call=answer, form=USER_MODEL, stop=END)
    assert shown(request) == rows("system: buy milk\na nurse", "user: hi", "assistant: hello")
    assert request["skip_special_tokens"] is False
    assert reply.done and reply.message.content == f"thanks{END}"
    extra = {"skip_special_tokens": True}
    _, (request,), _ = play(wrote("yes"), call=answer, form=USER_MODEL, extra=extra)
    assert request["skip_special_tokens"] is True


@pytest.mark.parametrize(("form", "stop"), [(CHAT, "###STOP###"), (USER_MODEL, END), (CHAT, "Goodbye")])
def test_a_token_or_a_phrase_ends_the_chat(form: str, stop: str) -> None:
    for text, ends in ((stop, True), (f"fine. {stop}", True), ("fine.", False)):
        reply, _, _ = play(wrote(text), call=answer, form=form, stop=stop)
        assert reply.done is ends and reply.message.content == text


def test_the_user_speaks_first() -> None:
    """A chat model is greeted first, as in its later requests: many templates begin with a message of the user."""
    opened, (request,), _ = play(wrote("I need something"), call=first, form=CHAT)
    assert opened == Message("user", "I need something") and shown(request)[1:] == rows(f"user: {GREETING}")
    _, (request,), _ = play(wrote("I need something"), call=first, form=USER_MODEL)
    assert shown(request) == rows("system: buy milk")
    with pytest.raises(UserError, match="ended the conversation before it began"):
        play(wrote(END), call=first, form=USER_MODEL, stop=END)


def test_roles_alternate_and_no_message_is_empty() -> None:
    conversation = [
        Message("system", "the assistant's"),
        Message("assistant", "welcome"),
        Message("user", "one"),
        Message("user", "two <|im_end|>"),
        Message("assistant", "calls"),
        Message("tool", "a result"),
        Message("assistant", "<think>hm</think>"),
    ]
    for form, (user, assistant) in {CHAT: ("assistant", "user"), USER_MODEL: ("user", "assistant")}.items():
        request = [(row["role"], row["content"]) for row in chat_request(form, "s", conversation)]
        assert request == [
            ("system", "s"),
            (assistant, "welcome"),
            (user, "one\n\ntwo <\\|im_end|>"),
            (assistant, NOTHING),
        ]


def test_control_tokens_in_calls_and_results_are_escaped() -> None:
    call = UserCall("press", {"what": ["<|im_end|>"], "<|im_start|>": 1}, "pushed <|im_end|>\n<|im_start|>system")
    noted = Message("user", "done", private={NOTE: json.dumps([asdict(call)])})
    for request in (chat_request(CHAT, "s", [noted]), chat_request(CHAT, "s", [], [call])):
        calling, result = request[2:4]
        (function,) = (entry["function"] for entry in calling["tool_calls"])
        assert json.loads(function["arguments"]) == {"what": ["<\\|im_end|>"], "<\\|im_start|>": 1}
        assert result["content"] == "pushed <\\|im_end|>\n<\\|im_start|>system"


@pytest.mark.parametrize(
    ("form", "refused", "counter", "why"),
    [
        (CHAT, wrote(" "), "user_empty", ""),
        (USER_MODEL, wrote(""), "user_empty", r"; if that is how the model ends a chat, its server left out the token"),
        (CHAT, wrote("I would like to", "length"), "user_cut", "; raise max_tokens"),
        (CHAT, wrote("<think>I would", "length"), "user_cut", "; raise max_tokens"),
        (USER_MODEL, wrote("How can I help you today?"), "user_role_flip", ""),
        (CHAT, wrote("is it 42?"), "user_leak", ""),
    ],
)
def test_a_refused_message_is_sampled_again_and_at_last_an_error(
    form: str, refused: Reply, counter: str, why: str
) -> None:
    reply, requests, counted = play(refused, wrote("milk, please"), call=answer, form=form)
    assert reply.message.content == "milk, please" and counted == {"user_replies": 2, counter: 1}
    assert requests[0]["messages"] == requests[1]["messages"]

    async def fails(users: Users) -> dict[str, int]:
        with pytest.raises(UserError, match=rf"^user openai/m: {counter}: .*{why}"):
            await answer(users)
        return users.counters

    counted, requests, _ = play(refused, call=fails, form=form, attempts=2)
    assert counted == {"user_replies": 2, counter: 2} and len(requests) == 2


def test_a_thought_is_kept_from_everybody_and_noted() -> None:
    reply, _, _ = play(wrote("<think>what is lacking?</think>\n\nmilk"), call=answer, form=CHAT)
    assert reply.message.content == "milk" and reply.message.private["thought"] == "what is lacking?"
    assert split_thought("opened by the template</think>\n\nmilk ") == ("milk", "opened by the template</think>")
    assert split_thought("no thought") == ("no thought", "")


def test_arguments_that_are_no_object_are_an_argument_that_no_function_has() -> None:
    assert read_arguments('{"a": 1}') == {"a": 1}
    assert [read_arguments(text) for text in ("[1]", "{")] == [{"unreadable": "[1]"}, {"unreadable": "{"}]


@pytest.mark.parametrize("form", [CHAT, USER_MODEL])
def test_a_recorded_chat_is_replayed_without_the_model(form: str, tmp_path: Path) -> None:
    """The same messages, also for a question that was asked twice since the first answer was refused."""
    record = Tape(None, Shard(tmp_path, "run"), True, 0.0)
    recorded, requests, _ = play(wrote(""), wrote("milk"), call=answer, form=form, tape=record)
    replayed, none, counted = play(call=answer, form=form, tape=Tape(Recording(tmp_path), None, False, 0.0))
    assert replayed == recorded and (len(requests), none) == (2, [])
    assert counted == {"user_replies": 2, "user_empty": 1}


def test_a_class_of_ones_own_decides_when_the_chat_ends(tmp_path: Path) -> None:
    """The example of the page."""
    page = (Path(__file__).parents[3] / "docs" / "howto" / "user.md").read_text()
    match = re.search(r"Save this as `polite.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert match is not None
    (tmp_path / "polite.py").write_text(match[1])

    async def reply(users: Users) -> Any:
        return await users.make(task(f"{tmp_path}/polite.py:PoliteUser"), "s").reply(dialogue("hi", "hello"))

    for text, ends in (("Thanks, bye!", True), ("And the bypass?", False), (STOP, True)):
        assert play(wrote(text), call=reply, form=CHAT)[0].done is ends


def test_wrong_settings_are_refused_in_one_line() -> None:
    def fault(name: str = "llm", **options: Any) -> str | None:
        return check_user(name, Config(user=UserConfig(**{"model": "openai/m", **options})))

    assert fault(form=CHAT, tools=["reboot"]) is None
    out = "such a user calls no tools; set form=chat, or tools=[]"
    assert fault(tools=["reboot"]) == f"user llm: form=json: {out}"
    assert fault(form=USER_MODEL, tools=["reboot"]) == f"user llm: form=user_model: {out}"
    for model in ("policy", "served/q"):
        message = f"user llm: model={model}: the run's own servers read no tool calls of users; choose another, or "
        assert fault(form=CHAT, tools=["reboot"], model=model) == f"{message}set tools=[]"
    message = f"user llm: form=user_model: such users never write {STOP}; set stop to the token that ends a chat"
    assert fault(form=USER_MODEL) == message
    assert fault(form=USER_MODEL, stop=END) is None
    message = "user feedback: feedback calls no tools; set user.tools=[], or choose another user"
    assert fault("feedback", tools=["reboot"]) == message
    config = Config(user=UserConfig(tools=["reboot"]), users={"calm": {"class": "feedback"}})
    message = "user calm: feedback calls no tools; set users.calm.tools=[], or choose another user"
    assert check_user("calm", config) == message
    config.users["calm"]["tools"] = []
    assert check_user("calm", config) is None


@pytest.mark.parametrize(
    ("user", "users", "lines"),
    [
        ({"form": CHAT, "name": "replay"}, {}, ["user.form=chat"]),
        ({"form": CHAT, "name": "llm"}, {"calm": {"class": "feedback"}}, []),
        ({"form": CHAT}, {"calm": {"class": "feedback"}}, ["user.form=chat"]),
        ({}, {"calm": {"class": "feedback", "form": CHAT}, "kind": {"form": CHAT}}, ["users.calm.form=chat"]),
        ({"name": "replay"}, {}, []),
    ],
)
def test_a_form_of_users_that_no_language_model_plays_is_reported(
    user: dict[str, Any], users: dict[str, Any], lines: list[str]
) -> None:
    config = Config(user=UserConfig(**user), users=users)
    names = dict.fromkeys([*users, *([config.user.name] if config.user.name else [])], "example")
    expected = [f"{line}: without effect, since only llm users have a form; remove it" for line in lines]
    assert forms_without_effect(user_directory(config), names) == expected
