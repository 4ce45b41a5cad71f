from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from megatron_collab import patches
from megatron_collab.llm.answer import Field, LlmError, json_schema
from megatron_collab.llm.cache import key_of
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.endpoint import check_access, check_settings, check_support, identity
from megatron_collab.rollout.llm_assistant import LlmAssistant
from megatron_collab.settings import ConfigError, EndpointConfig, SamplingConfig
from megatron_collab.types import Message
from tests.llm.endpoint import Endpoint, fails, says

BASE = "http://127.0.0.1:9/v1"
KEYS = re.compile("_(API_KEY|API_BASE|BASE_URL|TOKEN)$")
SCORE = [Field("score", float, 0.0, 1.0)]
QUESTION = [{"role": "user", "content": "How good is this?"}]


def test_everything_that_is_set_is_sent_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setenv("GATEWAY", "from the environment")
    headers: list[Any] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        headers.append(request.headers.copy())
        return await says({"score": 0.5})(request)

    async def play() -> list[dict[str, Any]]:
        async with Endpoint(reply) as endpoint:
            plain = endpoint.config(temperature=None)
            full = endpoint.config(
                temperature=0.3,
                top_p=0.9,
                reasoning_effort="low",
                headers={"X-Team": "blue", "X-Gateway-Key": "os.environ/GATEWAY"},
                extra={"seed": 7, "chat_template_kwargs": {"enable_thinking": False}},
            )
            newer = endpoint.config(temperature=None, max_tokens=None, extra={"max_completion_tokens": 70})
            client = LlmClient()
            for settings in (plain, full, newer):
                await client.ask(settings, QUESTION, SCORE)
            assert client.totals["tokens"] == 360 and client.totals["unpriced"] == 3, "of m, which has no price"
            return endpoint.requests

    plain, full, newer = asyncio.run(play())
    assert {**newer, "max_tokens": plain["max_tokens"]} == {**plain, "max_completion_tokens": 70}
    assert "max_tokens" not in newer
    assert set(plain) == {"model", "messages", "max_tokens", "response_format"}
    assert {name: value for name, value in full.items() if name not in plain} == {
        "temperature": 0.3,
        "top_p": 0.9,
        "reasoning_effort": "low",
        "seed": 7,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (headers[1]["X-Team"], headers[1]["X-Gateway-Key"]) == ("blue", "from the environment")
    assert "X-Team" not in headers[0]


@pytest.mark.parametrize(
    ("words", "settings", "out"),
    [
        (
            "Unsupported value: 'temperature' does not support 0.0, only the default (1)",
            {},
            "; set temperature=null in reward.judge to leave it out",
        ),
        (
            "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
            {},
            "; set max_tokens=null and extra.max_completion_tokens=2048 in reward.judge",
        ),
        ("seed is not supported", {"extra": {"seed": 1}}, "; remove extra.seed from reward.judge"),
        ("top_p is not supported", {}, ""),
        ("max_tokens is too large", {}, ""),
    ],
)
def test_what_a_server_does_not_take_is_said_with_the_setting(
    words: str, settings: dict[str, Any], out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")

    async def play() -> str:
        async with Endpoint(fails(400, words)) as endpoint:
            with pytest.raises(LlmError) as error:
                await LlmClient().ask(endpoint.config(**settings), QUESTION, SCORE)
            return str(error.value)

    message = asyncio.run(play())
    assert words in message and message.endswith(out or words)


def test_a_variable_that_a_worker_does_not_have_is_a_failure_of_the_call() -> None:
    endpoint = EndpointConfig(model="openai/m", headers={"X-Key": "os.environ/NOT_ON_THIS_NODE"})
    with pytest.raises(LlmError, match=r"^os\.environ/NOT_ON_THIS_NODE: no such variable in the environment of "):
        asyncio.run(LlmClient().ask(endpoint, QUESTION, SCORE))


def key(**changes: Any) -> str:
    endpoint = EndpointConfig(**{"model": "openai/m", "api_base": "http://127.0.0.1:1/v1", **changes})
    question = {"messages": QUESTION, "schema": json_schema(SCORE), "sample": "0"}
    return key_of({**identity(endpoint), **question})


def test_the_key_of_an_answer_has_every_setting_that_changes_it_and_earlier_keys_stay() -> None:
    """The first is the key that earlier versions gave."""
    assert key() == "e1be3b40acd68a39a12e8a72f60c34c83c2dc6808674ac8e8a8d5c08a2b7fc12"
    variants: list[dict[str, Any]] = [
        {"model": "openai/n"},
        {"api_base": None},
        {"temperature": None},
        {"temperature": 1.0},
        {"top_p": 0.5},
        {"reasoning_effort": "low"},
        {"max_tokens": 7},
        {"headers": {"A": "b"}},
        {"extra": {"seed": 1}},
        {"extra": {"seed": 2}},
    ]
    assert len({key(), *(key(**other) for other in variants)}) == 1 + len(variants)
    assert key(attempts=9, timeout=1.0, deadline=2.0) == key()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra": {"temperature": 1}}, "reward.judge.extra.temperature: is not passed on; set temperature itself"),
        ({"max_tokens": None}, "reward.judge.max_tokens=null: answers need a budget; set reward.judge.extra.max_com"),
        ({"extra": {"max_completion_tokens": 5}}, "reward.judge.extra.max_completion_tokens: max_tokens is sent alr"),
        (
            {"max_tokens": None, "extra": {"max_completion_tokens": "many"}},
            "reward.judge.extra.max_completion_tokens=many: must be a whole number of at least 1",
        ),
        ({"extra": {"stream": True}}, "reward.judge.extra.stream: is not passed on; each call sets it itself"),
        ({"extra": {"api_key": "abc"}}, "reward.judge.extra.api_key: holds a key; set reward.judge.headers.NAME=os."),
        ({"extra": {"extra_body": {"token": "abc"}}}, "reward.judge.extra.extra_body.token: holds a key; set reward."),
        (
            {"extra": {"vertex_credentials": "{}"}},
            "reward.judge.extra.vertex_credentials: holds a key; set reward.judge.",
        ),
        ({"headers": {"Authorization": "x"}}, "reward.judge.headers.Authorization: holds a key; set reward.judge."),
        (
            {"headers": {"X-Api-Key": "os.environ/HOEM"}},
            "reward.judge.headers.X-Api-Key=os.environ/HOEM: no such variable in the environment; the nearest is HOME",
        ),
        ({"model": "openai/"}, "reward.judge.model=openai/: names no model after the provider; give PROVIDER/MODEL"),
    ],
)
def test_what_is_no_matter_of_extra_and_keys_are_refused(settings: dict[str, Any], message: str) -> None:
    check_settings(EndpointConfig(extra={"prompt_cache_key": "judges"}, headers={"X-Team": "blue"}), "reward.judge")
    with pytest.raises(ConfigError) as refused:
        check_settings(EndpointConfig(**settings), "reward.judge")
    assert str(refused.value).startswith(message)


