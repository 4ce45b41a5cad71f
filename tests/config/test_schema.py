from __future__ import annotations

import pytest

from megatron_collab.config import future_range, load, parse, reward_to_go_gamma
from tests.helpers import refused


@pytest.mark.parametrize(
    ("futures", "expected"), [(3, (3, 3)), ("0", (0, 0)), ("adaptive(2,6)", (2, 6)), ("adaptive(3, 5)", (3, 5))]
)
def test_futures_are_a_number_or_a_range(futures: int | str, expected: tuple[int, int]) -> None:
    assert future_range(futures) == expected


@pytest.mark.parametrize("futures", [-1, "many", "adaptive(1,6)", "adaptive(4,4)", "adaptive(2)", "2.5"])
def test_other_futures_are_refused(futures: int | str) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        future_range(futures)


def test_turn_credits_and_their_discount() -> None:
    assert reward_to_go_gamma("last") is reward_to_go_gamma("equal") is None
    assert [reward_to_go_gamma(f"reward_to_go({gamma})") for gamma in ("1", "0.95", ".5")] == [1.0, 0.95, 0.5]


@pytest.mark.parametrize("credit", ["first", "reward_to_go", "reward_to_go(2)", "reward_to_go(-1)", "reward_to_go(x)"])
def test_other_credits_are_refused(credit: str) -> None:
    with pytest.raises(ValueError, match="gamma"):
        reward_to_go_gamma(credit)


def test_calls_need_no_quotes_of_hydra() -> None:
    config = load(["experiment=gsm8k", "rollout.futures=adaptive(2,6)", "reward.turn_credit=reward_to_go(0.9)"])
    assert config.rollout.futures == "adaptive(2,6)"
    assert config.reward.turn_credit == "reward_to_go(0.9)"


def test_settings_of_a_metric_and_of_the_two_budgets() -> None:
    config = load(["experiment=gsm8k", "reward.metrics.accuracy.judge=false", "rollout.future.max_new_tokens=7"])
    assert config.reward.metrics == {"accuracy": {"judge": False}}
    assert (config.rollout.turn.max_new_tokens, config.rollout.future.max_new_tokens) == (32, 7)


@pytest.mark.parametrize(
    ("mode", "tokens", "count", "rubric"),
    [
        ("paper", -5e-4, "policy", "holistic"),
        ("collabllm", -0.5, "cl100k", "holistic"),
        ("verl", -1e-4, "words", "parts"),
    ],
)
def test_a_published_reward_is_one_word(mode: str, tokens: float, count: str, rubric: str) -> None:
    reward = load(["experiment=gsm8k", f"reward={mode}", "reward.judge.model=openai/judge"]).reward
    assert reward.mode == mode
    assert reward.weights == {"accuracy": 1.0, "interactivity": 1.0, "token_amount": tokens, "asks": 0.0}
    assert (reward.metrics["token_amount"], reward.metrics["interactivity"]) == ({"count": count}, {"rubric": rubric})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward=verl"], "reward.weights.accuracy: needs a judge; set reward.judge.model"),
        (["rollout.futures=adaptive(1,3)"], "rollout.futures=adaptive(1,3): adaptive(min,max) needs 2 <= min < max"),
        (["rollout.futures=some"], "rollout.futures=some: give a number"),
        (["reward.turn_credit=reward_to_go(3)"], "reward.turn_credit=reward_to_go(3): choose last, equal"),
        (["rollout.train_turns=all"], "rollout.train_turns=all: compares sibling futures; set rollout.futures to 2"),
        (
            ["rollout.train_turns=all", "rollout.futures=2", "rollout.future.temperature=0.5"],
            "rollout.future.temperature=0.5: rollout.train_turns=all trains these turns too",
        ),
        (["reward.weights.turn_rewards=1"], "with rollout.futures=0 these rewards are credited to their turns already"),
        (["rollout.tools=[oracle]"], "rollout.tools=oracle: no such tool; known are calculator"),
        (["reward.metrics.bleu.level=token"], "reward.metrics.bleu: not in reward.weights"),
        (["reward.metrics.accuracy.level=token"], "reward.metrics.accuracy.level: accuracy has no such setting"),
        (["reward.weights.nice=1", "reward.metrics.nice.metric=kindness"], "reward.weights.nice: no such metric"),
        (["reward.mode=verl", "reward.clamp.accuracy=1"], "reward.clamp: reward.mode=verl is a published formula"),
        (["reward.clamp.bleu=1"], "reward.clamp.bleu: not in reward.weights"),
        (["user.personas=none.txt"], "user.personas=none.txt: no such file"),
        (
            ["llm.budget_usd=5", "user.model=openai/nobody-knows", "user.api_base=http://127.0.0.1:1/v1"],
            "llm.budget_usd=5: LiteLLM knows no price of user.model=openai/nobody-knows",
        ),
        (["rollout.future.max_new_tokens=0"], "rollout.future.max_new_tokens=0: must be greater than 0"),
    ],
)
def test_what_cannot_work_names_the_setting_and_the_way_out(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.judge.modl=x", "reward.judge.modl: no such option; the nearest is reward.judge.model ("),
        ("+reward.clampp.accuracy=1", "reward.clampp.accuracy: no such option; the nearest is reward.clamp ("),
        ("++lr=1e-6", "lr: no such option; the nearest is optim.lr ("),
        ("optim={clipgrad: 1.0}", "optim.clipgrad: no such option; the nearest is optim.clip_grad ("),
        ("++optim.clipgrad=1.0", "optim.clipgrad: no such option; the nearest is optim.clip_grad ("),
        ("+experimnt=booking", "experimnt: no such option; the nearest is experiment ("),
        ("foo.bar=1", "foo.bar: no such option; the nearest is "),
        ("+foo.bar=1", "foo.bar: no such option; the nearest is "),
        ("+hydra.foo=1", "hydra.foo: no such option; the nearest is "),
        ("experiment@foo=gsm8k", "Could not override 'experiment@foo'. Did you mean to override experiment? ("),
        ("optim.lr=1e-6,1e-5", "Ambiguous value for argument 'optim.lr=1e-6,1e-5' 1. To use it as a list, "),
    ],
)
def test_an_unknown_option_is_refused_and_nothing_that_is_refused_is_recommended(override: str, said: str) -> None:
    found = refused(override)
    assert found.startswith(said)
    assert "+" not in found and "multirun" not in found


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_says_nothing_where_the_option_is_there(plus: str) -> None:
    """Or may be added: the metrics of a reward."""
    overrides = ["reward=verl", "optim.lr=0.5", "rollout.futures=adaptive(2,6)", "reward.weights.bleu=0.5"]
    config = parse([plus + override for override in ("experiment=gsm8k", *overrides)])
    assert (config.reward.mode, config.optim.lr, config.rollout.futures) == ("verl", 0.5, "adaptive(2,6)")
    assert config.reward.weights["bleu"] == 0.5


def test_a_budget_is_held_where_prices_are_known() -> None:
    assert load(["experiment=gsm8k", "llm.budget_usd=5", "user.model=openai/gpt-4o-mini"]).llm.budget_usd == 5


def test_one_metric_stands_twice_under_other_names() -> None:
    config = load(
        ["experiment=gsm8k", "reward.weights.words=0", "+reward.metrics.words={metric: token_amount, count: words}"]
    )
    assert config.reward.metrics["words"] == {"metric": "token_amount", "count": "words"}
