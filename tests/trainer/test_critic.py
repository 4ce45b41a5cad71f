"""The critic: its values from first principles, and that it learns them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec, trainer_spec
from megatron_collab.trainer.critic import Critic
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.microbatches import make_micro_batches
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import hidden_states, learn, make_config, make_model, make_samples

SAMPLES = make_samples(6, seed=3)
COLUMNS = {name: [getattr(sample, name) for sample in SAMPLES] for name in ("token_ids", "loss_mask")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture
def config(folder: Path, one_rank: Config) -> Config:
    return make_config(folder, {"algo.advantage": "gae", "algo.kl_coef": 0.0, "algo.critic_lr": 3e-3})


def untrained(config: Config) -> Critic:
    return Critic(policies.load(network_spec(config)), config.optim, False, config.algo.critic_clip)


def values_of(critic: Critic, config: Config) -> list[np.ndarray]:
    return critic.values(COLUMNS, make_micro_batches(network_spec(config), 8192, COLUMNS, torch.device("cpu")))


def test_an_untrained_critic_expects_nothing(config: Config) -> None:
    assert all((values == 0.0).all() for values in values_of(untrained(config), config))


def test_values_belong_to_the_states_before_the_tokens(config: Config) -> None:
    critic = untrained(config)
    network = unwrap(critic.chunks[-1])
    weight = torch.linspace(-1.0, 1.0, network.config.hidden_size)
    with torch.no_grad():
        network.value_head.weight.copy_(weight[None])
    policy = policies.load(network_spec(config))[0]
    for values, sample in zip(values_of(critic, config), SAMPLES, strict=True):
        expected = np.zeros(len(values), np.float32)
        expected[1:] = (hidden_states(policy, sample.token_ids[:-1]) @ weight).detach().numpy()
        np.testing.assert_allclose(values, expected * sample.loss_mask, atol=2e-5)


@pytest.mark.processes
def test_it_learns_the_returns(config: Config) -> None:
    """Every sample is worth 2: after some updates every value is near 2."""
    samples = tuple(
        replace(sample, credits=tuple(replace(credit, value=2.0) for credit in sample.credits)) for sample in SAMPLES
    )
    config.optim.lr = 1e-6  # the policy hardly moves
    config.algo.critic_clip = 10.0
    actor = PolicyTrainer(trainer_spec(config))
    losses = [learn(actor, Batch(samples))["critic/loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(2.0)  # (0 - 2)^2 / 2
    assert losses[-1] < 0.05
    rows = zip(values_of(actor.critic, config), SAMPLES, strict=True)
    trained = np.concatenate([values[sample.loss_mask > 0] for values, sample in rows])
    np.testing.assert_allclose(trained, 2.0, atol=0.6)


@pytest.mark.seconds
def test_only_the_critic_learns_during_its_warmup(config: Config) -> None:
    config.algo.critic_warmup = 1
    actor = PolicyTrainer(trainer_spec(config))
    before = actor.log_probs(actor.chunks, Batch(SAMPLES))
    warming = learn(actor, Batch(SAMPLES))
    for row, now in zip(before, actor.log_probs(actor.chunks, Batch(SAMPLES)), strict=True):
        np.testing.assert_array_equal(row, now)
    assert warming["critic/grad_norm"] > 0 and "loss" not in warming and "grad_norm" not in warming
    assert {"loss", "grad_norm"} < learn(actor, Batch(SAMPLES)).keys() and actor.step == 2
