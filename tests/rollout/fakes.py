"""A policy and a chat template of a few lines, for conversations without an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from megatron_collab.config import Config, UserConfig
from megatron_collab.types import Finish, Message, Turn

END = 0


def config(**rollout: int) -> Config:
    """Options for conversations of the fakes; `rollout` sets options of that group."""
    made = Config(user=UserConfig(attempts=2))
    made.rollout.context_length = 4096
    for name, value in rollout.items():
        setattr(made.rollout, name, value)
    return made


def encode(text: str) -> tuple[int, ...]:
    """One token a character; 0 ends a turn."""
    return tuple(map(ord, text))


def decode(ids: tuple[int, ...]) -> str:
    return "".join(chr(i) for i in ids if i != END)


class CharacterRenderer:
    """`<role>content`, one token a character."""

    def first(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return encode("".join(f"<{message.role}>{message.content}" for message in messages) + "<assistant>")

    def next(self, message: Message, turn: Turn) -> tuple[int, ...]:
        lacking = () if turn.token_ids[-1:] == (END,) else (END,)
        return lacking + encode(f"<{message.role}>{message.content}<assistant>")


class FakePolicy:
    """Answers with `reply(prompt, seed)` after a random wait of up to `wait` seconds; counts what is in flight."""

    def __init__(self, reply: Callable[[str, int], str], wait: float = 0.0) -> None:
        self.reply = reply
        self.wait = wait
        self.now = self.peak = 0
        self.seeds: list[int] = []

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Turn:
        self.now += 1
        self.peak = max(self.peak, self.now)
        self.seeds.append(seed)
        try:
            await asyncio.sleep(random.Random(seed).uniform(0, self.wait))
            text = self.reply(decode(prompt_ids), seed)
        finally:
            self.now -= 1
        whole = (*encode(text), END)
        ids = whole[:max_new_tokens]
        finish = Finish.STOP if len(ids) == len(whole) else Finish.LENGTH
        return Turn(prompt_ids, ids, (-0.5,) * len(ids), 7, finish, decode(ids))
