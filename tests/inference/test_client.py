"""The client against a server with every kind of failure."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_collab.inference import client
from megatron_collab.inference.client import EngineError, ServerGone, SGLangClient, UnreadableCall
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Finish, ToolCall, Turn

ANSWER = {
    "text": "hello",
    "output_ids": [7, 8, 2],
    "meta_info": {
        "weight_version": "12",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-0.125, 2, None]],
    },
}
BEGUN = {"text": "h", "output_ids": [7], "meta_info": {"weight_version": "12", "finish_reason": None}}
TURN = Turn((4, 5, 6), (7, 8, 2), (-0.5, -0.25, -0.125), (12, 12, 12), Finish.STOP, "hello")
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)


async def stream(request: web.Request, *events: Any, then: asyncio.Event | None = None) -> web.StreamResponse:
    """Stream events as SGLang does; wait for `then` after the first."""
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if then:
            await then.wait()
    await response.write(b"data: [DONE]\n\n")
    return response


async def stream_turn(request: web.Request) -> web.StreamResponse:
    return await stream(request, BEGUN, ANSWER)


def served(handler: Handler, use: Callable[[SGLangClient], Awaitable[Any]], timeout: float = 60.0) -> Any:
    """Result of `use` with a client whose server answers every request with `handler`."""

    async def run() -> Any:
        application = web.Application()
        application.router.add_post("/{path}", handler)
        async with TestServer(application) as server:
            address = str(server.make_url("")).rstrip("/")
            client = SGLangClient(address, "secret", ClientSpec(timeout, "qwen25"))
            try:
                return await use(client)
            finally:
                await client.close()

    return asyncio.run(run())


async def turn_of(client: SGLangClient, prompt: tuple[int, ...] = (4, 5, 6)) -> Turn:
    return await client.generate(prompt, max_new_tokens=9, sampling=SAMPLING, seed=-3)


def ask(handler: Handler, timeout: float = 60.0) -> Turn:
    return served(handler, turn_of, timeout)


def test_a_turn_is_what_the_engine_says() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.extend([request.headers["Authorization"], await request.json()])
        return await stream_turn(request)

    assert ask(handler) == TURN
    sampling = {"max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "sampling_seed": -3}
    sampling |= {"stop_token_ids": [], "skip_special_tokens": True}
    body = {"input_ids": [4, 5, 6], "return_logprob": True, "stream": True}
    assert seen == ["Bearer secret", {**body, "sampling_params": {**sampling, "stream_interval": 9}}]


def test_a_turn_that_is_followed_is_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    texts: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["sampling_params"]["stream_interval"])
        return await stream_turn(request)

    async def use(client: SGLangClient, tokens: int = 9) -> Turn:
        options: Any = {"max_new_tokens": tokens, "sampling": SAMPLING, "seed": -3, "progress": texts.append}
        return await client.generate((4, 5, 6), **options)

    assert served(handler, use) == TURN and texts == ["h", "hello"]
    assert served(handler, lambda client: use(client, 1 << 15)) == TURN and seen == [4, 128], "at most 256 events"
    monkeypatch.setattr(client, "MOST_BYTES", 300)
    with pytest.raises(EngineError, match="/generate: more than 300 bytes for a turn") as error:
        served(handler, use)
    assert not isinstance(error.value, client.TransientError)


def test_a_turn_is_sampled_with_the_adapters_that_are_named() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["lora_path"])
        return await stream_turn(request)

    async def use(client: SGLangClient) -> Turn:
        client.spec = replace(client.spec, adapter="mine")
        return await turn_of(client)

    assert served(handler, use) == TURN and seen == ["mine"]


@pytest.mark.parametrize(("largest", "dtype"), [(200, np.uint8), (300, np.uint16)])
def test_a_turn_has_the_experts_of_all_but_its_last_token(largest: int, dtype: type) -> None:
    experts = np.arange(largest - 15, largest + 1, dtype=np.int32)  # of four tokens in two layers, two for each
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        meta = ANSWER["meta_info"] | {"routed_experts": base64.b64encode(experts.tobytes()).decode()}
        return await stream(request, BEGUN, {**ANSWER, "meta_info": meta})

    async def use(client: SGLangClient, start: int) -> Turn:
        return await client.generate((4, 5, 6), max_new_tokens=9, sampling=SAMPLING, seed=-3, routing_from=start)

    turn = served(handler, lambda client: use(client, 1))
    assert turn == TURN and turn.routing.dtype == dtype and turn.routing.tolist() == experts.reshape(4, 4).tolist()
    assert seen[0]["return_routed_experts"] is True and seen[0]["routed_experts_start_len"] == 1
    with pytest.raises(EngineError, match=r"rollout\.routing_replay: 16 experts for 5 tokens"):
        served(handler, lambda client: use(client, 0))


def test_a_turn_of_many_pieces_is_whole() -> None:
    long = {**ANSWER, "text": "x" * 300_000}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, BEGUN, long)

    assert ask(handler).text == "x" * 300_000


def test_weights_that_change_during_a_turn_are_recorded_by_token() -> None:
    spans = [{"version": "12", "start": 0, "end": 1}, {"version": "14", "start": 1, "end": 3}]
    answer = {**ANSWER, "meta_info": {**ANSWER["meta_info"], "weight_version": "14", "weight_versions": spans}}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, BEGUN, answer)

    assert ask(handler) == replace(TURN, versions=(12, 14, 14))


def test_transient_faults_are_retried() -> None:
    calls = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        if len(calls) == 1:
            return web.Response(status=503, text="busy")
        if len(calls) == 2:
            assert request.transport is not None
            request.transport.close()
        if len(calls) == 3:  # the server ends in the middle of the turn
            return await stream(request, BEGUN)
        if len(calls) == 4:
            away = {"type": "abort", "message": "the queue is full", "status_code": 503}
            return await stream(request, {**ANSWER, "meta_info": {**ANSWER["meta_info"], "finish_reason": away}})
        return await stream_turn(request)

    assert ask(handler) == TURN
    assert len(calls) == 5


def test_permanent_faults_are_engine_errors() -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(1)
        return web.Response(status=500, text="broken\nfor good")

    with pytest.raises(EngineError, match="status 500: broken for good") as error:
        ask(handler)
    assert not isinstance(error.value, ServerGone)
    assert len(calls) == client.ATTEMPTS


def test_a_server_that_breaks_every_connection_is_gone() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, BEGUN)

    with pytest.raises(ServerGone, match="/generate: ClientPayloadError: the stream ended before the turn"):
        ask(handler)


ERROR = {"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}
AWAY = {**ANSWER, "meta_info": {"finish_reason": {"type": "abort", "message": "too long", "status_code": 400}}}


@pytest.mark.parametrize("event", [None, ERROR, AWAY])
def test_a_refused_request_is_not_repeated(event: dict[str, Any] | None) -> None:
    calls = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        return await stream(request, event) if event else web.Response(status=400, text="too long")

    with pytest.raises(EngineError, match="status 400: too long"):
        ask(handler)
    assert len(calls) == 1


def test_an_aborted_turn_is_a_turn_and_not_counted() -> None:
    meta = {"weight_version": "12", "finish_reason": {"type": "abort"}, "output_token_logprobs": []}

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, {"text": "", "output_ids": [], "meta_info": meta})

    async def use(client: SGLangClient) -> Turn:
        turn = await turn_of(client)
        assert not client.counters
        return turn

    assert served(handler, use) == Turn((4, 5, 6), (), (), (), Finish.ABORT, "")


def test_silence_is_an_engine_error_that_names_the_setting() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return await stream_turn(request)

    with pytest.raises(EngineError, match=r"rollout\.turn_timeout=0\.2"):
        ask(handler, timeout=0.2)


def test_no_server_is_an_engine_error() -> None:
    async def run() -> None:
        client = SGLangClient("http://127.0.0.1:9", "secret", ClientSpec(60.0, "qwen25"))
        try:
            await turn_of(client)
        finally:
            await client.close()

    with pytest.raises(ServerGone, match=r"127\.0\.0\.1:9"):
        asyncio.run(run())


def test_equal_prompts_wait_until_the_first_has_been_read() -> None:
    seen: list[list[int]] = []
    gate = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["input_ids"])
        if len(seen) <= 2:
            await gate.wait()
        return await stream_turn(request)

    async def use(client: SGLangClient) -> list[Turn]:
        tasks = [asyncio.create_task(turn_of(client, prompt)) for prompt in [(1, 2)] * 8 + [(3, 4)]]
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert sorted(seen) == [[1, 2], [3, 4]]
        gate.set()
        return await asyncio.gather(*tasks)

    assert [turn.token_ids for turn in served(handler, use)] == [(7, 8, 2)] * 9
    assert len(seen) == 9


def test_waiting_requests_continue_together_at_the_first_token() -> None:
    answered = 0
    all_asked = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal answered
        answered += 1
        if answered == 8:
            all_asked.set()
        return await stream(request, BEGUN, ANSWER, then=all_asked)

    async def use(client: SGLangClient) -> list[Turn]:
        return await asyncio.gather(*(turn_of(client) for _ in range(8)))

    assert served(handler, use) == [TURN] * 8


def test_a_first_request_that_fails_does_not_block_waiting_ones() -> None:
    calls = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        return web.Response(status=400, text="no") if len(calls) == 1 else await stream_turn(request)

    async def use(client: SGLangClient) -> list[Any]:
        return await asyncio.gather(*(turn_of(client) for _ in range(3)), return_exceptions=True)

    first, *later = served(handler, use)
    assert isinstance(first, EngineError)
    assert later == [TURN, TURN]


@pytest.mark.parametrize("adapter", [None, "policy"])
def test_given_tokens_have_the_engines_log_probs(adapter: str | None) -> None:
    seen: list[Any] = []
    entries: list[Any] = [[None, 6, None], [-0.5, 7, None], [-0.25, 0, None]]  # 8 is the vocabulary's last

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        meta = {"prompt_tokens": 5, "cached_tokens": 2, "weight_version": "12", "input_token_logprobs": entries}
        return web.json_response({"meta_info": meta})

    async def read(client: SGLangClient) -> Any:
        client.spec = replace(client.spec, adapter=adapter)
        return await client.log_probs((4, 5, 6), (7, 8)), dict(client.counters)

    assert served(handler, read) == (((-0.5, -0.25), 12), {"prefill_tokens": 3, "cached_tokens": 2})
    body = {"input_ids": [4, 5, 6, 7, 8], "return_logprob": True, "logprob_start_len": 2}
    body |= {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    assert seen == [body | ({"lora_path": adapter} if adapter else {})]
    of_other_tokens = [entries[0], [-0.5, 3, None], entries[2]]
    for broken in (None, entries[:2], [], [*entries[:2], [None, 8, None]], of_other_tokens):
        entries = broken  # type: ignore[assignment]
        with pytest.raises(EngineError, match="returned no log-probs of the tokens"):
            served(handler, read)


def test_prompt_tokens_are_counted_as_computed_or_cached() -> None:
    async def use(client: SGLangClient) -> dict[str, int]:
        await asyncio.gather(turn_of(client), turn_of(client))
        return dict(client.counters)

    assert served(stream_turn, use) == {"prefill_tokens": 2, "cached_tokens": 4}


def test_calls_of_tools_are_what_the_engine_finds() -> None:
    seen: list[Any] = []
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}

    async def handler(request: web.Request) -> web.Response:
        seen.extend([request.path, await request.json()])
        calls = [{"name": "add", "parameters": '{"a": 1}'}, {"name": "add", "parameters": "[1]"}]
        return web.json_response({"normal_text": "", "calls": calls})

    async def use(client: SGLangClient) -> list[ToolCall]:
        return await client.tool_calls("text", [schema])

    assert served(handler, use) == [ToolCall("add", {"a": 1}), ToolCall("add", {"arguments": [1]})]
    assert seen == ["/parse_function_call", {"text": "text", "tools": [schema], "tool_call_parser": "qwen25"}]


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500, text="Internal Server Error"),
        web.json_response({"normal_text": "", "calls": [{"name": "add", "parameters": '{"a": '}]}),
    ],
)
def test_calls_that_the_engine_cannot_read_are_not_retried(answer: web.Response) -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return answer

    with pytest.raises(UnreadableCall):
        served(handler, lambda client: client.tool_calls("text", []))
    assert calls == 1
