"""The reverse KL over the whole vocabulary and its gradients, on one rank and split over two, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.divergence import head_reverse_kl
from tests.ranks import init_parallel, make_config, run_ranks

TOKENS, HIDDEN, WIDER, VOCAB, PADDED = 7, 6, 9, 13, 20  # the second of two ranks has 3 real entries and 7 of padding
RESULTS = ("kl", "hidden_grad", "head_grad")


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "hidden": rng.normal(size=(TOKENS, HIDDEN)),
        "head": rng.normal(size=(PADDED, HIDDEN)),
        "teacher_hidden": rng.normal(size=(TOKENS, WIDER)),
        "teacher_head": rng.normal(size=(PADDED, WIDER)),
        "of_kl": rng.normal(size=TOKENS),
    }
    for name in ("head", "teacher_head"):
        arrays[name][VOCAB:] *= 50.0  # padding would get all the probability
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def distributions(arrays: Mapping[str, np.ndarray], temperature: float) -> tuple[torch.Tensor, ...]:
    """(hidden, head, log p, log q) from full logits in float64; the first two need a gradient."""
    doubles = {name: torch.tensor(array, dtype=torch.float64) for name, array in arrays.items()}
    hidden, head = doubles["hidden"].requires_grad_(), doubles["head"].requires_grad_()
    log_p = (hidden @ head[:VOCAB].t() / temperature).log_softmax(-1)
    log_q = (doubles["teacher_hidden"] @ doubles["teacher_head"][:VOCAB].t() / temperature).log_softmax(-1)
    return hidden, head, log_p, log_q


def gradients(hidden: torch.Tensor, head: torch.Tensor, kl: torch.Tensor, weights: np.ndarray) -> dict[str, np.ndarray]:
    (kl * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    results = {"kl": kl, "hidden_grad": hidden.grad, "head_grad": head.grad}
    return {name: value.detach().numpy() for name, value in results.items() if value is not None}


def expected(arrays: Mapping[str, np.ndarray], temperature: float) -> dict[str, np.ndarray]:
    hidden, head, log_p, log_q = distributions(arrays, temperature)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return gradients(hidden, head, kl, arrays["of_kl"])


def compute(
    arrays: Mapping[str, np.ndarray], temperature: float, *, tokens: int | None = None, main_grad: bool = False
) -> dict[str, np.ndarray]:
    """The KL and the gradients of its weighted sum, of this rank's rows of the heads. `main_grad`: into ones."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    here = {name: torch.from_numpy(array) for name, array in arrays.items()}
    hidden = here["hidden"][:tokens].clone().requires_grad_()
    head = here["head"].chunk(ranks)[rank].clone().requires_grad_()
    if main_grad:
        head.main_grad = torch.ones(head.shape)
    teacher = here["teacher_hidden"][:tokens], here["teacher_head"].chunk(ranks)[rank]
    kl = head_reverse_kl(hidden, head, *teacher, temperature, VOCAB)
    (kl * here["of_kl"][:tokens]).sum().backward()
    head_grad = head.main_grad - 1 if main_grad else head.grad
    results: dict[str, Any] = {"kl": kl, "hidden_grad": hidden.grad, "head_grad": head_grad}
    return {name: value.detach().numpy() for name, value in results.items()}


def compare(results: Mapping[str, np.ndarray], references: Mapping[str, np.ndarray], **tolerance: float) -> None:
    for name in RESULTS:
        np.testing.assert_allclose(results[name], references[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("size", [1, 5, 16, 30, 1 << 20])
def test_one_rank(arrays: dict, one_rank: Config, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of any size."""
    monkeypatch.setitem(logprobs.TILE, "cpu", size)
    results = compute(arrays, 0.7)
    compare(results, expected(arrays, 0.7), atol=2e-5)
    assert (results["head_grad"][VOCAB:] == 0).all(), "padding must not be trained"
    compare(compute(arrays, 0.7, main_grad=True), results, atol=2e-6)


def test_it_is_the_limit_of_the_generalized_jsd(arrays: dict, one_rank: Config) -> None:
    """GKD (arXiv:2306.13649, section 3), for beta to 1: with the teacher P and the policy Q

    JSD(beta) = beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q,
    JSD(beta) / (1 - beta) -> KL(Q || P).
    """
    beta = 1 - 1e-7
    flat = 3.0  # a temperature at which no probability is nearly 0, where the limit is far
    hidden, head, log_p, log_q = distributions(arrays, flat)
    policy, teacher = log_p.exp(), log_q.exp()
    log_m = (beta * teacher + (1 - beta) * policy).log()
    jsd = (beta * teacher * (log_q - log_m) + (1 - beta) * policy * (log_p - log_m)).sum(-1)
    compare(compute(arrays, flat), gradients(hidden, head, jsd / (1 - beta), arrays["of_kl"]), atol=2e-5)


@pytest.mark.slow
def test_it_is_the_divergence_of_trl(arrays: dict, one_rank: Config) -> None:
    request = {name: (array[:VOCAB] if "head" in name else array).tolist() for name, array in arrays.items()}
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trl_gkd.py"))],
        input=json.dumps({**request, "temperature": 0.7}),
        env={**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "compared")},  # see tools/setup_env.sh
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    references = {name: np.array(values) for name, values in json.loads(answer.stdout).items()}
    results = compute(arrays, 0.7)
    compare({**results, "head_grad": results["head_grad"][:VOCAB]}, references, atol=2e-5)


def test_the_same_distribution_has_no_divergence(arrays: dict, one_rank: Config) -> None:
    same = arrays | {"teacher_hidden": arrays["hidden"], "teacher_head": arrays["head"]}
    results = compute(same, 0.7)
    assert not results["kl"].any() and not results["hidden_grad"].any() and not results["head_grad"].any()


def test_extreme_logits(arrays: dict, one_rank: Config) -> None:
    """Logits of +-10,000 of the policy, exact in float32, beside ordinary ones of the teacher."""
    head, hidden = np.zeros((PADDED, HIDDEN), np.float32), np.zeros((TOKENS, HIDDEN), np.float32)
    head[:VOCAB, 0] = [1e4, 1e4 - 1, 1e4 - 3, -1e4, -1e4, 0, 1, 2, 9990, -5, 1e4 - 2, 100, -1e4]
    hidden[:, 0] = [1, 1, 1, -1, -1, 0, 1]
    extreme = arrays | {"head": head, "hidden": hidden}
    results, references = compute(extreme, 1.0), expected(extreme, 1.0)
    np.testing.assert_allclose(results["kl"], references["kl"], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(results["head_grad"], references["head_grad"], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def cut(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return run_ranks(compute_both, 2, arrays)


def compute_both(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As one of two ranks: for all tokens, and for none."""
    with init_parallel(make_config(Path("unused"), {"parallel.tp": 2})):
        empty = {f"{name} empty": value for name, value in compute(arrays, 1.0, tokens=0).items()}
        return compute(arrays, 0.7) | empty


@pytest.mark.processes
def test_two_ranks(arrays: dict, cut: list[dict]) -> None:
    np.testing.assert_array_equal(cut[0]["kl"], cut[1]["kl"], "the same on every rank")
    joined = cut[0] | {
        "hidden_grad": cut[0]["hidden_grad"] + cut[1]["hidden_grad"],
        "head_grad": np.concatenate([rank["head_grad"] for rank in cut]),
    }
    compare(joined, expected(arrays, 0.7), atol=2e-5)
    for rank in cut:
        assert rank["kl empty"].shape == (0,) and not rank["head_grad empty"].any()
