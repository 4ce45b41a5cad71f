"""The web server of `megatron-collab view`: for this machine and for those who have its token.

It writes only ratings, and starts a process only for a talk with models.

A page elsewhere can neither read an answer (no CORS, a cookie for this site only) nor reach the server under another
name (the Host header must be that of the loopback interface), and what it shows runs no script but the package's own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_collab.observability.records import finite
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError
from megatron_collab.talk.speaker import SpeakerProcess
from megatron_collab.view.blind import rate, result
from megatron_collab.view.comparison import Side, compared, parts, side
from megatron_collab.view.judge import judge_check
from megatron_collab.view.runs import RunView
from megatron_collab.view.selection import places, selection
from megatron_collab.view.talk import PageTalk, Start, models

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_HOST = re.compile(r"(?:127\.0\.0\.1|\[::1\]|localhost)(?::\d{1,5})?", re.IGNORECASE)  # a tunnel has another port
_LONGEST_PATH = 200  # characters
_EVALUATION = "evaluation"  # parameter: whose conversations, if not those of training
_MOST_BODY, _BODY_SECONDS = 1 << 17, 10  # of a request that writes: the longest message has 4 bytes a character


def application(runs: Sequence[RunView], token: str, start: Start = SpeakerProcess) -> ASGIApp:
    """The page and its API over `runs`, for requests that have `token`: once in the address, then in a cookie.

    `start` serves models when a reader wants to talk with them.
    """
    talk = PageTalk(runs, start)

    def listed(request: Request) -> Any:
        return [{"run": number, **run.summary()} for number, run in enumerate(runs)]

    def of_run(answer: Callable[[RunView, Request], Any]) -> Callable[[Request], Any]:
        return lambda request: answer(_chosen(runs, request), request)

    api: dict[str, Callable[[Request], Any]] = {
        "/api/runs": listed,
        "/api/runs/{run:int}/metrics": of_run(lambda run, request: run.metrics(*_after(request))),
        "/api/runs/{run:int}/evaluations": of_run(lambda run, _: run.evaluations()),
        "/api/runs/{run:int}/events": of_run(lambda run, _: run.events()),
        "/api/runs/{run:int}/settings": of_run(lambda run, _: run.settings()),
        "/api/runs/{run:int}/reward": of_run(lambda run, _: run.reward()),
        "/api/runs/{run:int}/scores": of_run(_scores),
        "/api/runs/{run:int}/futures": of_run(_futures),
        "/api/runs/{run:int}/groups/{step:int}/{position:int}": of_run(_group),
        "/api/runs/{run:int}/tokens/{step:int}/{position:int}/{rollout:int}": of_run(_tokens),
        "/api/runs/{run:int}/parts": of_run(lambda run, _: parts(run)),
        "/api/runs/{run:int}/conversations": of_run(_conversations),
        "/api/runs/{run:int}/judge": of_run(partial(_judge, runs)),
        "/api/runs/{run:int}/models": of_run(lambda run, _: models(run)),
        "/api/talk": lambda _: talk.state(),
        "/api/comparison": lambda request: compared(*_sides(runs, request)),
        "/api/ratings": lambda request: result(*_sides(runs, request)),
    }
    routes = [Route(path, _endpoint(answer)) for path, answer in api.items()]
    written: dict[str, Callable[[bytes], Any]] = {"/api/ratings": partial(rate, runs), "/api/talk": talk.act}
    routes += [Route(path, _posted(write), methods=["POST"]) for path, write in written.items()]
    routes += [Route("/", _file), Route("/static/{name}", _file)]
    faults: dict[Any, Any] = {
        HTTPException: _refused,
        ConfigError: _bad_request,
        OSError: _unreadable,
        RecursionError: _too_deep,
    }
    return Guard(Starlette(routes=routes, exception_handlers=faults), token)


class Guard:
    """Passes requests to `app` that come to the loopback address with the token; every answer gets HEADERS.

    A request for the page with the token in its address is sent on to the address without it, with a cookie.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token
        # Cookies are not separated by port: the servers of one machine must not replace each other's.
        self._cookie = f"view-{secrets.token_hex(4)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self.app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """What the server answers before it looks at the request itself; None if the request may pass."""
        if not _HOST.fullmatch(request.headers.get("host", "")):
            return _fault(request, 403, "this server answers only under the loopback address that it printed")
        if len(request.url.path) > _LONGEST_PATH:
            return _fault(request, 404, "no such page")
        if request.url.path == "/" and "token" in request.query_params:
            if self._matches(request.query_params["token"]):
                return self._with_cookie(request)
        elif self._matches(request.cookies.get(self._cookie, "")):
            return None
        return _fault(request, 403, "no valid token; open the address that `megatron-collab view` printed")

    def _matches(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())

    def _with_cookie(self, request: Request) -> Response:
        further = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        answer = RedirectResponse(f"/?{urlencode(further)}" if further else "/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return answer


def _endpoint(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """`answer` as JSON. Starlette runs it in a thread, since it is no coroutine: reading a run takes time."""
    return lambda request: _json(answer(request))


def _chosen(runs: Sequence[RunView], request: Request) -> RunView:
    number = request.path_params["run"]
    if number >= len(runs):
        raise HTTPException(404, f"no run {number}; there are {len(runs)}")
    return runs[number]


def _after(request: Request) -> tuple[int, int | None]:
    """The parameters `after` and `start`; the latter is None if it is missing or empty."""
    after, start = (request.query_params.get(name, default) for name, default in (("after", "-1"), ("start", "")))
    if not re.fullmatch(r"-1|\d{1,15}", after, re.ASCII):
        raise HTTPException(400, f"after={one_line(after, 40)}: give the number of a step, or -1")
    if not re.fullmatch(r"\d{0,15}", start, re.ASCII):
        raise HTTPException(400, f"start={one_line(start, 40)}: give the number of an answer, or nothing")
    return int(after), int(start) if start else None


def _futures(run: RunView, request: Request) -> Any:
    parameters = [entry for entry in request.query_params.multi_items() if entry[0] != _EVALUATION]
    return _existing(lambda: run.futures(selection(parameters), _evaluation(request)))


def _group(run: RunView, request: Request) -> Any:
    step, position = (request.path_params[name] for name in ("step", "position"))
    return _existing(lambda: run.group(step, position, _evaluation(request)))


def _tokens(run: RunView, request: Request) -> Any:
    return _existing(lambda: run.tokens(*(request.path_params[name] for name in ("step", "position", "rollout"))))


def _scores(run: RunView, request: Request) -> Any:
    named = places(request.query_params.get("groups", ""))
    return _existing(lambda: run.scores(named, _evaluation(request)))


def _evaluation(request: Request) -> str:
    return request.query_params.get(_EVALUATION, "")


def _existing(read: Callable[[], Any]) -> Any:
    """What `read` returns; 404 if there is no such group or evaluation."""
    try:
        return read()
    except LookupError as error:
        raise HTTPException(404, one_line(str(error))) from None


def _conversations(run: RunView, request: Request) -> Any:
    part, task = (request.query_params.get(name, "") for name in ("part", "task"))
    try:
        return Side(run, part).conversations(task)
    except LookupError as error:
        raise HTTPException(404, one_line(str(error))) from None


def _judge(runs: Sequence[RunView], run: RunView, request: Request) -> Any:
    source, metric = (request.query_params.get(name, "") for name in ("source", "metric"))
    return judge_check(runs, runs.index(run), source, metric)


def _sides(runs: Sequence[RunView], request: Request) -> list[Side]:
    try:
        return [side(runs, name, request.query_params.get(name, "")) for name in ("left", "right")]
    except LookupError as error:
        raise HTTPException(404, one_line(str(error))) from None


def _posted(write: Callable[[bytes], Any]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that does what the page itself sends as JSON: no other page can."""

    async def answer(request: Request) -> Response:
        origin, site = request.headers.get("origin", ""), request.headers.get("sec-fetch-site", "same-origin")
        if origin != f"http://{request.headers['host']}" or site != "same-origin":
            raise HTTPException(403, "only the page itself can write")
        if request.headers.get("content-type") != "application/json":
            raise HTTPException(415, "what is written must be sent as application/json")
        body = b""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > _MOST_BODY:
                        raise HTTPException(413, f"more than {_MOST_BODY} bytes")
        except TimeoutError:
            raise HTTPException(408, f"the request took more than {_BODY_SECONDS} s") from None
        try:
            return _json(await run_in_threadpool(write, body))
        except LookupError as error:
            raise HTTPException(404, one_line(str(error))) from None

    return answer


