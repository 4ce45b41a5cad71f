"""The LiteLLM provider of the policy.

`policy/SAMPLE` is the model that is trained: the run's SGLang servers. Each has its own key, which stays in this
process's memory. SAMPLE and the messages determine the seed, and with a deterministic server the answer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import litellm

from megatron_collab.patches.litellm import add_provider


class PolicyProvider(litellm.CustomLLM):
    """Calls the OpenAI endpoint of the run's SGLang servers."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}

    def add(self, url: str, key: str) -> str:
        """Register the server at `url`, and with the first one this provider; returns its api_base."""
        if not self._keys:
            add_provider("policy", self)
        self._keys[f"{url}/v1"] = key
        return f"{url}/v1"

    async def acompletion(
        self,
        *,
        model: str,
        messages: list[dict[str, str]],
        api_base: str,
        optional_params: dict[str, Any],
        **_: Any,
    ) -> litellm.ModelResponse:
        drawn = hashlib.blake2b(json.dumps([model, messages]).encode(), digest_size=4)
        response = await litellm.acompletion(
            model="hosted_vllm/default",
            messages=messages,
            api_base=api_base,
            api_key=self._keys[api_base],
            seed=int.from_bytes(drawn.digest()) >> 1,
            **optional_params,
        )
        # No usage and no cost: otherwise LiteLLM looks up a price.
        response._hidden_params["response_cost"] = 0.0
        response.usage = None
        return response


POLICY = PolicyProvider()
