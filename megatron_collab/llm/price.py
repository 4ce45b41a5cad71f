"""Price of a call: llm.prices, else LiteLLM's table; an upper bound if the endpoint reports no usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron_collab.llm.endpoint import POLICY, SERVED
from megatron_collab.patches.litellm import be_quiet

_MILLION = 10**6
_BYTES_PER_TOKEN = 2  # lower bound for common languages; English has four
_TOKENS_PER_MESSAGE = 16  # upper bound for role and markers, besides the text


class Prices:
    """Prices of language models, in USD."""

    def __init__(self, prices: Mapping[str, Sequence[float]] = {}) -> None:
        """`prices`: by model, USD per million prompt tokens and per million answer tokens (llm.prices)."""
        self._prices = prices

    def known(self, model: str) -> bool:
        """Whether the model has a price. In LiteLLM's table, 0 usually means that none was entered."""
        return self._per_token(model) is not None

    def at_most(self, model: str, prompt: int, answer: int) -> float | None:
        """Price of these tokens, at the model's highest rate if it has several; None if it has no price."""
        per_token = self._per_token(model)
        return None if per_token is None else prompt * per_token[0] + answer * per_token[1]

    def of(self, model: str, usage: Any, listed: float | None) -> float | None:
        """Price of an answer with LiteLLM's `usage`; if llm.prices lacks the model, LiteLLM's own price `listed`."""
        if model not in self._prices and listed:
            return listed
        return self.at_most(model, usage.prompt_tokens, usage.completion_tokens)

    def _per_token(self, model: str) -> Sequence[float] | None:
        if model.startswith((f"{POLICY}/", SERVED)):  # of the run itself
            return 0.0, 0.0
        prices = self._prices.get(model)
        return _listed(model) if prices is None else [usd / _MILLION for usd in prices]


def tokens_at_most(*texts: str) -> int:
    """Upper bound of the tokens of messages with these texts; takes microseconds."""
    return sum(len(text.encode(errors="replace")) // _BYTES_PER_TOKEN + _TOKENS_PER_MESSAGE for text in texts)


@cache
def _listed(model: str) -> tuple[float, float] | None:
    """LiteLLM's USD per prompt token and per answer token; the higher rates if long prompts have their own."""
    import litellm  # which takes seconds

    be_quiet()
    try:
        prompt, answer = litellm.cost_per_token(model=model, prompt_tokens=_MILLION, completion_tokens=_MILLION)
    except Exception:  # LiteLLM has no specific error for a model that is not in its table
        return None
    return (prompt / _MILLION, answer / _MILLION) if prompt + answer else None