def refusal(check: Callable[[EndpointConfig, str, str], None], settings: dict[str, Any]) -> str | None:
    try:
        check(EndpointConfig(**settings), "reward.judge.model", "reward.judge")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "openai/gpt-5"}, "reward.judge.temperature=0.0: openai/gpt-5 does not accept it (gpt-5 doesn't"),
        ({"model": "openai/o3"}, "reward.judge.temperature=0.0: openai/o3 does not accept it"),
        ({"model": "openai/o3", "temperature": None, "top_p": 0.5}, "reward.judge.top_p=0.5: openai/o3 does not"),
        ({"model": "openai/gpt-4o", "reasoning_effort": "low"}, "reward.judge.reasoning_effort=low: openai/gpt-4o"),
        ({"model": "anthropic/claude-sonnet-4-5", "extra": {"seed": 1}}, "reward.judge.extra.seed=1: anthropic/"),
        ({"model": "nonsense"}, "reward.judge.model=nonsense: LiteLLM knows no such provider; give PROVIDER/MODEL"),
        (
            {"model": "openai/m", "extra": {"extra_body": ["a"]}},
            "reward.judge.extra.extra_body=['a']: openai/m does not",
        ),
        ({"model": "openai/gpt-5", "temperature": None}, None),
        ({"model": "openai/gpt-5", "temperature": 1.0}, None),
        ({"model": "openai/gpt-4o", "top_p": 0.5}, None),
        ({"model": "openai/gpt-5.1", "temperature": 0.5, "reasoning_effort": "none"}, None),
        ({"model": "hosted_vllm/m", "reasoning_effort": "low", "extra": {"top_k": 5, "seed": 1}}, None),
        ({"model": "policy"}, None),
    ],
    ids=str,
)
def test_litellm_says_before_a_run_what_a_model_does_not_take(settings: dict[str, Any], message: str | None) -> None:
    patches.apply("litellm")
    refused = refusal(check_support, settings)
    assert (refused is None) == (message is None), refused
    assert refused is None or (refused.startswith(str(message)) and "\n" not in refused and "; " in refused)


