"""Cost of holding 2,000 conversations in flight in one worker: the real ConversationWorker, for three minutes.

`python tools/bench/in_flight.py [--conversations 2000] [--minutes 3] [--turn-seconds 20]` starts the actors of a run
(one ConversationWorker with the scripted booking user, one RewardWorker with the metrics of booking,
the limiter) and plays groups of 8 trained turns x 3 futures. Only SGLang is simulated, by a process that answers
/generate in SGLang's format: the first token after a twentieth of the turn's time, all tokens at its end. A turn takes
half to one and a half of TURN_SECONDS and has 200 tokens: a question or a booking, then filler.

Groups begin a fifth faster than CONVERSATIONS need, if fewer than 1.1 x CONVERSATIONS are in flight, so that they are
spread over all stages. Time counts from the moment when CONVERSATIONS are in flight; when it is over, no more groups
begin, and those that have begun are played to their ends. If that many are not in flight within START_SECONDS, the
bench prints how many were and ends with exit code 1.

    lost            conversations begun that did not come back, ended in an error or lack a score
    in_flight_mean  turns of the policy that the worker waits for, sampled four times a second; in_flight_least: minimum
    us_per_turn     CPU time of the worker's process (user and system, microseconds) a turn, in the last two thirds
    cpu_share       the same over time; a worker can use one core at most, which is 1; engine_cpu_share: the engine's
    memory_growth   mean resident memory of the worker's process without shared memory (Ray's object store) in the last
                    third of the time over that of the second third; memory_mb: in the last third

--smoke: 100 conversations of short turns for six seconds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import ray
from aiohttp import web

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.environments import booking, tiny_model
from megatron_collab.launch import server_specs
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout.workers import start_workers
from megatron_collab.runtime.process import die_with_parent
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.types import Ending, Group, Missing

METRICS = "megatron_collab.environments.booking_metrics"
ROLLOUTS, FUTURES, USER_TURNS = 8, 3, 2
TOKENS, REPLIES = 200, 60  # tokens of a turn; different turns
BOOKS = 1 / 3  # of the turns, after which the user is done
TURNS = ROLLOUTS * (1 + FUTURES * sum((1 - BOOKS) ** turn for turn in range(1, USER_TURNS + 1)))  # of a group, mean
FIRST_TOKEN = 0.05  # of a turn's time
LOOK = 0.25  # seconds
START_SECONDS = 600
_SPAWN = multiprocessing.get_context("spawn")
PLAYED = (Ending.USER_DONE, Ending.TURN_LIMIT)


# --- the engine -------------------------------------------------------------------------------------------


class Engine:
    """SGLang's /generate: the seed of a request decides the reply and how long it takes."""

    def __init__(self, replies: Sequence[tuple[str, tuple[int, ...]]], turn_seconds: float) -> None:
        """`replies`: texts and their tokens."""
        self.turn_seconds = turn_seconds
        self.turns = _SPAWN.Value("L")  # answered so far, for the process that started this one as well
        self._events = [_event(text, tokens) for text, tokens in replies]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        drawn = random.Random(body["sampling_params"]["sampling_seed"])
        first_event, last_event = drawn.choice(self._events)
        seconds = self.turn_seconds * drawn.uniform(0.5, 1.5)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(FIRST_TOKEN * seconds)
        await response.write(first_event)
        await asyncio.sleep((1 - FIRST_TOKEN) * seconds)
        await response.write(last_event.replace(b'"prompt_tokens": 0', b'"prompt_tokens": %d' % len(body["input_ids"])))
        self.turns.value += 1
        return response


def _event(text: str, tokens: Sequence[int]) -> tuple[bytes, bytes]:
    """The first and the last event of a turn."""
    drawn = random.Random(text)
    meta = {"weight_version": "0", "prompt_tokens": 0, "cached_tokens": 0, "finish_reason": None}
    log_probs = [[-drawn.expovariate(1.0), token, None] for token in tokens]
    first = {"text": "", "output_ids": [], "meta_info": {**meta, "output_token_logprobs": []}}
    ended = {**meta, "output_token_logprobs": log_probs, "finish_reason": {"type": "stop"}}
    last = {"text": text, "output_ids": list(tokens), "meta_info": ended}
    return f"data: {json.dumps(first)}\n\n".encode(), f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()


