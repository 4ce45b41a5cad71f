"""The bench of the estimator: what it plays in text has the values of the recursion, and its gradients are unbiased."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_collab.algo import advantages
from megatron_collab.environments.desk_behavior import message_of
from megatron_collab.environments.desk_language import MODEL
from megatron_collab.environments.desk_model import USERS, DeskState, Questions
from megatron_collab.reward.multiturn import turn_reward
from tools.bench import estimator
from tools.bench.estimator import COST, OFTEN, SFT, WINDOWS, Groups, Policy

REPEATS = 400
START = next(start for start in estimator.starts(200, 0) if start.state == DeskState(1, 2))


def close(samples: np.ndarray, expected: np.ndarray, errors: float = 4.5) -> np.ndarray:
    """Whether means over the first axis are within so many standard errors."""
    standard_error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    return np.abs(samples.mean(0) - expected) <= errors * standard_error + 1e-9


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("action", [Questions(1, 0), Questions(0, 1)])
def test_futures_in_text_have_the_values_of_the_recursion(user: str, action: Questions) -> None:
    """At each window, for a reply to a first message."""
    goal, plays = replace(START.goal, user=user), []
    for index in range(150):
        trained = message_of(random.Random(f"reply {index}"), goal, START.messages, action)
        plays.append(estimator.play(OFTEN, goal, [*START.messages, trained], f"{index}", f"{index}").utilities)
    values = estimator.VALUES[OFTEN]
    expected = [values.of_reply(START.state, action, user, window).utility(COST) for window in WINDOWS]
    assert close(np.array(plays), np.array(expected)).all()
    assert np.array(plays)[:, 1:].std(0).min() > 0.05, "constant futures would be no test"


def test_what_a_question_gains_is_measured_in_text() -> None:
    """MR of futures of drawn replies, of questions less guesses, over the kinds of users of training."""
    rewards: dict[bool, list[list[float]]] = {True: [], False: []}
    for index in range(1200):
        goal, rng = (
            replace(START.goal, user=estimator.USERS[index % len(estimator.USERS)]),
            random.Random(f"drawn {index}"),
        )
        action = estimator.drawn_action(OFTEN, START.state, rng)
        trained = message_of(rng, goal, START.messages, action)
        reward = estimator.play(OFTEN, goal, [*START.messages, trained], f"{index}", f"{index}").utilities[-1]
        rewards[action is not None].append([reward])
    of_questions, of_guesses = np.array(rewards[True]), np.array(rewards[False])
    gain = estimator.question_gain(OFTEN, START.state, COST)
    error = np.sqrt(of_questions.var() / len(of_questions) + of_guesses.var() / len(of_guesses))
    assert of_questions.mean() - of_guesses.mean() == pytest.approx(gain, abs=4.5 * error)
    assert estimator.question_gain(OFTEN, START.state, 2 * COST) < gain


def test_a_guess_counts_with_its_mean_over_the_goal() -> None:
    errors = []
    for index, start in enumerate(estimator.starts(400, 1)):
        trained = message_of(random.Random(f"{index}"), start.goal, start.messages, None)
        future = estimator.play(SFT, start.goal, [*start.messages, trained], f"{index}", f"{index}")
        errors.append(future.of_drawn_goal - future.utilities[-1])
    assert close(np.array(errors), np.zeros(1)).all() and np.std(errors) > 0.05


def test_the_mean_over_futures_is_the_mr_of_the_run() -> None:
    utilities = [0.3, -0.2, 0.7]
    reward = turn_reward([{"desk_utility": utility} for utility in utilities], {"desk_utility": 1.0})
    assert reward.value == pytest.approx(np.mean(utilities))


def test_advantages_are_those_of_the_run() -> None:
    rewards = np.random.default_rng(0).normal(size=(3, 5, 2))
    group = ["group"] * 5
    for row in range(3):
        for k in range(2):
            values = rewards[row, :, k]
            assert estimator.rloo(rewards)[row, :, k] == pytest.approx(advantages.rloo(values, group))
            assert estimator.grpo(rewards)[row, :, k] == pytest.approx(advantages.grpo(values, group, group))


def gradients(of_own_rewards: bool = False) -> tuple[Policy, np.ndarray]:
    """Estimates [REPEATS, 3, P] from groups whose rewards are Q and noise: plain, and the two with a control variate.

    Its q is wrong on purpose; with `of_own_rewards` it also depends on the rewards that it corrects.
    """
    policy, rng, n = Policy(OFTEN, [START, START]), np.random.default_rng(0), estimator.TURNS
    q, chances = estimator.exact(OFTEN, START.state), list(OFTEN.chances(MODEL, START.state).values())
    estimates = []
    for _ in range(REPEATS):
        actions, extra = (rng.choice(len(chances), (2, n), p=chances) for _ in range(2))
        rewards = (q[actions] + rng.normal(0, 0.1, actions.shape))[..., None]
        wrong = np.tile(q + np.linspace(0, 0.2, len(q)), (2, 1))
        if of_own_rewards:
            np.put_along_axis(wrong, actions, rewards[..., 0], 1)
        played = Groups(actions, actions, rewards, rewards, rewards)
        ways = [estimator.subtracting_q(policy, list(wrong), played, turns) for turns in (None, extra)]
        plain = policy.sampled(actions, estimator.rloo(rewards))
        estimates.append([way.mean((0, 1)) for way in (plain, *ways)])
    return policy, np.array(estimates)


def test_gradients_are_unbiased_unless_the_control_variate_depends_on_their_rewards() -> None:
    policy, estimates = gradients()
    assert close(estimates, policy.gradient).all() and np.abs(policy.gradient).max() > 0.01
    policy, estimates = gradients(of_own_rewards=True)
    plain, *biased = close(estimates, policy.gradient, errors=6).all(1)
    assert plain and not any(biased)


def test_the_variance_of_f_futures_is_that_of_their_mean() -> None:
    """fixed + by_future / F, for noise with known variances."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 2, (2000, 1, 1)) + rng.normal(0, 3, (2000, 6, 1))
    variance = estimator.variance(noise)
    assert variance.fixed.mean() == pytest.approx(4, rel=0.15)
    assert variance.by_future.mean() == pytest.approx(9, rel=0.15)
    assert estimator.saved(variance, variance).value == pytest.approx(0)
    assert estimator.saved(variance, variance, 0.25).value == pytest.approx(0.5)


def test_the_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    first, second = np.array([0.1, 0.5, 0.5, -1.0, 2.0]), np.array([1.0, 3.0, 2.0, 0.0, 2.5])
    values = np.array([first, np.ones(5)])
    assert estimator.rank_correlation(values, second) == pytest.approx([spearmanr(first, second).statistic, 0])
