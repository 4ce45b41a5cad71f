"""Simulated language models, and the ledger of what the calls of a conversation would take without waiting."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_collab.llm.answer import Answer, Field
from megatron_collab.llm.caller import caller
from megatron_collab.llm.endpoint import token_budget
from megatron_collab.llm.limiter import CallQueue, FinishedCall, Reservation
from megatron_collab.llm.recording import Recording
from megatron_collab.settings import EndpointConfig
from megatron_collab.types import Message
from simulated.server import FILLER, SEGMENT, Roofline

# Names of segments (server.py): of the system prompt, tasks, replies, messages of users.
SYSTEM, TASKS, REPLIES, MESSAGES = SEGMENT, SEGMENT + 1, 1 << 33, 1 << 40


@dataclass(frozen=True)
class Traffic:
    """Tokens and latencies of a run.

    `prompt`: tokens of a task, of which `system` are the same in all; `message`: of a user's message; `reply`: mean of
    replies without their bound; `spread`, `task_spread`: standard deviation of the logarithm of a reply's length, and
    of the mean of a task's. `latency`, `latency_99`: median and 99th percentile of seconds of a call, lognormal;
    `recorded`: seconds of calls, one of which is drawn instead.
    """

    system: int = 64
    prompt: int = 500
    message: int = 60
    reply: float = 400.0
    spread: float = 0.6
    task_spread: float = 0.3
    latency: float = 2.0
    latency_99: float = 15.0
    recorded: Sequence[float] = ()

    def call_seconds(self, drawn: random.Random) -> float:
        if self.recorded:
            return drawn.choice(self.recorded)
        sigma = math.log(self.latency_99 / self.latency) / 2.3263 if self.latency else 0.0
        return self.latency * math.exp(drawn.gauss(0.0, sigma))

    def reply_tokens(self, drawn: random.Random, task: random.Random) -> int:
        sigma = math.hypot(self.spread, self.task_spread)
        factor = math.exp(drawn.gauss(0.0, self.spread) + task.gauss(0.0, self.task_spread) - sigma**2 / 2)
        return max(2, round(self.reply * factor))


def recorded_seconds(folder: Path) -> list[float]:
    """Seconds of the answered calls of a recording (llm.record), each with its retries, but without cached answers.

    Raises ValueError if the folder holds no such call, or a damaged one.
    """
    recording = Recording(folder)
    calls = [recording.stored(number).call() for number in range(len(recording))]
    seconds = [call.taken.seconds for call in calls if call.failed is None and not call.taken.cached]
    if not seconds:
        raise ValueError(f"{folder}: holds no answered call")
    return seconds


@dataclass
class Ledger:
    """Seconds by conversation of turns and users (of a trained turn by rollout), and of its judge's calls."""

    trained: dict[str, float] = field(default_factory=dict)
    later: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    judges: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    decoded: float = 0.0  # tokens
    context: float = 0.0  # sum over the decoded tokens of the tokens before them

    def turn(self, prompt: Sequence[tuple[int, int]], length: int, roofline: Roofline) -> None:
        name, tokens = _conversation(), sum(size for _, size in prompt)
        self.decoded += length
        self.context += length * (tokens + length / 2)
        if len(prompt) == 2:
            self.trained[name.rpartition("/")[0]] = roofline.alone(tokens, length)
        else:  # all but the last two segments are in the cache
            self.later[name] += roofline.alone(sum(size for _, size in prompt[-1:]), length)

    def longest(self, step: str) -> float:
        """Seconds of the longest conversation of the streams that begin with `step`."""
        return max(
            self.trained[name.rpartition("/")[0]] + seconds + max(self.judges.get(name, [0.0]))
            for name, seconds in self.later.items()
            if name.startswith(step)
        )


def _conversation() -> str:
    current = caller()
    assert current is not None
    return current.name


class Policy:
    """Draws replies; those of a task have similar lengths."""

    def __init__(self, traffic: Traffic, ledger: Ledger, roofline: Roofline) -> None:
        self.traffic, self.ledger, self.roofline = traffic, ledger, roofline

    def draw(self, seed: int, prompt: Sequence[tuple[int, int]], most: int) -> tuple[int, int]:
        task = random.Random(prompt[1][0])
        length = min(most, self.traffic.reply_tokens(random.Random(seed), task))
        self.ledger.turn(prompt, length, self.roofline)
        return REPLIES + seed, length

    def text(self, name: int) -> str:
        return f"reply {name}"


class Renderer:
    """Token ids of prompts, by the lengths of `traffic`."""

    thought_end = None

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        system, prompt = self.traffic.system, self.traffic.prompt
        task = TASKS + int(messages[-1].content.split()[-1])
        return (SYSTEM, *[FILLER] * (system - 1), task, *[FILLER] * (prompt - system - 1))

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        digest = hashlib.blake2b(messages[-1].content.encode(), digest_size=6).digest()
        return (MESSAGES + int.from_bytes(digest), *[FILLER] * (self.traffic.message - 1))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False


class LanguageModel:
    """Users and judges behind the real limiter: a call takes seconds drawn from its conversation and number."""

    def __init__(self, limiter: Any, traffic: Traffic, ledger: Ledger) -> None:
        self.queue, self.traffic, self.ledger = CallQueue(limiter), traffic, ledger
        self.calls: Counter[str] = Counter()

    async def ask(
        self, endpoint: EndpointConfig, messages: Sequence[Any], fields: Sequence[Field], **options: Any
    ) -> dict[str, Any]:
        return (await self.answer(endpoint, messages, fields, **options)).values

    async def answer(
        self,
        endpoint: EndpointConfig,
        messages: Sequence[Any],
        fields: Sequence[Field],
        *,
        sample: str | None = None,
        has_fallback: bool = False,
    ) -> Answer:
        role = "user" if sample is None else "judge"
        name = f"{_conversation()}/{role}/{self.calls[f'{_conversation()}/{role}']}"
        self.calls[f"{_conversation()}/{role}"] += 1
        seconds = min(endpoint.timeout, self.traffic.call_seconds(random.Random(name)))
        if role == "user":
            self.ledger.later[_conversation()] += seconds
        else:
            self.ledger.judges[_conversation()].append(seconds)
        tokens = sum(len(message["content"]) for message in messages) // 4 + token_budget(endpoint)
        number = await self.queue.begin(Reservation(tokens, endpoint.timeout))
        await asyncio.sleep(seconds)
        self.queue.end(FinishedCall(number, tokens))
        return Answer({item.name: _value(item, name) for item in fields}, "", "")


def _value(item: Field, name: str) -> Any:
    if item.kind is str:
        return f"message {name}"
    return item.choices[0] if item.choices else item.kind(random.Random(name).random())
