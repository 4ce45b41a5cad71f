"""An assistant behind LiteLLM, or on a running server, in place of the policy.

The policy is sampled by token ids from SGLang servers (inference/router.py), with prompts from its chat template. Any
other model gets messages and returns text; it can be evaluated, but not trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from megatron_collab.inference.client import EngineError, TurnOptions
from megatron_collab.llm.answer import LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.endpoint import SERVED, with_token_budget
from megatron_collab.settings import EndpointConfig
from megatron_collab.types import Finish, Message, ToolCall, Turn

UNKNOWN = -1  # token id of tokens that are only counted


class LlmAssistant:
    """A model behind LiteLLM, or a running server, by messages. Also the renderer, since its prompts have no ids.

    A turn has as many UNKNOWN tokens as the endpoint counted; if it does not count, as its visible text has in cl100k.
    The endpoint refuses conversations that are too long for it.
    """

    thought_end: int | None = None

    def __init__(self, endpoint: EndpointConfig, client: LlmClient, system: str = "") -> None:
        """`system`: system message of conversations that have none."""
        self.endpoint, self.client, self.system = endpoint, client, system

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        return ()

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        return ()

    def prompt_without_thoughts(
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
        affinity: str,
        messages: Sequence[Message],
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """See Assistant.generate. Only the run's own servers get the seed, since few endpoints support one.

        Its turns are never trained on, so `routing_from` is not used.
        """
        endpoint = with_token_budget(self.endpoint, options["max_new_tokens"])
        if str(endpoint.model).startswith(SERVED):
            endpoint = replace(endpoint, model=f"{endpoint.model}/{options['seed']}")
        if endpoint.temperature is not None:  # else it is not sent
            endpoint = replace(endpoint, temperature=options["sampling"].temperature)
        try:
            reply = await self.client.reply(endpoint, [message.as_dict() for message in self._shown(messages)])
        except LlmError as error:
            raise EngineError(str(error)) from error
        n = reply.tokens
        finish = Finish.LENGTH if reply.finish == "length" else Finish.STOP
        return Turn(prompt_ids, (UNKNOWN,) * n, (0.0,) * n, (0,) * n, finish, reply.text)

    def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        complete = not self.system or any(message.role == "system" for message in messages)
        return messages if complete else [Message("system", self.system), *messages]

    async def log_probs(
        self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], affinity: str
    ) -> tuple[float, ...]:
        raise EngineError("an assistant behind LiteLLM gives no log-probs of an answer")

    async def tool_calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        raise EngineError("an assistant behind LiteLLM cannot call tools")

    def use(self, servers: Collection[int]) -> None:
        """Does nothing: it does not use the run's servers."""

    def take_counters(self) -> dict[str, int]:
        return {}
