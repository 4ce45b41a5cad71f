"""LiteLLM providers of our own, there once this file is imported.

`scripted/WORLD` answers with `reply(goal, messages)` of megatron_collab.environments.WORLD, from the request alone.
`policy/SAMPLE` is the model that is trained: the run's SGLang servers, each with a key of its own, which stays in this
process's memory. What is drawn follows from SAMPLE and the messages, where the server is deterministic.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import Any

import litellm

from megatron_collab.patches.litellm import add_provider
from megatron_collab.rollout.users.llm import read_request


class Scripted(litellm.CustomLLM):
    """Answers at once, in the format of an llm user."""

    async def acompletion(self, *, model: str, messages: list[dict[str, str]], **_: Any) -> litellm.ModelResponse:
        goal, shown = read_request(messages)
        try:
            world = importlib.import_module(f"megatron_collab.environments.{model}")
        except ModuleNotFoundError as error:
            raise litellm.NotFoundError(f"no scripted user {model!r}", model=model, llm_provider="scripted") from error
        answer = {"current_answer": "", "thought": "", "response": world.reply(goal, shown)}
        response = litellm.ModelResponse(model=model)
        response.choices[0].message.content = json.dumps(answer)
        response.choices[0].finish_reason = "stop"
        return _free(response)


class Policy(litellm.CustomLLM):
    """The run's SGLang servers, by their OpenAI endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, str] = {}

    def add(self, url: str, key: str) -> str:
        """Make the server at `url` known; its api_base."""
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
        return _free(response)


def _free(response: litellm.ModelResponse) -> litellm.ModelResponse:
    """Nothing was used and nothing is to be paid: else LiteLLM looks for a price, and for why it is 0."""
    response._hidden_params["response_cost"] = 0.0
    response.usage = None
    return response


POLICY = Policy()
add_provider("scripted", Scripted())
add_provider("policy", POLICY)
