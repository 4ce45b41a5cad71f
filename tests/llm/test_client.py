"""Calls of a language model: requests, retries, pauses, schemas."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.llm import client as clients
from megatron_collab.llm.answer import LlmError, json_schema
from megatron_collab.llm.client import LlmClient
from megatron_collab.runtime.network import retry_after
from tests.llm.endpoint import Endpoint, Reply, fails, hangs, resets, says, writes
from tests.llm.questions import GOOD, QUESTION, SCORE, ask, play

pytestmark = pytest.mark.usefixtures("no_waiting")


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


@pytest.mark.seconds
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


@pytest.mark.seconds
@given(st.text() | st.from_regex(r"\w{3}, [0-9]{1,12} \w{3} [0-9]{1,12} [0-9:]{1,12} [-+A-Z0-9]{1,6}"))
def test_whatever_retry_after_says_is_seconds(value: str) -> None:
    assert retry_after(value) >= 0


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
