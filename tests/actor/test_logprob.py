"""Log-probs, their gradient and the entropy, on one rank and cut over two, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_collab.config import Config
from tests.actor.logprob_worker import compute
from tests.actor.ranks import run_ranks

VOCAB, PADDED = 13, 20  # the second of two ranks has 3 real entries and 7 of padding


@pytest.fixture(scope="module")
def given() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=4, size=(3, 5, PADDED)).astype(np.float32)
    logits[..., VOCAB:] = 50.0  # padding that would take all the probability
    labels = rng.integers(0, VOCAB, size=(3, 5))
    labels[0] = [0, 9, 10, 11, 12]
    return {"logits": logits, "labels": labels, "weights": rng.normal(size=(3, 5)).astype(np.float32), "vocab": VOCAB}


@pytest.fixture(scope="module")
def alone(given: dict[str, np.ndarray], one_rank: Config) -> dict[str, np.ndarray]:
    return compute(**given)


@pytest.fixture(scope="module")
def cut(given: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    folder: Path = tmp_path_factory.mktemp("logprob")
    np.savez(folder / "input.npz", **given)
    run_ranks("logprob_worker", 2, [str(folder)])
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(2)]


def expected(given: dict[str, np.ndarray], temperature: float) -> dict[str, np.ndarray]:
    logits = torch.tensor(given["logits"], dtype=torch.float64, requires_grad=True)
    scores = (logits[..., :VOCAB] / temperature).log_softmax(-1)
    log_probs = scores.gather(-1, torch.from_numpy(given["labels"])[..., None])[..., 0]
    (log_probs * torch.from_numpy(given["weights"])).sum().backward()
    entropy = -(scores.exp() * scores).sum(-1)
    found = {"log_probs": log_probs, "gradient": logits.grad, "entropy": entropy}
    return {name: value.detach().numpy() for name, value in found.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("what", ["log_probs", "gradient", "entropy"])
def test_one_rank(given: dict, alone: dict, what: str, temperature: float) -> None:
    found = alone[f"{what} {temperature}"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected(given, temperature)[what], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_two_ranks(given: dict, cut: list[dict], temperature: float) -> None:
    wanted = expected(given, temperature)
    for rank in cut:
        np.testing.assert_allclose(rank[f"log_probs {temperature}"], wanted["log_probs"], atol=1e-5)
        np.testing.assert_allclose(rank[f"entropy {temperature}"], wanted["entropy"], atol=1e-5)
    gradient = np.concatenate([rank[f"gradient {temperature}"] for rank in cut], axis=-1)
    np.testing.assert_allclose(gradient, wanted["gradient"], atol=1e-5)
    assert (gradient[..., VOCAB:] == 0).all(), "padding must not be trained"
