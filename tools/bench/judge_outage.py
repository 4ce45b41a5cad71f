"""Scores of a judge during an outage: none may differ from those of a clean run, and none may become 0.

`python tools/bench/judge_outage.py` asks for 500 scores at a real HTTP endpoint on loopback, through Judge and
LiteLLM, first while it works, then while, drawn by seed for every request, 30 % fail (status 500, 429 with
Retry-After, a connection that is reset), 5 % hang until the client gives up, and 5 % are bad JSON, much of which
looks like 0 or like a part of the score. Values:

- wrong_scores: scores that differ from those of the clean run, Missing aside; must be 0.
- zero_by_failure: scores of 0 that are not 0 in the clean run; must be 0.
- missing: share of the scores that failed three tries (0.4 ** 3 = 0.064 is expected).
- calls: requests that the endpoint got during the outage.
- away_missing, away_wrong: missing and wrong ones of 100 scores that are requested while the endpoint is down for 60 s,
  with a judge's default tries and deadline; both must be 0.
- away_seconds: from the return of the endpoint until the last of these scores; the client pauses for 30 s at most.

--smoke: 20 scores, and 5 while the endpoint is down for 2 s.
"""
# ruff: noqa: E402 (patches come before LiteLLM)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from megatron_collab import patches

patches.apply("litellm")

from megatron_collab.llm.answer import Field
from megatron_collab.llm.client import LlmClient
from megatron_collab.reward.metrics import Judge
from megatron_collab.settings import EndpointConfig
from megatron_collab.types import Missing

JUDGEMENTS, AT_ONCE, SEED = 500, 24, 0
AWAY, AWAY_SECONDS = 100, 60.0
SMOKE_JUDGEMENTS, SMOKE_AWAY, SMOKE_AWAY_SECONDS = 20, 5, 2.0
TIMEOUT = 4.0  # seconds; a call takes some 20 ms, on a busy machine more
FIELDS = [Field("thought", str), Field("score", float, 0.0, 1.0)]

Scores = list[float | Missing]


class Endpoint:
    """Chat completions whose score depends only on the prompt, and whose faults depend on prompt and try."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken
        self.tries: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["messages"][0]["content"]
        self.tries[prompt] += 1
        draw = random.Random(f"{SEED} {prompt} {self.tries[prompt]}")
        score = random.Random(f"{SEED} {prompt}").choice([0.0, 1.0, *(i / 100 for i in range(100))])
        good = json.dumps({"thought": f"it's a {score}", "score": score})
        chance = draw.random() if self.broken else 1.0
        if chance < 0.30:
            return await fault(request, draw)
        if chance < 0.35:
            await asyncio.sleep(10 * TIMEOUT)
        return completion(bad_json(good, draw) if chance < 0.40 else good)


async def fault(request: web.Request, draw: random.Random) -> web.StreamResponse:
    kind = draw.choice(["500", "429", "reset"])
    if kind == "reset":
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    headers = {"Retry-After": "1"} if kind == "429" else {}
    return web.json_response({"error": {"message": "out of order"}}, status=int(kind), headers=headers)


def bad_json(good: str, draw: random.Random) -> str:
    half = good[: draw.randrange(len(good))]
    malformed = [
        "",
        "0",
        "null",
        "{}",
        "I would say 0.",
        '{"thought": "", "score": null}',
        '{"thought": "", "score": 11}',
    ]
    return draw.choice([half, good[:-1], good[:-2], *malformed, '{"thought": "", "score": false}', '{"score": 0}'])


def completion(text: str) -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
    return web.json_response({**body, "usage": usage})


async def serve(endpoint: Endpoint, port: int = 0) -> tuple[web.AppRunner, str]:
    """Start the endpoint; returns the runner that stops it, and its address."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def away(count: int, absent: float) -> tuple[Scores, float]:
    """`count` scores, requested while the endpoint is down for `absent` s, and seconds from its return to the last."""
    runner, url = await serve(Endpoint(broken=False))
    await runner.cleanup()
    judge_client = Judge(LlmClient(), EndpointConfig("openai/judge", url))
    scores = [asyncio.create_task(judge_client.ask(f"Score conversation {i}.", FIELDS)) for i in range(count)]
    await asyncio.sleep(absent)
    runner, _ = await serve(Endpoint(broken=False), urlsplit(url).port or 0)
    began = time.monotonic()
    try:
        answers = await asyncio.gather(*scores)
    finally:
        await runner.cleanup()
    results = [answer if isinstance(answer, Missing) else answer["score"] for answer in answers]
    return results, time.monotonic() - began


async def judge(broken: bool, count: int) -> tuple[Scores, int]:
    """`count` scores, and the number of requests that the endpoint got."""
    endpoint = Endpoint(broken)
    runner, url = await serve(endpoint)
    judge_client = Judge(LlmClient(), EndpointConfig("openai/judge", url, attempts=3, timeout=TIMEOUT))
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask_score(i: int) -> float | Missing:
        async with gate:
            answer: dict[str, Any] | Missing = await judge_client.ask(f"Score conversation {i}.", FIELDS)
        return answer if isinstance(answer, Missing) else answer["score"]

    try:
        scores = list(await asyncio.gather(*(ask_score(i) for i in range(count))))
    finally:
        await runner.cleanup()
    return scores, endpoint.tries.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few scores: shows that it runs, no figures")
    few = parser.parse_args().smoke
    count = SMOKE_JUDGEMENTS if few else JUDGEMENTS
    os.environ.setdefault("OPENAI_API_KEY", "none")
    clean, _ = asyncio.run(judge(broken=False, count=count))
    scores, calls = asyncio.run(judge(broken=True, count=count))
    late, seconds = asyncio.run(away(SMOKE_AWAY, SMOKE_AWAY_SECONDS) if few else away(AWAY, AWAY_SECONDS))
    available = [(score, true) for score, true in zip(scores, clean, strict=True) if not isinstance(score, Missing)]
    values = {
        "wrong_scores": sum(score != true for score, true in available),
        "zero_by_failure": sum(score == 0 != true for score, true in available),
        "missing": sum(isinstance(score, Missing) for score in scores) / count,
        "missing_clean": sum(isinstance(score, Missing) for score in clean) / count,
        "calls": calls,
        "away_missing": sum(isinstance(score, Missing) for score in late),
        "away_wrong": sum(score != true for score, true in zip(late, clean, strict=False)),
        "away_seconds": seconds,
    }
    for why, count in Counter(score.why for score in scores if isinstance(score, Missing)).most_common(8):
        print(f"{count:3} x {why}")
    print(json.dumps({"name": "judge_outage", "values": values}))


if __name__ == "__main__":
    main()