def _file(request: Request) -> Response:
    """A static file of the page."""
    name = request.path_params.get("name", "index.html")
    files = {file.name: file for file in resources.files(__package__).joinpath("static").iterdir()}
    if name not in files:
        raise HTTPException(404, "no such page")
    return Response(files[name].read_bytes(), media_type=_TYPES.get(name.rpartition(".")[2]))


def _json(content: Any, status: int = 200) -> Response:
    """ASCII, so that halves of surrogate pairs can be sent too; null for numbers that JSON cannot hold."""
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _fault(request: Request, status: int, message: str) -> Response:
    """One line: as JSON for the page's scripts, as text for a reader."""
    if request.url.path.startswith("/api/"):
        return _json({"error": message}, status)
    return PlainTextResponse(f"{message}\n", status)


def _refused(request: Request, error: HTTPException) -> Response:
    return _fault(request, error.status_code, error.detail)


def _bad_request(request: Request, error: ConfigError) -> Response:
    return _fault(request, 400, one_line(str(error)))


def _unreadable(request: Request, error: OSError) -> Response:
    """A file that is not there, or no longer: a resumed run removes those of steps that it repeats."""
    reason = error.strerror or str(error)
    return _fault(request, 404, one_line(f"{error.filename}: {reason}" if error.filename else reason))


def _too_deep(request: Request, error: RecursionError) -> Response:
    return _fault(request, 404, "what was requested is nested too deeply to be shown")
