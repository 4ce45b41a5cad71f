"""How groups are played: in training, and under the settings of a set of data.eval."""

from __future__ import annotations

import pickle

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.play_specs import play_spec


def test_a_set_has_its_budgets_or_those_of_training() -> None:
    config = Config()
    config.rollout.turn.max_new_tokens, config.rollout.max_user_turns, config.user.name = 100, 5, "reveal"
    training = play_spec(config)
    same = training.for_set(EvaluationSet("e.jsonl"))
    assert (same.rollout.turn, same.rollout.future) == (config.rollout.turn, config.rollout.future)
    assert (same.rollout.max_user_turns, same.users.user.name, same.rollouts) == (5, "reveal", 1)
    assert same.reward.malformed is None and same.rollout.futures == 1
    changed = training.for_set(
        EvaluationSet("e.jsonl", samples=4, temperature=0, user="llm", max_user_turns=1, max_new_tokens=7)
    )
    assert (changed.rollout.turn.temperature, changed.rollout.future.max_new_tokens) == (0, 7)
    assert (changed.rollout.max_user_turns, changed.users.user.name, changed.rollouts) == (1, "llm", 4)
    assert (training.rollout.turn.max_new_tokens, training.users.user.name) == (100, "reveal")
    assert training.reward.malformed == -1.0


def test_it_is_the_same_in_another_process() -> None:
    config = Config(users={"calm": {"class": "replay", "weight": 2}})
    config.reward.weights, config.reward.clamp = {"asks": 1.0, "bleu": 0.5}, {"bleu": 0.25}
    spec = play_spec(config)
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec and copied.reward.weights == {"asks": 1.0, "bleu": 0.5}
    assert copied.users.find("calm").kind is spec.users.find("calm").kind