def serve(engine: Engine, ready: Connection) -> None:
    """Serve until killed; sends its port through `ready` when it accepts requests."""
    die_with_parent()

    async def run() -> None:
        application = web.Application(client_max_size=2**30)
        application.router.add_post("/generate", engine.generate)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def serving(engine: Engine) -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of `engine`."""
    parent_end, child_end = _SPAWN.Pipe()
    process = _SPAWN.Process(target=serve, args=(engine, child_end), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{parent_end.recv()}", psutil.Process(process.pid)
    process.kill()
    process.join()


# --- the run ----------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """A sample of the state of worker and engine."""

    time: float  # seconds
    in_flight: int  # turns that the worker waits for
    turns: int  # that were answered so far
    cpu: float  # seconds that the worker has taken
    engine_cpu: float
    memory: int  # bytes that the worker holds alone


@dataclass
class Load:
    """Conversations that have begun and that were completed."""

    begun: int = 0
    completed: int = 0
    looks: list[Look] = field(default_factory=list)


def configure(folder: Path) -> Config:
    config = Config()
    tiny_model.word_tokenizer(booking.words()).save_pretrained(folder)
    config.run.dir, config.model.path, config.train.rollouts_per_prompt = f"{folder}/run", str(folder), ROLLOUTS
    config.rollout.futures, config.rollout.max_user_turns = FUTURES, USER_TURNS
    config.rollout.max_assistant_turns = 1 + USER_TURNS
    config.rollout.turn.max_new_tokens = config.rollout.future.max_new_tokens = 2 * TOKENS
    config.reward.weights = {f"{METRICS}:BookingRight": 1.0, f"{METRICS}:NeedlessQuestions": -0.1, "token_amount": 0.0}
    return config


def replies(renderer: ChatRenderer) -> list[tuple[str, tuple[int, ...]]]:
    """Turns of TOKENS tokens: a share BOOKS of them book, the others ask for something."""
    drawn, turns = random.Random(0), []
    for number, task in enumerate(booking.tasks(0, REPLIES)):
        question = booking.ask([drawn.choice(list(booking.SLOTS))])
        content = task.answer if number < BOOKS * REPLIES else question
        text = " ".join([content, *["."] * (TOKENS - 1 - len(content.split()))])
        turns.append((text, renderer.reply(text)))
    return turns


def play(worker: Any, engine: tuple[Engine, psutil.Process], conversations: int, seconds: float) -> Load:
    """Keep `conversations` in flight for `seconds`, then play what has begun to its end."""
    simulated, engine_process = engine
    process = psutil.Process(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))
    tasks = booking.tasks(1, 4096)
    load, pending = Load(), list[Any]()
    pace = TURNS * simulated.turn_seconds / conversations / 1.2  # seconds from one group to the next
    due, end = time.monotonic(), math.inf
    latest = due + START_SECONDS
    while pending or due < end:
        in_flight = ray.get(worker.__ray_call__.remote(lambda worker: sum(worker.policy.in_flight)))
        now = time.monotonic()
        if in_flight >= conversations and end == math.inf:
            end = now + seconds
            print(f"{in_flight} in flight", flush=True)
        if end == math.inf and now > latest:
            raise SystemExit(f"{in_flight} of {conversations} in flight after {START_SECONDS} s; ask for fewer")
        while due <= min(now, end):
            due += pace
            if in_flight >= 1.1 * conversations:
                continue
            number = load.begun // (ROLLOUTS * FUTURES)
            pending.append(worker.play.remote(tasks[number % len(tasks)], f"train-{number}"))
            load.begun += ROLLOUTS * FUTURES
        if now < end < math.inf:
            used, engine_used, memory = process.cpu_times(), engine_process.cpu_times(), process.memory_info()
            cpu, engine_cpu = (times.user + times.system for times in (used, engine_used))
            load.looks.append(Look(now, in_flight, simulated.turns.value, cpu, engine_cpu, memory.rss - memory.shared))
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=LOOK, fetch_local=False)
        for group in ray.get(done):
            load.completed += sum(completed(group))
    return load


def completed(group: Group) -> list[bool]:
    """For each future, whether it was played to an ending and has all its scores."""
    return [
        future.conversation.ending in PLAYED and not any(isinstance(s, Missing) for s in future.scores.values())
        for rollout in group.rollouts
        for future in rollout.futures
    ]


def values(load: Load) -> dict[str, float]:
    third = len(load.looks) // 3
    second, last = load.looks[third : 2 * third], load.looks[2 * third :]
    first, final = second[0], last[-1]
    turns, seconds = final.turns - first.turns, final.time - first.time
    in_flight = [look.in_flight for look in load.looks]
    memory = [mean(look.memory for look in looks) for looks in (second, last)]
    return {
        "lost": load.begun - load.completed,
        "memory_growth": round(memory[1] / memory[0], 4),
        "us_per_turn": round(1e6 * (final.cpu - first.cpu) / turns, 1),
        "in_flight_mean": round(mean(in_flight), 1),
        "in_flight_least": min(in_flight),
        "conversations": load.begun,
        "turns_per_second": round(turns / seconds, 1),
        "cpu_share": round((final.cpu - first.cpu) / seconds, 3),
        "engine_cpu_share": round((final.engine_cpu - first.engine_cpu) / seconds, 3),
        "memory_mb": round(memory[1] / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--turn-seconds", type=float, default=20.0)
    parser.add_argument(
        "--smoke", action="store_true", help="100 conversations for six seconds: shows that it runs, no figures"
    )
    options = parser.parse_args()
    if options.smoke:
        options.conversations, options.minutes, options.turn_seconds = 100, 0.1, 1.0
    with TemporaryDirectory() as folder:
        config = configure(Path(folder))
        engine = Engine(replies(ChatRenderer(folder)), options.turn_seconds)
        with serving(engine) as (url, process), ray_session(config.rollout.workers + config.reward.workers):
            client = server_specs.training(config).client
            workers = start_workers(play_spec(config), client, [(url, "no key is asked for")], {})
            load = play(workers.conversations[0], (engine, process), options.conversations, 60 * options.minutes)
    print(json.dumps({"name": "in_flight", "values": values(load)}))


if __name__ == "__main__":
    main()
