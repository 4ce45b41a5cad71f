from __future__ import annotations

import litellm
import pytest

from megatron_collab.llm.price import Prices, tokens_at_most


def test_a_price_is_known_where_it_is_given_or_litellm_has_one() -> None:
    prices = Prices({"openai/m": [2.5, 10], "openai/free": [0, 0]})
    assert [prices.known(model) for model in ("openai/m", "openai/free", "openai/gpt-4o-mini")] == [True] * 3
    assert not prices.known("openai/n")
    assert not prices.known("ollama/llama2"), "0 in LiteLLM's table says nothing"
    assert prices.at_most("openai/m", 1000, 100) == pytest.approx(2.5e-3 + 1e-3)
    assert prices.at_most("openai/n", 1000, 100) is None


def test_a_model_of_no_provider_has_no_price_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(litellm, "suppress_debug_info", False)
    assert not Prices().known("a-model-of-no-provider")
    assert capsys.readouterr().out == ""


def test_the_runs_own_models_cost_nothing() -> None:
    assert [Prices().at_most(model, 10**6, 10**6) for model in ("policy/a-0", "served/judge/a-0")] == [0, 0]


def test_prices_that_grow_with_the_prompt_are_taken_at_their_highest() -> None:
    model = "gemini/gemini-2.5-pro"
    entry = litellm.model_cost[model]
    assert entry["input_cost_per_token_above_200k_tokens"] > entry["input_cost_per_token"]
    assert Prices().at_most(model, 1, 0) == pytest.approx(entry["input_cost_per_token_above_200k_tokens"])


@pytest.mark.parametrize(
    "text",
    ["", "hello there, how are you? " * 50, "你好我想订一张桌子。" * 50, "def f(x): return x[1:] + {'a': 1}\n" * 50],
)
def test_the_estimate_of_tokens_is_not_below_a_tokenizers(text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    assert tokens_at_most(text, text) >= litellm.token_counter(model="openai/gpt-4o", messages=messages)
