"""Optimizer state and gradients are offloaded to host memory and restored unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.trainer import host_memory
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch
from tests.ranks import learn, make_config, make_model, make_samples


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def actors(
    request: pytest.FixtureRequest, one_rank: Config, tmp_path_factory: pytest.TempPathFactory
) -> list[PolicyTrainer]:
    """Two actors that have trained the same step, the first with parallel.offload, in pieces smaller than storages."""
    folder = make_model(tmp_path_factory.mktemp("offload") / "model")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setattr(host_memory, "PIECE", 1 << 10)
    pair = []
    for offload in (True, False):
        config = make_config(folder, {"parallel.offload": offload, "model.dtype": request.param, "algo.kl_coef": 0.0})
        pair.append(PolicyTrainer(trainer_spec(config)))
        learn(pair[-1], Batch(make_samples(4, seed=1)))
    return pair


def bytes_held(actor: PolicyTrainer) -> int:
    """Bytes of optimizer state, masters and gradients."""
    inner = [part.optimizer for part in actor.policy.optimizer.chained_optimizers]
    tensors = [value for optimizer in inner for state in optimizer.state.values() for value in state.values()]
    tensors += [tensor for optimizer in inner for group in optimizer.param_groups for tensor in group["params"]]
    tensors += [buffer.grad_data for chunk in actor.policy.chunks for buffer in chunk.buffers]
    weights = {p.untyped_storage().data_ptr() for chunk in actor.policy.chunks for p in chunk.parameters()}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.data_ptr() not in weights)


@pytest.mark.seconds
def test_the_memory_is_free_while_offloaded(actors: list[PolicyTrainer]) -> None:
    offloading, keeping = actors
    parameters = sum(p.numel() for chunk in offloading.policy.chunks for p in chunk.parameters())
    assert bytes_held(offloading) >= 12 * parameters  # two moments and the gradient, float32
    with offloading.offloaded(), keeping.offloaded():
        assert bytes_held(offloading) == 0
        assert bytes_held(keeping) >= 12 * parameters
    assert bytes_held(offloading) == bytes_held(keeping)


@pytest.mark.seconds
def test_offloading_before_the_first_step(actors: list[PolicyTrainer]) -> None:
    """There is no optimizer state yet, and in float32 only gradients can be offloaded."""
    fresh = PolicyTrainer(actors[0].spec)
    with fresh.offloaded():
        pass
    assert learn(fresh, Batch(make_samples(4, seed=1)))["grad_norm"] > 0


@pytest.mark.seconds
def test_training_goes_on_as_if_nothing_had_been_moved(actors: list[PolicyTrainer]) -> None:
    offloading, keeping = actors
    with pytest.raises(ZeroDivisionError), offloading.offloaded():
        _ = 1 / 0
    batch = Batch(make_samples(4, seed=2))
    assert learn(offloading, batch) == learn(keeping, batch)
    for ours, theirs in zip(offloading.policy.chunks, keeping.policy.chunks, strict=True):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    rows = zip(*(actor.log_probs(actor.chunks, batch) for actor in actors), strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_and_gradients_leave_a_gpu_and_come_back(one_gpu: Config, tmp_path: Path, dtype: str) -> None:
    """Into pinned memory, and as the same numbers."""
    settings = {"launch.device": "cuda", "parallel.offload": True, "model.dtype": dtype, "algo.kl_coef": 0.0}
    actor = PolicyTrainer(trainer_spec(make_config(make_model(tmp_path / "model"), settings)))
    learn(actor, Batch(make_samples(4, seed=1)))
    for _ in range(2):  # the second time in the same host memory
        before, allocated = [tensor.cpu() for tensor in optimizer_state(actor)], torch.cuda.memory_allocated()
        with actor.offloaded():
            assert torch.cuda.memory_allocated() <= allocated - sum(tensor.nbytes for tensor in before)
            pieces = actor.policy.host_memory.pieces
            assert pieces and all(piece.is_pinned() for piece in pieces)
        assert all(torch.equal(was, now.cpu()) for was, now in zip(before, optimizer_state(actor), strict=True))


def optimizer_state(actor: PolicyTrainer) -> list[torch.Tensor]:
    inner = [part.optimizer for part in actor.policy.optimizer.chained_optimizers]
    return [
        value for optimizer in inner for state in optimizer.state.values() for value in state.values() if value.dim()
    ]
