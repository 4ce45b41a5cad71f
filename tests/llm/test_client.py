from __future__ import annotations

import asyncio
import gzip
import json
import threading
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import litellm
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.config import LlmConfig
from megatron_collab.llm import client as clients
from megatron_collab.llm import limiter as limiters
from megatron_collab.llm.answer import AnswerTooLong, Field, LlmError, json_schema
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient, Messages
from megatron_collab.llm.limiter import BudgetSpent, FinishedCall, Limiter, Reservation
from megatron_collab.runtime.network import retry_after
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, resets, says, writes

SCORE = [Field("score", float, 0.0, 1.0)]
QUESTION: Messages = [{"role": "user", "content": "How good is this?"}]
GOOD = says({"score": 0.5})


class LocalLimiter(Limiter):
    """A Limiter's handle without Ray: `limiter.talk.remote(...)` can be awaited."""

    def __init__(self, config: LlmConfig) -> None:
        super().__init__(config, Path("spend.json"))
        self.talks: list[tuple[int, int]] = []
        self.local_talk = self.talk
        self.talk = SimpleNamespace(remote=self._remote)

    async def _remote(self, ended: list[FinishedCall], wishes: list[Reservation]) -> list[int]:
        self.talks.append((len(ended), len(wishes)))
        return await self.local_talk(ended, wishes)


