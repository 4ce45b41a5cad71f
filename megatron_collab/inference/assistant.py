"""Who plays the assistant in conversations: what the Player asks for, and a model behind LiteLLM as one who does.

The policy is sampled by token ids from SGLang servers (router.py), with prompts from its chat template. Any other model
is given the messages and gives text; it can be evaluated, and not trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_collab.config import EndpointConfig, SamplingConfig
from megatron_collab.inference.client import EngineError
from megatron_collab.llm.answer import LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.endpoint import SERVED, with_token_budget
from megatron_collab.types import Finish, Message, ToolCall, Turn

UNKNOWN = -1  # the id of a token of which only the number is known


class Assistant(Protocol):
    """Samples turns; inference/router.py's Router is one."""

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
        """The next turn after `prompt_ids`, which say the same as `messages`, at most to the token `stop`.

        `routing_from`: the first position of which it is to have the experts, None for none. Raises EngineError.
        """

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """The calls in `text`. Raises EngineError."""

    def use(self, servers: Collection[int]) -> None: ...

    def take_counters(self) -> dict[str, int]: ...


class Renderer(Protocol):
    """Prompts as token ids; data/chat_template.py's ChatRenderer is one."""

    thought_end: int | None

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]: ...

    def next(
        self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None
    ) -> tuple[int, ...]: ...

    def again(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]: ...

    def opens_thought(self, prompt: Sequence[int]) -> bool: ...

    def tokens(self, text: str) -> tuple[int, ...]: ...


class LlmAssistant:
    """A model of LiteLLM's, or a running server, by messages; assistant and renderer in one, since prompts have no ids.

    A turn has as many UNKNOWN tokens as the endpoint counted, or as its visible text has in cl100k where it counts
    none. The endpoint itself refuses conversations that are too long for it.
    """

    thought_end: int | None = None

    def __init__(self, endpoint: EndpointConfig, client: LlmClient, system: str = "") -> None:
        """`system`: stands in front of conversations without a system message."""
        self.endpoint, self.client, self.system = endpoint, client, system

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        return ()

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        return ()

    def again(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]:
        return ()

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False

    def tokens(self, text: str) -> tuple[int, ...]:
        return ()

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
        """As Assistant says; the seed is sent to the run's own servers alone, since few endpoints know one.

        What it says is never trained, so nothing asks for its experts.
        """
        endpoint = with_token_budget(self.endpoint, max_new_tokens)
        if str(endpoint.model).startswith(SERVED):
            endpoint = replace(endpoint, model=f"{endpoint.model}/{seed}")
        if endpoint.temperature is not None:  # else it is not sent
            endpoint = replace(endpoint, temperature=sampling.temperature)
        try:
            reply = await self.client.reply(endpoint, [message.as_dict() for message in self._shown(messages)])
        except LlmError as error:
            raise EngineError(str(error)) from error
        n = reply.tokens
        finish = Finish.LENGTH if reply.finish == "length" else Finish.STOP
        return Turn(prompt_ids, (UNKNOWN,) * n, (0.0,) * n, (0,) * n, finish, reply.text)

    def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        own = not self.system or any(message.role == "system" for message in messages)
        return messages if own else [Message("system", self.system), *messages]

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        raise EngineError("an assistant behind LiteLLM calls no tools")

    def use(self, servers: Collection[int]) -> None:
        """It needs none of the run's servers."""

    def take_counters(self) -> dict[str, int]:
        return {}
