"""Packed trees train like plain packing: same loss, gradients, values and log-probs, in every kind of layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer import prefix_tree
from megatron_collab.trainer.megatron import config as megatron_config
from megatron_collab.trainer.megatron.paths import PackedTrees
from megatron_collab.trainer.trainer import PolicyTrainer, _columns
from megatron_collab.types import Batch, Credit, Sample
from tests.ranks import HF, init_parallel, make_config, make_model, run_ranks

# Every term of the update, with a reference and a critic; no clip, so that gradients are those of the loss.
UPDATE: dict[str, object] = {"algo.advantage": "gae", "algo.entropy_coef": 0.1, "optim.clip_grad": 1e9}
LAYOUTS: dict[str, dict[str, object]] = {
    "tp2-sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "pp2-vpp2": {"parallel.pp": 2, "parallel.vpp": 2, "train.tokens_per_micro_batch": 150},
    "dp2": {"parallel.recompute": "full"},
    "ep2": {"parallel.ep": 2, "train.tokens_per_micro_batch": 200, "parallel.recompute": "selective"},
}


def futures(seed: int) -> tuple[Sample, ...]:
    """Two prompts of two rollouts each; trained turns and two futures of each are samples, plus an unrelated one."""
    rng = np.random.default_rng(seed)
    samples = []

    def add(tokens: np.ndarray, first: int, group: str) -> None:
        mask = (np.arange(len(tokens)) >= first).astype(np.float32)
        engine = mask * -rng.exponential(size=len(tokens)).astype(np.float32)
        credit = Credit(((first, len(tokens)),), float(rng.normal()), peers=group, scale=group)
        samples.append(Sample(tokens, mask, engine, (credit,)))

    def more(tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([tokens, rng.integers(0, HF["vocab_size"], int(rng.integers(4, 20)))])

    for prompt in range(2):
        start = rng.integers(0, HF["vocab_size"], 30 + prompt)
        for rollout in range(2):
            turn = more(start)
            add(turn, len(start), str(prompt))
            for _ in range(2):
                future = more(turn)
                add(more(future), len(future), f"{prompt}/{rollout}")
    add(more(np.arange(3)), 2, "0")
    return tuple(samples)


def learned(config: Config) -> dict[str, Any]:
    """Metrics of an update, values and log-probs before it, the gradients of the policy and of the critic.

    Data parallel ranks have only their parts of the sum: for them the norms, which are metrics, are compared.
    """
    trainer = PolicyTrainer(trainer_spec(config))
    if trainer.critic and hasattr(head := trainer.critic.chunks[-1].module, "value_head"):
        torch.nn.init.constant_(head.value_head.weight, 0.1)
    batch = trainer.score(Batch(futures(0)))
    log_probs = trainer.log_probs(trainer.policy.chunks, batch)
    columns = _columns(batch)
    values = batch.values or trainer.critic.values(columns, trainer._micro_batches(columns))
    metrics = trainer.update(with_advantages(batch, config.algo))
    whole = trainer.trainables.values() if parallel_state.get_data_parallel_world_size() == 1 else ()
    gradients = [torch.cat([part.flatten() for part in trainable.gradients()]) for trainable in whole]
    arrays = [np.concatenate(rows) for rows in (log_probs, values)] + [
        gradient.numpy().copy() for gradient in gradients
    ]
    return {"metrics": metrics, "arrays": arrays}


def both_ways(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """`learned` in packed trees, and in the plain packing."""
    real = prefix_tree.prefix_trees
    with mock.patch.object(PackedTrees, "__init__", autospec=True, side_effect=PackedTrees.__init__) as packed:
        trees = learned(config)
        assert packed.called
        packed.reset_mock()
        with mock.patch.object(prefix_tree, "prefix_trees", lambda *arguments: real(*arguments, fewest=1 << 30)):
            plain = learned(config)
        assert not packed.called
    return trees, plain


def assert_equal(trees: dict[str, Any], plain: dict[str, Any], bound: float = 1e-6) -> None:
    assert trees["metrics"] == pytest.approx(plain["metrics"], rel=bound, abs=bound)
    for actual, expected in zip(trees["arrays"], plain["arrays"], strict=True):
        assert np.abs(actual - expected).max() <= bound * max(1.0, np.abs(expected).max())
    assert all(np.abs(array).max() > 1e-3 for array in plain["arrays"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    make_model(folder / "experts", experts=True)
    return make_model(folder / "model")


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{}, {"train.tokens_per_micro_batch": 90}, {"algo.loss": "gspo"}])
def test_trees_train_like_plain_packing(folder: Path, one_rank: Config, settings: dict[str, object]) -> None:
    assert_equal(*both_ways(make_config(folder, UPDATE | settings)))


def learn_in_layouts(folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """As one of two ranks."""
    results = {}
    for layout in layouts:
        config = make_config(folder.with_name("experts") if layout == "ep2" else folder, UPDATE | LAYOUTS[layout])
        with init_parallel(config):
            results[layout] = both_ways(config)
    return results


@pytest.mark.processes
@pytest.mark.parametrize("layouts", [("tp2-sp", "pp2-vpp2"), pytest.param(("dp2", "ep2"), marks=pytest.mark.slow)])
def test_trees_train_the_same_in_every_layout(folder: Path, layouts: Sequence[str]) -> None:
    for rank in run_ranks(learn_in_layouts, 2, folder, layouts):
        for ways in rank.values():
            assert_equal(*ways)


def learn_with_the_engine(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    megatron_config._engine = lambda dtype: True
    config = make_config(folder, UPDATE)
    with init_parallel(config):
        return both_ways(config)


@pytest.mark.processes
@pytest.mark.slow
def test_trees_in_the_layers_of_transformer_engine(folder: Path) -> None:
    """In float32, over reference kernels."""
    (ways,) = run_ranks(learn_with_the_engine, 1, folder, engine=True)
    assert_equal(*ways)
