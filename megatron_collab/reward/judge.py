"""LLM judge: a language model that scores; an outage gives Missing, never a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_collab.config import EndpointConfig
from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.types import Missing


class Judge:
    """Asks the model of `reward.judge`, or another model at the same endpoint."""

    def __init__(self, client: LlmClient, endpoint: EndpointConfig) -> None:
        self.client = client
        self.endpoint = endpoint

    async def ask(
        self,
        prompt: str,
        fields: Sequence[Field],
        *,
        sample: str = "0",
        model: str | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Any] | Missing:
        """The values of `fields` that the judge answers to `prompt`, Missing where it gives no usable answer.

        `sample` numbers several judgements of the same prompt; each is asked for once and cached. `model` and
        `max_tokens` replace those of the endpoint. Raises BudgetSpent.
        """
        endpoint = replace(
            self.endpoint, model=model or self.endpoint.model, max_tokens=max_tokens or self.endpoint.max_tokens
        )
        try:
            return await self.client.ask(endpoint, [{"role": "user", "content": prompt}], fields, sample=sample)
        except LlmError as error:
            return Missing(str(error))