@pytest.mark.parametrize(
    ("settings", "variables", "message"),
    [
        ({"model": "openai/m"}, {}, "openai/m: OPENAI_API_KEY is not set; export it"),
        ({"model": "gpt-4o-mini"}, {}, "gpt-4o-mini: OPENAI_API_KEY is not set; export it"),
        ({"model": "openai/m", "api_base": BASE}, {}, "openai/m: OPENAI_API_KEY is not set; if the server needs"),
        ({"model": "anthropic/claude-sonnet-4-5"}, {}, "anthropic/claude-sonnet-4-5: ANTHROPIC_API_KEY is not set"),
        ({"model": "gemini/gemini-2.5-pro"}, {}, "gemini/gemini-2.5-pro: GOOGLE_API_KEY or GEMINI_API_KEY is not set"),
        ({"model": "groq/m"}, {}, "groq/m: GROQ_API_KEY is not set"),
        ({"model": "hosted_vllm/m"}, {}, "hosted_vllm/m: the address of your own server is not set; set "),
        ({"model": "openai/m"}, {"OPENAI_API_KEY": "k"}, None),
        ({"model": "anthropic/claude-sonnet-4-5"}, {"ANTHROPIC_AUTH_TOKEN": "t"}, None),
        ({"model": "together_ai/m"}, {"TOGETHER_API_KEY": "k"}, None),
        ({"model": "groq/m", "api_base": BASE}, {}, None),
        ({"model": "groq/m", "headers": {"X-Team": "blue"}}, {}, None),
        ({"model": "hosted_vllm/m", "api_base": BASE}, {}, None),
        ({"model": "hosted_vllm/m"}, {"HOSTED_VLLM_API_BASE": BASE}, None),
        *(({"model": f"{cloud}/m"}, {}, None) for cloud in ("azure", "bedrock", "vertex_ai", "sagemaker", "ollama")),
        ({"model": "policy"}, {}, None),
    ],
    ids=str,
)
def test_a_model_that_nobody_can_reach_is_refused_and_no_other(
    settings: dict[str, Any], variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches.apply("litellm")
    for name in [name for name in os.environ if KEYS.search(name)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = refusal(check_access, settings)
    assert (refused is None) == (message is None), refused
    assert refused is None or refused.startswith(f"reward.judge.model={message}")


@pytest.mark.parametrize(
    ("settings", "variables", "message"),
    [
        (
            {"model": "openai/m"},
            {"OPENAI_API_KEY": "k\n"},
            "OPENAI_API_KEY: must be printable ASCII without line breaks",
        ),
        ({"model": "groq/m"}, {"GROQ_API_KEY": "k\r\nX: y"}, "GROQ_API_KEY: must be printable ASCII"),
        ({"model": "hosted_vllm/m", "api_base": BASE}, {"HOSTED_VLLM_API_KEY": " k"}, "HOSTED_VLLM_API_KEY: must be"),
        ({"model": "together_ai/m"}, {"TOGETHER_API_KEY": "schlüssel"}, "TOGETHER_API_KEY: must be"),
        ({"model": "openai/m"}, {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "localhost:8000"}, "OPENAI_BASE_URL=localh"),
        ({"model": "hosted_vllm/m"}, {"HOSTED_VLLM_API_BASE": "file:///v1"}, "HOSTED_VLLM_API_BASE=file:///v1: must"),
        ({"model": "ollama/m"}, {"OLLAMA_API_BASE": "http://h:99999"}, "OLLAMA_API_BASE=http://h:99999: port 99999 "),
        ({"model": "openai/m", "api_base": BASE}, {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "unused"}, None),
        ({"model": "openai/m"}, {"OPENAI_API_KEY": "k", "GROQ_API_KEY": "of another\n"}, None),
    ],
    ids=str,
)
def test_keys_and_addresses_of_the_environment_can_be_sent(
    settings: dict[str, Any], variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches.apply("litellm")
    for name in [name for name in os.environ if KEYS.search(name)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = refusal(check_access, settings)
    assert refused == message or (message and str(refused).startswith(message)), refused
    secret = variables.get("OPENAI_API_KEY", "schl")
    assert message is None or not message.partition("=")[0].endswith("KEY") or secret not in str(refused)


@pytest.mark.parametrize("value", ["key\n", "a\r\nX-Other: b", " key", "ключ", "\0", ""])
def test_a_header_from_the_environment_can_be_sent(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "\0" not in value:  # which no environment can hold
        monkeypatch.setenv("GATEWAY", value)
        with pytest.raises(ConfigError, match=r"^reward.judge.headers.X-Key=os.environ/GATEWAY: the variable must be"):
            check_settings(EndpointConfig(headers={"X-Key": "os.environ/GATEWAY"}), "reward.judge")


def test_an_assistant_sends_no_temperature_and_its_budget_by_the_name_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")

    async def play() -> dict[str, Any]:
        async with Endpoint(says("hello")) as endpoint:
            config = endpoint.config(temperature=None, max_tokens=None, extra={"max_completion_tokens": 70})
            sampling, messages = SamplingConfig(30, temperature=0.5), [Message("user", "hi")]
            playing = LlmAssistant(config, LlmClient())
            await playing.generate((), messages=messages, max_new_tokens=30, sampling=sampling, seed=0, affinity="")
            return endpoint.requests[0]

    sent = asyncio.run(play())
    assert sent.keys() == {"model", "messages", "max_completion_tokens"} and sent["max_completion_tokens"] == 30
