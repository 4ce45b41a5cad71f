"""What a response of a language model's endpoint may contain, and how long it may be."""

from __future__ import annotations

import gzip
import json
import threading
import tracemalloc
import zlib
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.llm import client as clients
from megatron_collab.llm.answer import AnswerTooLong, LlmError
from megatron_collab.llm.client import LlmClient
from tests.llm.endpoint import Endpoint, Reply, says
from tests.llm.questions import GOOD, QUESTION, ask, play

pytestmark = pytest.mark.usefixtures("no_waiting")


def completes(finish: str | None, **message: Any) -> Reply:
    """A completion with this finish reason and message."""

    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}})

    return reply


CALL = {"id": "c", "type": "function", "function": {"name": "grade", "arguments": '{"score": 1}'}}
SHORTFALLS = {
    "length": (completes("length", content='{"score": 0.'), "reward.judge.max_tokens are not enough; raise it"),
    "reasoning": (
        completes("length", reasoning_content="hm " * 9),
        "finish_reason=length: the 77 tokens of reward.judge.max_tokens were spent on reasoning; raise it",
    ),
    "empty length": (completes("length"), "finish_reason=length: the 77 tokens"),
    "only reasoning": (completes("stop", reasoning_content='{"score": 1}'), "all text is in reasoning_content; turn"),
    "refusal": (completes("stop", refusal="I cannot\nhelp."), "the model refused (I cannot help.); change the prompt"),
    "refusal and text": (completes("stop", content="No.", refusal="Never."), "the model refused (Never.)"),
    "secret": (completes("stop", refusal="sk-ab12cd34ef56gh78ij90kl12"), "the model refused (***)"),
    "escapes": (completes("stop", refusal="\x1b[2Jno"), r"the model refused (\x1b[2Jno)"),
    "filter": (completes("content_filter"), "finish_reason=content_filter: the provider withheld the text"),
    "filter and text": (completes("content_filter", content='{"sco'), "content_filter: the provider withheld"),
    "tools": (completes("tool_calls", tool_calls=[CALL]), "finish_reason=tool_calls: the model called grade; choose"),
    "nothing": (completes("stop"), "there is no JSON object: the text is empty"),
    "blank": (completes("stop", content=" \n"), "there is no JSON object: the text is empty"),
}


@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m"])
@pytest.mark.parametrize(("reply", "reason"), SHORTFALLS.values(), ids=SHORTFALLS.keys())
def test_the_reason_for_a_missing_answer_is_the_providers(reply: Reply, reason: str, model: str) -> None:
    error, requests = ask(reply, model=model, max_tokens=77, attempts=2)
    assert isinstance(error, LlmError) and reason in str(error) and "\n" not in str(error)
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (completes("stop", refusal="I cannot help."), "I cannot help."),
        (completes("length", reasoning_content="hm"), ""),
        (completes("stop"), ""),
        (completes("content_filter"), "withheld the text"),
        (completes("tool_calls", tool_calls=[CALL]), "the model called grade"),
        (completes("stop", reasoning_content="hm"), "all text is in reasoning_content"),
    ],
    ids=["refusal", "length", "empty", "filter", "tools", "reasoning"],
)
def test_a_reply_that_the_model_did_not_write_is_missing(reply: Reply, text: str) -> None:
    async def question(endpoint: Endpoint) -> str:
        try:
            return (await LlmClient().reply(endpoint.config(attempts=1), QUESTION)).text
        except LlmError as error:
            return str(error)

    answer, _ = play(reply, with_=question)
    assert text in answer if text else answer == ""


PARTS = {
    "one": [{"type": "text", "text": '{"score": 0.5}'}],
    "several": [{"type": "text", "text": '{"score"'}, {"type": "text", "text": ": 0.5}"}],
    "thoughts": [{"type": "thinking", "thinking": [{"type": "text", "text": '{"score": 1}'}]}, '{"score": 0.5}'],
    "odd ones": [
        None,
        3,
        {},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "text", "text": '{"score": .5}'},
    ],
    "object": {"score": 0.5},
}


