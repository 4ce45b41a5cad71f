"""What is said of the prices of a run's models before it starts."""

from __future__ import annotations

import pytest

from megatron_collab.config import Config
from megatron_collab.launch.endpoints import check_prices
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.settings import ConfigError, EndpointConfig

MODELS = ("openai/nobody-knows", "openai/gpt-4o-mini", "policy", "served/judge", "openai/given")


def named_endpoints() -> list[NamedEndpoint]:
    return [
        NamedEndpoint(f"users.{number}.model", "user", EndpointConfig(model)) for number, model in enumerate(MODELS)
    ]


def test_recorded_answers_cost_nothing() -> None:
    config = Config()
    config.llm.budget_usd, config.llm.replay = 5.0, "calls"
    assert check_prices(config, named_endpoints()) == []


def test_without_a_budget_a_line_says_of_which_calls_the_cost_is_unknown() -> None:
    config = Config()
    config.llm.prices = {"openai/given": [1, 2]}
    assert check_prices(config, named_endpoints()) == [
        "the price of users.0.model=openai/nobody-knows is unknown, and so is the cost of its calls; "
        "set llm.prices='{openai/nobody-knows: [INPUT, OUTPUT]}' to its USD per million tokens (0 if it is free)"
    ]


def test_with_a_budget_they_are_refused_unless_prices_are_given() -> None:
    config = Config()
    config.llm.budget_usd, config.llm.prices = 5.0, {"openai/given": [1, 2]}
    with pytest.raises(
        ConfigError, match=r"^llm.budget_usd=5: the price of users.0.model=openai/nobody-knows is unknown"
    ):
        check_prices(config, named_endpoints())
    config.llm.prices["openai/nobody-knows"] = [0, 0]
    check_prices(config, named_endpoints())
