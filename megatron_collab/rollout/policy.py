"""What the sampler asks of an engine and of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_collab.config import SamplingConfig
from megatron_collab.rollout.tools import ToolParser
from megatron_collab.types import Message, Turn


class Policy(ToolParser, Protocol):
    """What samples the policy's turns, and finds the calls of tools in them."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, sampling: SamplingConfig, seed: int, affinity: str
    ) -> Turn:
        """One turn after `prompt_ids`; raises rollout.sglang.EngineError where none can be had.

        Calls of the same `affinity` share a prefix, and are best served by the same server.
        """


class Renderer(Protocol):
    """A chat template as token ids."""

    opens_thought: bool
    """Whether the prompt ends with `<think>`."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: all messages, and what opens the policy's turn."""

    def next(self, messages: Sequence[Message], turn: Turn) -> tuple[int, ...]:
        """What follows a sampled turn: its end where it lacks one, the messages, the opening of the next turn."""
