"""What a call costs: by the price that is given for its model, else by LiteLLM's; at most so much where nobody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron_collab.llm.endpoint import POLICY, SERVED

_MILLION = 10**6
_BYTES_PER_TOKEN = 2  # or more in any common language; English has four
_TOKENS_PER_MESSAGE = 16  # or less, beside its text: role and marks


class Prices:
    """Of the models that are called, in USD."""

    def __init__(self, given: Mapping[str, Sequence[float]] = {}) -> None:
        """`given`: by model, USD per million tokens of prompts and of answers (llm.prices)."""
        self._given = given

    def known(self, model: str) -> bool:
        """Whether it has a price. In LiteLLM's table 0 mostly says that nobody has entered one."""
        return self._per_token(model) is not None

    def at_most(self, model: str, prompt: int, answer: int) -> float | None:
        """What these tokens cost, by the highest of the model's prices where it has several; None where it has none."""
        per_token = self._per_token(model)
        return None if per_token is None else prompt * per_token[0] + answer * per_token[1]

    def of(self, model: str, usage: Any, listed: float | None) -> float | None:
        """What an answer with LiteLLM's `usage` costs, by LiteLLM's own count `listed` unless a price is given."""
        if model not in self._given and listed:
            return listed
        return self.at_most(model, usage.prompt_tokens, usage.completion_tokens)

    def _per_token(self, model: str) -> Sequence[float] | None:
        if model.startswith((f"{POLICY}/", SERVED)):  # of the run itself
            return 0.0, 0.0
        given = self._given.get(model)
        return _listed(model) if given is None else [usd / _MILLION for usd in given]


def tokens_at_most(*texts: str) -> int:
    """An upper estimate of the tokens of messages with these texts, in microseconds."""
    return sum(len(text.encode(errors="replace")) // _BYTES_PER_TOKEN + _TOKENS_PER_MESSAGE for text in texts)


@cache
def _listed(model: str) -> tuple[float, float] | None:
    """LiteLLM's USD per token of prompts and answers; where long prompts have other prices, the higher ones."""
    import litellm  # which takes seconds

    try:
        prompt, answer = litellm.cost_per_token(model=model, prompt_tokens=_MILLION, completion_tokens=_MILLION)
    except Exception:  # it has no type for a model that is not in its table
        return None
    return (prompt / _MILLION, answer / _MILLION) if prompt + answer else None
