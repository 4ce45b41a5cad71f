"""One rank of test_logprob.py: `logprob_worker FOLDER`; reads FOLDER/input.npz, writes FOLDER/rankN.npz."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_collab.actor.logprob import entropy, token_log_probs
from tests.actor.ranks import make_config, process_group


def compute(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Of this rank's cut of `logits`: log-probs, the gradient of their weighted sum, entropy, by temperature."""
    found = {}
    for temperature in (1.0, 0.7):
        mine = torch.from_numpy(logits).chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
        found[f"entropy {temperature}"] = entropy(mine.detach().clone(), temperature, vocab).numpy()
        log_probs = token_log_probs(mine * 1.0, torch.from_numpy(labels), temperature, vocab)
        (log_probs * torch.from_numpy(weights)).sum().backward()
        found[f"log_probs {temperature}"] = log_probs.detach().numpy()
        found[f"gradient {temperature}"] = mine.grad.numpy()
    return found


def main(folder: Path) -> None:
    given = np.load(folder / "input.npz")
    with process_group(make_config(folder, {"parallel.tp": 2})):
        np.savez(folder / f"rank{dist.get_rank()}.npz", **compute(**{name: given[name] for name in given.files}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
