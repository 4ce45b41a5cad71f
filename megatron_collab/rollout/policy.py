"""What the sampler asks of an engine and of a chat template."""

from __future__ import annotations

from typing import Protocol

from megatron_collab.types import Message, Turn


class Policy(Protocol):
    """What samples the policy's turns."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Turn:
        """One turn after `prompt_ids`; raises rollout.sglang.EngineError where none can be had."""


class Renderer(Protocol):
    """A chat template as token ids."""

    def first(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """The prompt: all messages, and what opens the policy's turn."""

    def next(self, message: Message, turn: Turn) -> tuple[int, ...]:
        """What follows a sampled turn: its end where it lacks one, the message, the opening of the next turn."""
