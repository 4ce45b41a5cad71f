"""Samples of older weights: the ratio is relative to the policy before the update, the weight to the sampler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Sample, ScoredBatch
from tests.ranks import learn, make_config, make_model, make_samples

HIGH = 1.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("stale") / "model")


def trained(rows: list[np.ndarray], samples: tuple[Sample, ...]) -> np.ndarray:
    """Values at the trained tokens of all samples, float64."""
    values = [row[sample.loss_mask > 0] for row, sample in zip(rows, samples, strict=True)]
    return np.concatenate(values).astype(np.float64)


@pytest.mark.seconds
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_old_samples_are_corrected_for_older_weights(folder: Path, one_rank: Config, mini_batches: int) -> None:
    settings = {
        "algo.mini_batches": mini_batches,
        "algo.correction": "truncated",
        "algo.correction_high": HIGH,
        "algo.kl_coef": 0.0,
        "optim.lr": 1e-2,
        "optim.warmup_steps": 0,
    }
    config = make_config(folder, settings)
    actor = PolicyTrainer(trainer_spec(config))
    drawn = make_samples(9, seed=3)
    engine = actor.log_probs(actor.chunks, Batch(drawn))  # the weights that sample
    samples = tuple(
        replace(sample, log_probs=row * sample.loss_mask) for sample, row in zip(drawn, engine, strict=True)
    )
    learn(actor, Batch(make_samples(9, seed=4)))
    before = actor.log_probs(actor.chunks, Batch(samples))  # the weights that are trained, a version later
    metrics = learn(actor, Batch(samples))

    log_weights = trained(before, samples) - trained(engine, samples)
    weights = np.minimum(np.exp(log_weights), HIGH)
    assert 0.05 < (weights == HIGH).mean() < 0.95 and weights.min() < 0.9
    assert metrics["correction/weight"] == pytest.approx(weights.mean(), rel=1e-5)
    assert metrics["mismatch/max_abs"] == pytest.approx(np.abs(log_weights).max(), rel=1e-5)
    if mini_batches == 1:  # the ratio is 1, however old the sample is
        advantages = trained(with_advantages(ScoredBatch(tuple(samples)), config.algo).advantages, samples)
        assert metrics["ratio_max_deviation"] == 0.0
        assert metrics["loss"] == pytest.approx(-(advantages * weights).mean(), rel=1e-5)
    else:  # the policy has moved since, and the weights are still those of before the first mini-batch
        assert metrics["ratio_max_deviation"] > 0.01