@pytest.fixture(autouse=True)
def no_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.0)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client means to pause; it does not."""
    requested: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        requested.append(seconds)
        await sleep(0)

    monkeypatch.setattr(clients, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
    return requested


def play(*replies: Reply, with_: Callable[[Endpoint], Coroutine[Any, Any, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """What `with_` returns at an endpoint with these replies, and the requests that came in."""

    async def run() -> tuple[Any, list[dict[str, Any]]]:
        async with Endpoint(*replies) as endpoint:
            return await with_(endpoint), endpoint.requests

    return asyncio.run(run())


def ask(*replies: Reply, client: LlmClient | None = None, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    """One question; an LlmError is returned."""

    async def question(endpoint: Endpoint) -> Any:
        try:
            return await (client or LlmClient()).ask(endpoint.config(**changes), QUESTION, SCORE)
        except LlmError as error:
            return error

    return play(*replies, with_=question)


def test_the_request_has_the_parameters_and_the_schema() -> None:
    answer, (request,) = ask(GOOD, temperature=0.3, max_tokens=77)
    assert answer == {"score": 0.5}
    assert request["messages"] == QUESTION
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.3, 77)
    assert request["response_format"]["json_schema"]["schema"] == json_schema(SCORE)


@pytest.mark.parametrize(
    ("fault", "timeout"),
    [
        *((fails(status), 60.0) for status in (408, 409, 429, 500, 503)),
        *((resets, 60.0), pytest.param(hangs(), 3.0, marks=pytest.mark.processes)),
        *((writes("<html>"), 60.0), (writes("{}"), 60.0)),
    ],
    ids=["408", "409", "429", "500", "503", "reset", "hang", "html", "empty"],
)
def test_what_may_pass_is_tried_again(fault: Reply, timeout: float) -> None:
    answer, requests = ask(fault, GOOD, timeout=timeout)
    assert answer == {"score": 0.5}
    assert len(requests) == 2


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_stays_is_not_tried_again(status: int) -> None:
    error, requests = ask(fails(status, "go away"))
    assert isinstance(error, LlmError)
    assert "go away" in str(error)
    assert len(requests) == 1


def test_a_bad_request_is_tried_without_the_schema_and_then_not_again() -> None:
    error, requests = ask(fails(400, "too long\nby far"))
    assert "too long by far" in str(error)
    assert ["response_format" in request for request in requests] == [True, False]


def test_tries_are_limited_and_the_reason_is_one_line() -> None:
    error, requests = ask(fails(500, "broken\nto pieces"), attempts=4)
    assert isinstance(error, LlmError)
    assert "openai/m: InternalServerError" in str(error) and "broken to pieces" in str(error)
    assert ["response_format" in request for request in requests] == [True, False, True, True, True]


def test_a_model_that_hangs_is_given_up() -> None:
    error, requests = ask(hangs(), timeout=0.1, attempts=2)
    assert str(error) == "openai/m: TimeoutError: no answer within 0.1 s"
    assert len(requests) <= 2


@pytest.mark.processes
def test_all_tries_together_keep_to_the_deadline() -> None:
    error, requests = ask(hangs(), timeout=0.2, deadline=0.3, attempts=100)
    assert isinstance(error, LlmError)
    assert len(requests) <= 2


def test_the_deadline_ends_a_try_before_its_timeout() -> None:
    error, requests = ask(hangs(), timeout=50.0, deadline=0.2)
    assert str(error) == "openai/m: TimeoutError: no answer within 0.2 s"
    assert len(requests) <= 1


def test_a_malformed_answer_is_asked_again_with_the_error() -> None:
    answer, (_, second, third) = ask(says("eleven out of ten"), says({"score": 11}), GOOD)
    assert answer == {"score": 0.5}
    assert second["messages"][:2] == [*QUESTION, {"role": "assistant", "content": "eleven out of ten"}]
    assert "no JSON object" in second["messages"][2]["content"]
    assert third["messages"][1] == {"role": "assistant", "content": '{"score": 11}'}
    assert "the field 'score' is 11, above 1" in third["messages"][2]["content"]
    assert len(third["messages"]) == 3


def test_a_malformed_answer_is_never_a_score() -> None:
    error, requests = ask(says('{"score": 0.'), attempts=3)
    assert "MalformedAnswer" in str(error) and "cut off" in str(error)
    assert len(requests) == 3


@pytest.mark.parametrize("text", ["", '{"score": "\ud83d"}'])
def test_an_answer_that_cannot_be_repeated_is_asked_again(text: str) -> None:
    assert ask(says(text), GOOD)[0] == {"score": 0.5}


def test_an_answer_without_choices_is_malformed() -> None:
    body = '{"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}'
    assert ask(writes(body), GOOD)[0] == {"score": 0.5}


def test_an_endpoint_without_schemas_is_remembered() -> None:
    client = LlmClient()

    async def no_schema(reply: Reply, request: Any) -> Any:
        constrained = "response_format" in await request.json()
        return await (fails(400, "response_format is not supported") if constrained else reply)(request)

    async def twice(endpoint: Endpoint) -> list[Any]:
        return [await client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(2)]

    answers, requests = play(lambda request: no_schema(GOOD, request), with_=twice)
    assert answers == [{"score": 0.5}] * 2
    assert ["response_format" in request for request in requests] == [True, False, False]


def test_the_server_says_how_long_to_wait(pauses: list[float]) -> None:
    assert ask(fails(429, Retry_After="7"), fails(503, Retry_After="2.5"), GOOD)[0] == {"score": 0.5}
    assert pauses == [7.0, 2.5]


def test_a_wait_beyond_the_deadline_is_no_wait(pauses: list[float]) -> None:
    error, requests = ask(fails(429, "come back tomorrow", Retry_After="86400"))
    assert "come back tomorrow" in str(error)
    assert (pauses, len(requests)) == ([], 1)


def test_pauses_grow_and_differ(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 1.0)
    monkeypatch.setattr(clients.random, "uniform", lambda low, high: high)
    ask(fails(500), attempts=8, deadline=1e6)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    monkeypatch.undo()


def test_a_date_in_retry_after() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    assert 30 < retry_after(soon) <= 40
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 -0000") == 0
    assert retry_after("soon") == retry_after("-5") == retry_after("") == 0


@pytest.mark.parametrize(
    "value",
    [
        *(
            "99999999999",
            "9" * 400,
            "1e9",
            "-1",
            "nan",
            "inf",
            "-0",
            "١٢",
            "0x10",
            " 7 ",
            "7,7",
            "",
            ":",
            "\\",
            "(" * 50,
        ),
        *("Wed, 21 Oct 99999999999 07:28:00 GMT", "Wed, 99 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 0000 07:28:00 GMT"),
        *("Wed, 21 Oct 9999 23:59:59 -9999", "Fri, 31 Dec 9999 23:59:59 GMT", "Wed, 21 Oct 2015 99:99:99 GMT"),
    ],
)
def test_no_retry_after_ends_anything_or_waits_beyond_the_deadline(value: str, pauses: list[float]) -> None:
    assert retry_after(value) >= 0
    if value.isascii():  # which a header has to be
        answer, requests = ask(fails(429, Retry_After=value), GOOD, deadline=20.0)
        assert all(0 <= pause < 20 for pause in pauses)
        assert answer == {"score": 0.5} if len(requests) == 2 else isinstance(answer, LlmError)


@pytest.mark.processes
@given(st.text() | st.from_regex(r"\w{3}, [0-9]{1,12} \w{3} [0-9]{1,12} [0-9:]{1,12} [-+A-Z0-9]{1,6}"))
def test_whatever_retry_after_says_is_seconds(value: str) -> None:
    assert retry_after(value) >= 0


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


def test_the_end_of_a_long_reason_stays_without_tracebacks() -> None:
    trace = (
        'x Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1\n' + "y" * 600 + "END"
    )
    error, _ = ask(fails(401, trace))
    assert str(error).startswith("openai/m: AuthenticationError: …") and str(error).endswith("END")
    assert len(str(error)) < 450
    error, _ = ask(fails(401, trace.replace("y" * 600, "")))
    assert "x: KeyError: 1 END" in str(error) and "a.py" not in str(error)


@pytest.mark.parametrize("status", [400, 422, 500, 501])
def test_a_server_that_fails_over_a_schema_is_asked_once_more_without_it(status: int) -> None:
    client = LlmClient()

    async def reply(request: web.Request) -> web.StreamResponse:
        constrained = "response_format" in await request.json()
        return await (fails(status, "guided decoding") if constrained else GOOD)(request)

    async def questions(endpoint: Endpoint) -> list[Any]:
        return [await client.ask(endpoint.config(attempts=1), QUESTION, SCORE) for _ in range(5)]

    answers, requests = play(reply, with_=questions)
    assert answers == [{"score": 0.5}] * 5
    tried = 3 if status >= 500 else 1  # a server error may have been another one
    assert ["response_format" in request for request in requests] == [True, False] * tried + [False] * (5 - tried)


def test_a_server_error_of_an_endpoint_that_knows_schemas_is_any_other() -> None:
    client = LlmClient()

    async def twice(endpoint: Endpoint) -> list[Any]:
        return [await client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(2)]

    answers, requests = play(GOOD, fails(500), GOOD, with_=twice)
    assert answers == [{"score": 0.5}] * 2
    assert all("response_format" in request for request in requests)


def bomb(size: int, encoding: str = "gzip", layers: int = 1) -> Reply:
    """A body of `size` zeros, compressed."""

    async def reply(request: web.Request) -> web.Response:
        body = bytes(size)
        for _ in range(layers):
            body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        headers = {"Content-Encoding": ", ".join([encoding] * layers)}
        return web.Response(body=body, headers=headers, content_type="application/json")

    return reply


@pytest.mark.processes
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


def test_an_answer_is_paid_once_and_kept(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        limiter = LocalLimiter(LlmConfig(budget_usd=1.0))
        answers = []
        for _ in range(2):  # as after a restart
            client = LlmClient(limiter, Cache(tmp_path))
            answers.append(await client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        while limiter._running:
            await asyncio.sleep(0.01)
        return [*answers, limiter.spend()["calls"]]

    values, requests = play(GOOD, says({"score": 0.9}), with_=questions)
    assert values == [{"score": 0.5}, {"score": 0.5}, 1]
    assert len(requests) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "openai/n"},
        {"temperature": 0.1},
        {"max_tokens": 5},
        {"messages": []},
        {"fields": [Field("score", int)]},
    ],
    ids=str,
)
def test_another_question_is_another_answer(changes: dict[str, Any], tmp_path: Path) -> None:
    async def two(endpoint: Endpoint) -> tuple[Any, Any]:
        client = LlmClient(cache=Cache(tmp_path))
        first = await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")
        settings = {name: value for name, value in changes.items() if name not in ("messages", "fields")}
        question = [changes.get("messages", QUESTION), changes.get("fields", SCORE)]
        return first, await client.ask(endpoint.config(**settings), *question, sample="0")

    assert play(GOOD, says({"score": 1}), with_=two)[0] == ({"score": 0.5}, {"score": 1})


def test_samples_of_the_same_question_differ_and_without_one_nothing_is_kept(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(cache=Cache(tmp_path))
        samples = ["0", "1", "0", None, None]
        answers = [await client.ask(endpoint.config(), QUESTION, SCORE, sample=sample) for sample in samples]
        return [answer["score"] for answer in answers]

    replies = [says({"score": score}) for score in (0.1, 0.2, 0.3, 0.4)]
    assert play(*replies, with_=questions)[0] == [0.1, 0.2, 0.1, 0.3, 0.4]


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    async def twice(endpoint: Endpoint) -> Any:
        client = LlmClient(cache=Cache(tmp_path))
        with pytest.raises(LlmError):
            await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")
        return await client.ask(endpoint.config(), QUESTION, SCORE, sample="0")

    assert play(fails(401), GOOD, with_=twice)[0] == {"score": 0.5}


def test_the_same_question_at_the_same_time_is_one_call(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(cache=Cache(tmp_path))
        return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE, sample="0") for _ in range(20)))

    answers, requests = play(GOOD, with_=questions)
    assert answers == [{"score": 0.5}] * 20
    assert len(requests) == 1


def test_who_gives_up_does_not_take_the_answer_from_others(tmp_path: Path) -> None:
    async def questions(endpoint: Endpoint) -> Any:
        client = LlmClient(cache=Cache(tmp_path))
        impatient = asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        patient = asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE, sample="0"))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        impatient.cancel()
        return await patient

    assert play(hangs(), GOOD, with_=questions)[0] == {"score": 0.5}


def with_limiter(config: LlmConfig, questions: Callable[[LlmClient, Endpoint], Awaitable[Any]], *replies: Reply) -> Any:
    """What the questions come to at a limiter, and the limiter."""

    async def run(endpoint: Endpoint) -> tuple[Any, LocalLimiter]:
        limiter = LocalLimiter(config)
        value = await questions(LlmClient(limiter, prices=config.prices), endpoint)
        while limiter._running:
            await asyncio.sleep(0.01)
        return value, limiter

    return play(*replies, with_=run)[0]


def test_tokens_and_price_of_every_try_are_counted() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> Any:
        return await client.ask(endpoint.config(model="openai/gpt-4o-mini"), QUESTION, SCORE)

    answer, limiter = with_limiter(LlmConfig(), question, fails(500), says("no", tokens=1020), GOOD)
    assert answer == {"score": 0.5}
    assert limiter.spend() == {
        "calls": 3,
        "tokens": 1020 + 120,
        "usd": pytest.approx((1000 + 100) * 0.15e-6 + 40 * 0.6e-6),
        "unpriced": 0,
    }


def test_a_model_without_a_price_is_counted_as_such() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> Any:
        return await client.ask(endpoint.config(), QUESTION, SCORE)

    assert with_limiter(LlmConfig(), question, GOOD)[1].spend() == {"calls": 1, "tokens": 120, "usd": 0, "unpriced": 1}


PRICED = LlmConfig(prices={"openai/m": [1.0, 1000.0]})  # USD per million tokens
MOST = 120 * 1e-3  # USD for an answer of 120 tokens


def spent(*replies: Reply, config: LlmConfig = PRICED, **changes: Any) -> dict[str, float]:
    """What one question costs that is given up after one try."""

    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        with suppress(LlmError):
            once: dict[str, Any] = {"attempts": 1, "timeout": 10.0, "max_tokens": 120, **changes}
            await client.ask(endpoint.config(**once), QUESTION, SCORE)

    return with_limiter(config, question, *replies)[1].spend()


@pytest.mark.parametrize(
    "fault", [hangs(), resets, writes("<html>"), writes("{}")], ids=["hang", "reset", "html", "{}"]
)
def test_a_try_of_which_nobody_says_what_it_took_costs_the_most_it_may(fault: Reply) -> None:
    totals = spent(fault, timeout=0.3)  # which no answer meets, however long it may take
    assert (totals["calls"], totals["unpriced"]) == (1, 0)
    assert MOST < totals["usd"] < 1.01 * MOST
    assert 120 < totals["tokens"] < 500


@pytest.mark.parametrize("status", [400, 401, 404, 408, 429, 500, 503])
def test_a_try_that_was_refused_costs_nothing(status: int) -> None:
    assert spent(fails(status))["usd"] == 0


def test_a_try_without_a_connection_costs_nothing() -> None:
    """With `others` to ask they are `attempts`, else as many as the deadline gives time for."""

    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        nobody = endpoint.config(api_base="http://127.0.0.1:9/v1", attempts=2, max_tokens=120)
        with pytest.raises(LlmError, match="Connection error"):
            await client.ask(nobody, QUESTION, SCORE, has_fallback=True)

    totals = with_limiter(PRICED, question, GOOD)[1].spend()
    assert (totals["calls"], totals["usd"]) == (2, 0)


def test_a_cancelled_try_costs_the_most_it_may() -> None:
    async def question(client: LlmClient, endpoint: Endpoint) -> None:
        call = client.ask(endpoint.config(max_tokens=120), QUESTION, SCORE)
        task = asyncio.create_task(call)
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    assert MOST < with_limiter(PRICED, question, hangs())[1].spend()["usd"] < 1.01 * MOST


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
def test_an_answer_without_tokens_costs_what_its_text_may(usage: Any) -> None:
    """At least what a tokenizer counts, in any language, and less than what it might have been."""
    text = json.dumps({"score": 0.5, "why": "because 因为它很好谢谢你 весьма хорошо " * 20}, ensure_ascii=False)

    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    counted = litellm.token_counter(text=text)
    assert counted * 1e-3 < spent(reply, max_tokens=5000)["usd"] < 2.5 * counted * 1e-3


def test_a_price_that_is_given_is_taken_before_that_of_litellm() -> None:
    totals = spent(GOOD, model="openai/gpt-4o-mini", config=LlmConfig(prices={"openai/gpt-4o-mini": [10.0, 100.0]}))
    assert totals["usd"] == pytest.approx((100 * 10 + 20 * 100) * 1e-6)


@pytest.mark.processes
def test_timeouts_use_the_budget_up() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> None:
        with pytest.raises(BudgetSpent):
            await client.ask(endpoint.config(max_tokens=120, timeout=0.2, attempts=99), QUESTION, SCORE)
        assert len(endpoint.requests) <= 3

    with_limiter(replace(PRICED, budget_usd=2.5 * MOST), questions, hangs())


def test_a_spent_budget_is_told_to_every_later_call() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> list[str]:
        settings = endpoint.config(model="openai/gpt-4o-mini")
        await client.ask(settings, QUESTION, SCORE)
        reasons = []
        for _ in range(2):
            with pytest.raises(BudgetSpent) as caught:
                await client.ask(settings, QUESTION, SCORE)
            reasons.append(str(caught.value))
        assert len(endpoint.requests) == 1
        return reasons

    reasons, _ = with_limiter(LlmConfig(budget_usd=1e-6), questions, GOOD)
    assert all("llm.budget_usd=1e-06 is used up: 1 calls cost 2.7e-05 USD" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.processes
def test_calls_at_once_are_limited_and_waiting_is_not_held_against_them() -> None:
    running = most = 0

    async def busy(request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.4)
        running -= 1
        return await GOOD(request)

    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        await client.ask(endpoint.config(), QUESTION, SCORE)  # LiteLLM's first call imports
        settings = endpoint.config(deadline=3.5)  # all of them take 4 s, one 0.4 s
        return await asyncio.gather(*(client.ask(settings, QUESTION, SCORE) for _ in range(30)))

    answers, limiter = with_limiter(LlmConfig(max_concurrent=3), questions, busy)
    assert answers == [{"score": 0.5}] * 30
    assert most == 3
    assert limiter.spend()["calls"] == 31


def test_a_place_that_is_free_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiters, "_POLL", 3600.0)

    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(3)))

    assert with_limiter(LlmConfig(max_concurrent=1), questions, GOOD)[0] == [{"score": 0.5}] * 3


@pytest.mark.processes
def test_calls_share_the_talks_to_the_limiter() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        return await asyncio.gather(*(client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(100)))

    _, limiter = with_limiter(LlmConfig(), questions, GOOD)
    assert limiter.talks[0] == (0, 100)
    assert sum(ended for ended, _ in limiter.talks) == 100


def test_a_cancelled_call_gives_its_place_back() -> None:
    async def questions(client: LlmClient, endpoint: Endpoint) -> Any:
        tasks = [asyncio.create_task(client.ask(endpoint.config(), QUESTION, SCORE)) for _ in range(5)]
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        for task in tasks[:4]:  # one that is under way, three that wait
            task.cancel()
        return await tasks[4]

    assert with_limiter(LlmConfig(max_concurrent=1), questions, hangs(), GOOD)[0] == {"score": 0.5}


def test_a_fault_of_the_limiter_reaches_everybody_who_waits() -> None:
    async def broken(*_: Any) -> list[int]:
        raise KeyError("bug")

    async def questions(endpoint: Endpoint) -> list[Any]:
        client = LlmClient(SimpleNamespace(talk=SimpleNamespace(remote=broken)))
        calls = [client.ask(endpoint.config(), QUESTION, SCORE) for _ in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    errors, requests = play(GOOD, with_=questions)
    assert [type(error) for error in errors] == [KeyError] * 3
    assert requests == []
