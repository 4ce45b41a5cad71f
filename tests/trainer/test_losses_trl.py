"""The losses of conf/algo against TRL's on the same tensors, if both define them alike.

Two are not compared, as TRL defines them differently: GSPO with an advantage per token, and CISPO with a lower bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.algo.advantages import token_weights
from megatron_collab.config import compose
from megatron_collab.settings import AlgoConfig
from megatron_collab.trainer.losses import policy_objective

RNG = np.random.default_rng(5)
B, T, LONGEST = 6, 9, 16
MASK = (np.arange(T) < RNG.integers(2, T + 1, (B, 1))).astype(np.float64)  # [B, T]
OLD = -RNG.exponential(size=(B, T))
BATCH = {
    "mask": MASK,
    "old": OLD,
    "new": OLD + RNG.normal(size=(B, T)) * 0.5,
    "reference": OLD + RNG.normal(size=(B, T)) * 0.3,
    "engine": OLD + RNG.normal(size=(B, T)) * 0.2,
    "advantages": np.repeat(RNG.normal(size=(B, 1)), T, axis=1),  # one per sequence
}
BY_TOKEN = {**BATCH, "advantages": RNG.normal(size=(B, T))}
# By case: (settings of conf/algo, advantages per token?, settings of TRL's trainer)
PPO = {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
CASES: dict[str, tuple[list[str], bool, dict[str, Any]]] = {
    "grpo": (["algo=grpo"], False, PPO | {"loss_type": "grpo", "beta": 0.04, "delta": 3.0}),
    "grpo without a dual clip": (["algo=grpo", "algo.clip_dual=0"], False, PPO | {"loss_type": "grpo", "beta": 0.04}),
    "ppo": (["algo=ppo"], True, PPO | {"delta": 3.0}),
    "dapo": (["algo=dapo"], True, PPO | {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0}),
    "dr_grpo": (
        ["algo=dr_grpo"],
        False,
        PPO | {"loss_type": "dr_grpo", "max_completion_length": LONGEST, "delta": 3.0},
    ),
    "gspo": (
        ["algo=gspo", "algo.kl_coef=0"],
        False,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (["algo=cispo"], True, {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon_low": 1.0}),
    "truncated importance sampling": (
        ["algo=dapo", "algo.correction=truncated", "algo.correction_high=1.1"],
        True,
        PPO | {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 3.0, "use_vllm": True, "cap": 1.1},
    ),
}
PROGRAM = [sys.executable, str(Path(__file__).with_name("trl_losses.py"))]
ASIDE = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "compared")}  # see tools/setup_env.sh


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, Any]]:
    """TRL's loss and gradient, by case."""
    results: dict[str, dict[str, Any]] = {}
    for batch, by_token in ((BATCH, False), (BY_TOKEN, True)):
        cases = {name: settings for name, (_, case_by_token, settings) in CASES.items() if case_by_token == by_token}
        payload = json.dumps({"batch": {name: values.tolist() for name, values in batch.items()}, "cases": cases})
        answer = subprocess.run(PROGRAM, input=payload, env=ASIDE, stdout=subprocess.PIPE, text=True, check=True)
        results |= json.loads(answer.stdout)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case: str, theirs: dict[str, dict[str, Any]]) -> None:
    options, by_token, _ = CASES[case]
    algo = compose([*options, "run.dir=r", "model.path=m", "data.train=t"]).algo
    loss, gradient = ours(algo, BY_TOKEN if by_token else BATCH)
    assert loss == pytest.approx(theirs[case]["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient, theirs[case]["gradient"], rtol=1e-6, atol=1e-9)


def ours(algo: AlgoConfig, batch: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss of a mini-batch and its gradient [B, T] in the log-probabilities."""
    trained = MASK > 0
    log_probs = torch.tensor(batch["new"], requires_grad=True)
    weights = token_weights(list(MASK), algo.average, longest=LONGEST)
    names = {
        "advantages": "advantages",
        "old_log_probs": "old",
        "log_probs": "engine",
        "reference_log_probs": "reference",
    }
    columns = {name: torch.tensor(batch[other][trained]) for name, other in names.items()}
    columns["weights"] = torch.tensor(np.stack(weights)[trained], dtype=torch.float64)
    micro_batch: Any = SimpleNamespace(columns=columns, sequence=torch.tensor(np.nonzero(trained)[0]), samples=B)
    selected = log_probs[torch.tensor(trained)]
    total, _ = policy_objective(lambda *_: (selected, torch.zeros_like(selected)), algo)(micro_batch, torch.empty(0))
    total.backward()
    assert log_probs.grad is not None
    return total.item(), log_probs.grad.numpy()