@pytest.mark.parametrize("model", ["openai/m", "hosted_vllm/m"])
@pytest.mark.parametrize("content", PARTS.values(), ids=PARTS.keys())
def test_the_text_of_parts_is_read(content: Any, model: str) -> None:
    answer, requests = ask(completes("stop", content=content), model=model)
    assert (answer, len(requests)) == ({"score": 0.5}, 1)


def bomb(size: int, encoding: str = "gzip", layers: int = 1) -> Reply:
    """A body of `size` zeros, compressed."""

    async def reply(request: web.Request) -> web.Response:
        body = bytes(size)
        for _ in range(layers):
            body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        headers = {"Content-Encoding": ", ".join([encoding] * layers)}
        return web.Response(body=body, headers=headers, content_type="application/json")

    return reply


@pytest.mark.seconds
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_bounded_as_it_arrives(encoding: str) -> None:
    """64 KiB become 64 MiB; of these only the pieces up to the limit are made."""
    error, _ = ask(bomb(1 << 26, encoding))
    assert str(error) == f"openai/m: response exceeds {clients.LONGEST_BODY} bytes"
    tracemalloc.start()
    try:
        ask(bomb(1 << 26, encoding))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < (1 << 26) + 3 * clients.LONGEST_BODY  # the test's own zeros, and what is read


@pytest.mark.parametrize(("encoding", "layers"), [("gzip", 2), ("br", 0), ("zstd", 0), ("nonsense", 0)])
def test_an_encoding_that_was_not_accepted_is_refused(encoding: str, layers: int) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        if layers:
            return await bomb(1 << 26, encoding, layers)(request)
        return web.Response(body=b"{}", headers={"Content-Encoding": encoding}, content_type="application/json")

    error, _ = ask(reply, model="hosted_vllm/m", attempts=1)
    assert "but only gzip was accepted" in str(error)


@pytest.mark.parametrize("cut", [1, 30, 60])
def test_a_damaged_compressed_body_is_a_failed_call(cut: int) -> None:
    async def reply(request: web.Request) -> web.Response:
        body = gzip.compress(json.dumps({"choices": [], "x": "y" * 99}).encode())
        return web.Response(body=body[:-cut], headers={"Content-Encoding": "gzip"}, content_type="application/json")

    assert isinstance(ask(reply, attempts=1)[0], LlmError)
    assert ask(reply, GOOD)[0] == {"score": 0.5}


def test_a_long_answer_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(text: str, fields: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"score": 1.0}

    monkeypatch.setattr(clients, "parse", parse)
    for size in (10, 1 << 15):
        ask(says("{" * size))
    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False]


def says_long(size: int, compressed: bool = False) -> Reply:
    async def reply(request: web.Request) -> web.StreamResponse:
        response = await says("x" * size)(request)
        assert isinstance(response, web.Response)
        if compressed:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    return reply


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (says_long(clients.LONGEST_BODY), f"openai/m: response exceeds {clients.LONGEST_BODY} bytes"),
        (says_long(clients.LONGEST_BODY, compressed=True), f"openai/m: response exceeds {clients.LONGEST_BODY} bytes"),
        (says_long(clients.LONGEST_TEXT + 1), f"openai/m: {clients.LONGEST_TEXT + 1} characters"),
    ],
    ids=["body", "compressed", "text"],
)
def test_an_answer_that_is_too_long_is_not_read(reply: Reply, message: str) -> None:
    """Nor asked for again; and it counts."""
    client = LlmClient(prices={"openai/m": [0, 1e6]})
    error, requests = ask(reply, GOOD, client=client, max_tokens=77)
    assert isinstance(error, AnswerTooLong) and str(error) == message
    assert len(requests) == 1
    assert client.totals["usd"] == (20 if "characters" in message else 77)


def test_an_answer_may_be_long() -> None:
    async def reply(endpoint: Endpoint) -> Any:
        return await LlmClient().reply(endpoint.config(), QUESTION)

    assert len(play(says("y" * clients.LONGEST_TEXT), with_=reply)[0].text) == clients.LONGEST_TEXT
