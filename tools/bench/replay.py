"""Recorded answers of language models: whether a replay gives the same ones, without a call, and how many a second.

`python tools/bench/replay.py` records the calls of 500 conversations, which ask a real HTTP endpoint on loopback in
four turns, and of two judges of each, whose answers are cached. The endpoint never gives the same answer twice, even if
equal questions arrive at the same time. Then endpoint and key are removed, and the conversations are played again in
another order. Values:

- live_calls: calls of the replay that were not answered from the recording (they may go live); must be 0.
- equal: share of the conversations that equal the recorded ones exactly; must be 1.
- calls_per_second: calls that the replay answers in a process, the median of five replays.
- recorded_per_second: calls that were recorded a second, with endpoint and LiteLLM in the same process.
- bytes_per_call: of a recorded call on disk.
- latency_error: relative difference between the mean seconds of a call when recorded latencies are replayed, and the
  recorded mean; of the first 50 conversations.

--smoke: 10 conversations.
"""
# ruff: noqa: E402 (patches come before LiteLLM)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from aiohttp import web

from megatron_collab import patches

patches.apply("litellm")

from megatron_collab.config import Config
from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.caller import ask_as
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.recording import Recording
from megatron_collab.llm.tape import open_tape
from megatron_collab.settings import EndpointConfig

CONVERSATIONS, SMOKE_CONVERSATIONS, TIMED, AT_ONCE, TURNS, REPLAYS = 500, 10, 50, 32, 4, 5
INSTRUCTIONS = "You are a user who wants a table for some people, on a day, at a time. " * 20
FIELDS = [Field("thought", str), Field("said", str)]
JUDGED = [Field("thought", str), Field("score", float, 0.0, 1.0)]

Played = dict[int, list[str]]


async def play(client: LlmClient, endpoint: EndpointConfig, numbers: Sequence[int]) -> Played:
    """The answers of each conversation and its scores; AT_ONCE conversations at most are in flight."""
    places = asyncio.Semaphore(AT_ONCE)

    async def conversation(number: int) -> list[str]:
        async with places:
            ask_as(f"train-0-{number // 6}/{number // 3 % 2}/{number % 3}")
            messages = [{"role": "system", "content": INSTRUCTIONS}]  # every conversation begins in the same way
            answers: list[str] = []
            with suppress(LlmError):  # raised if a call goes live, since the endpoint is down
                for turn in range(TURNS):
                    messages = [*messages, {"role": "user", "content": f"turn {turn} after {answers[-1:]}"}]
                    answers.append((await client.ask(endpoint, messages, FIELDS))["said"])
                for rubric in ("how helpful?", "how short?"):
                    question = [{"role": "user", "content": f"{INSTRUCTIONS} {rubric} {answers[:1]}"}]
                    answers.append(str((await client.ask(endpoint, question, JUDGED, sample="0"))["score"]))
            return answers

    return dict(zip(numbers, await asyncio.gather(*map(conversation, numbers)), strict=True))


def client_of(folder: Path, name: str, latency: float = 0.0) -> LlmClient:
    """A client that records to `folder`, or replays from it; `name`: record or replay."""
    config = Config()
    config.run.dir, config.llm.replay_latency, config.llm.replay_missing = str(folder), latency, "live"
    setattr(config.llm, name, str(folder / "calls"))
    return LlmClient(
        cache=Cache(folder / "cache") if name == "record" else None, tape=open_tape(config.llm, Path(config.run.dir))
    )


async def record(folder: Path, numbers: Sequence[int]) -> tuple[Played, EndpointConfig, float]:
    """The conversations played with an endpoint, that endpoint, which is stopped, and the seconds."""
    answers, drawn = count(), random.Random(0)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(drawn.uniform(0, 0.02))
        number = next(answers)
        text = json.dumps({"thought": "so far so good " * 10, "said": f"answer {number}", "score": number % 100 / 100})
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 300, "completion_tokens": 40, "total_tokens": 340}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint = EndpointConfig(model="openai/m", api_base=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    began = time.monotonic()
    played = await play(client_of(folder, "record"), endpoint, numbers)
    seconds = time.monotonic() - began
    await runner.cleanup()
    return played, endpoint, seconds


def latency_error(folder: Path, endpoint: EndpointConfig, numbers: Sequence[int]) -> float:
    """Relative difference of the seconds of conversations, whose calls are sequential, from the recorded seconds."""
    recording = Recording(folder / "calls")
    calls = (recording.stored(number).call() for number in range(len(recording)))
    names = {f"train-0-{number // 6}/{number // 3 % 2}/{number % 3}" for number in numbers}
    recorded = sum(call.taken.seconds for call in calls if call.name in names)

    async def timed() -> float:
        client, took = client_of(folder, "replay", latency=1.0), 0.0

        async def played_seconds(number: int) -> float:
            began = time.monotonic()
            await play(client, endpoint, [number])
            return time.monotonic() - began

        for seconds in await asyncio.gather(*map(played_seconds, numbers)):
            took += seconds
        return took

    return abs(asyncio.run(timed()) / recorded - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few conversations: shows that it runs, no figures")
    numbers = list(range(SMOKE_CONVERSATIONS if parser.parse_args().smoke else CONVERSATIONS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["OPENAI_API_KEY"] = "sk-test-0123456789"
        recorded_answers, endpoint, seconds = asyncio.run(record(folder, numbers))
        del os.environ["OPENAI_API_KEY"]
        calls = len(numbers) * (TURNS + 2)
        size = sum(file.stat().st_size for file in (folder / "calls").iterdir())
        print(f"{calls} calls recorded in {seconds:.1f} s, {size / 1e6:.2f} MB")
        rates, equal, live = list[float](), 1.0, 0.0
        for seed in range(REPLAYS):
            client, order = client_of(folder, "replay"), random.Random(seed).sample(numbers, len(numbers))
            began = time.monotonic()
            replayed_answers = asyncio.run(play(client, replace(endpoint, deadline=1.0), order))
            rates.append(calls / (time.monotonic() - began))
            equal = min(
                equal, sum(replayed_answers[number] == recorded_answers[number] for number in numbers) / len(numbers)
            )
            live += client._tape.take_counters().get("llm/live", 0) if client._tape else calls
        print(f"replayed by {', '.join(f'{rate:.0f}' for rate in rates)} calls a second")
        values = {
            "live_calls": live,
            "equal": equal,
            "calls_per_second": round(statistics.median(rates)),
            "recorded_per_second": round(calls / seconds),
            "bytes_per_call": round(size / calls),
            "latency_error": round(latency_error(folder, endpoint, numbers[:TIMED]), 3),
        }
    print(json.dumps({"name": "replay", "values": values}))


if __name__ == "__main__":
    main()
