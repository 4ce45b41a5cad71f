"""A policy and a chat template of a few lines, for conversations without an engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import tool_spec, user_directory
from megatron_collab.rollout.tools.toolbox import Toolbox
from megatron_collab.rollout.users import UserReply
from megatron_collab.settings import RolloutConfig, SamplingConfig
from megatron_collab.settings.schema import UserConfig
from megatron_collab.types import Conversation, Finish, Message, Task, ToolCall, Turn

END = 0
STOP = "[[TERMINATE CHAT]]"


def config(program: Any = Config, **rollout: Any) -> Any:
    """Options for conversations with the fakes. `rollout` sets rollout.*; `turn` and `future` are token budgets."""
    options = program(user=UserConfig(attempts=2))
    options.rollout.context_length = 4096
    for name in ("turn", "future"):
        if name in rollout:
            getattr(options.rollout, name).max_new_tokens = rollout.pop(name)
    for name, value in rollout.items():
        setattr(options.rollout, name, value)
    return options


def encode(text: str) -> tuple[int, ...]:
    """One token per character; 0 ends a turn."""
    return tuple(map(ord, text))


def decode(ids: tuple[int, ...]) -> str:
    return "".join(chr(i) for i in ids if i != END)


class CharacterRenderer:
    """Writes `<role>content`, one token per character."""

    thought_end = ord("}")  # stands for </think>, which `tokens` also makes one token

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        opening = {None: "", True: "<think>", False: "<think></think>"}[thinking]
        text = "".join(f"<{message.role}>{message.content}" for message in messages)
        return encode(f"{text}<assistant>{opening}")

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        lacking = () if tuple(turn[-1:]) == (END,) else (END,)
        return lacking + self.first(messages, thinking)

    def prompt_without_thoughts(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]:
        return self.first(messages, thinking)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return decode(tuple(prompt)).endswith("<think>")

    def tokens(self, text: str) -> tuple[int, ...]:
        return encode(text.replace("</think>", "}"))


def routing(stream: Sequence[int], start: int | None, number: int) -> np.ndarray | None:
    """Experts that encode (position, number of the request), uint8 [R, 2], for the positions from `start` on."""
    if start is None:
        return None
    return np.array([(position, number) for position in range(start, len(stream) - 1)], np.uint8)


class FakePolicy:
    """Answers with `reply(prompt, seed)` after a random wait of up to `wait` seconds; counts what is in flight.

    A reply `call NAME {JSON}` calls a tool.
    """

    def __init__(self, reply: Callable[[str, int], str], wait: float = 0.0) -> None:
        self.reply = reply
        self.wait = wait
        self.now = self.peak = 0
        self.seeds: list[int] = []
        self.affinities: set[str] = set()

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        messages: Sequence[Message],
        max_new_tokens: int,
        sampling: SamplingConfig,
        seed: int,
        affinity: str,
        stop: int | None = None,
        routing_from: int | None = None,
    ) -> Turn:
        self.now += 1
        self.peak = max(self.peak, self.now)
        self.seeds.append(seed)
        self.affinities.add(affinity)
        try:
            await asyncio.sleep(random.Random(seed).uniform(0, self.wait))
            text = self.reply(decode(prompt_ids), seed)
        finally:
            self.now -= 1
        whole = (*encode(text), END)
        ids = whole[:max_new_tokens]
        finish = Finish.STOP if len(ids) == len(whole) else Finish.LENGTH
        experts = routing(prompt_ids + ids, routing_from, len(self.seeds))
        return Turn(prompt_ids, ids, (-0.5,) * len(ids), (7,) * len(ids), finish, decode(ids), routing=experts)

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        if not text.startswith("call "):
            return []
        _, name, arguments = text.split(" ", 2)
        return [ToolCall(name, json.loads(arguments))]


class FakeUser:
    """A user of one conversation that answers with `reply(goal, messages)`; records how it was called."""

    def __init__(
        self,
        reply: Callable[[str, Sequence[Message]], UserReply | str],
        goal: str,
        opens: Callable[[], str | Message] = lambda: "hi",
    ) -> None:
        self._reply, self._opens = reply, opens
        self.goal = goal
        self.calls: list[str] = []

    async def open(self) -> str | Message:
        return self._opens()

    async def start(self, conversation: Conversation) -> None:
        self.calls.append("start")

    async def reply(self, conversation: Conversation) -> UserReply:
        self.calls.append("reply")
        answer = self._reply(self.goal, conversation.messages)
        return answer if isinstance(answer, UserReply) else UserReply(Message("user", answer), STOP in answer)

    async def finish(self, conversation: Conversation) -> float:
        self.calls.append("finish")
        return 0.0


def toolbox_of(rollout: RolloutConfig, parser: Any) -> Toolbox:
    return Toolbox(tool_spec(rollout), rollout.tool_timeout, parser)


class FakeUsers:
    """Makes one FakeUser per conversation and keeps them by the name of the sample."""

    def __init__(self, reply: Callable[[str, Sequence[Message]], UserReply | str]) -> None:
        self.reply = reply
        self.opens: Callable[[str], str | Message] = "opened by {}".format  # by the name of the sample
        self.by_sample: dict[str, FakeUser] = {}
        self.directory, self.counters = user_directory(config()), Counter[str]()

    def make(self, task: Task, sample: str) -> FakeUser:
        assert sample not in self.by_sample
        self.by_sample[sample] = FakeUser(self.reply, task.goal, lambda: self.opens(sample))
        return self.by_sample[sample]

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Counts nothing."""
