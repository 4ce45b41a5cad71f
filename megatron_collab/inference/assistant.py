"""The assistant of a conversation, as players use it: samples turns, with prompts from a renderer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, Unpack

from megatron_collab.inference.client import TurnOptions
from megatron_collab.types import Message, ToolCall, Turn


class Assistant(Protocol):
    """Samples turns; inference/router.py's Router is one."""

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        *,
        affinity: str,
        messages: Sequence[Message],
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """The next turn after `prompt_ids`, the tokens of `messages`; it ends at the latest with the token `stop`.

        `routing_from`: first position whose experts the turn records; None: no experts. `progress`: called with the
        text while it grows, if the assistant streams. Raises EngineError.
        """

    async def log_probs(
        self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], affinity: str
    ) -> tuple[float, ...]:
        """The log-probs of `token_ids` after `prompt_ids` at temperature 1. Raises EngineError."""

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The tool calls in `text`. Raises EngineError."""

    def use(self, servers: Collection[int]) -> None: ...

    def take_counters(self) -> dict[str, int]: ...


class Renderer(Protocol):
    """Prompts as token ids; data/chat_template.py's ChatRenderer is one."""

    thought_end: int | None

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]: ...

    def next(
        self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None
    ) -> tuple[int, ...]: ...

    def prompt_without_thoughts(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]: ...

    def opens_thought(self, prompt: Sequence[int]) -> bool: ...

    def tokens(self, text: str) -> tuple[int, ...]: ...
