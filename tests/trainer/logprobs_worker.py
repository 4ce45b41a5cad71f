"""One rank of test_logprob.py: `logprobs_worker FOLDER`; reads FOLDER/input.npz, writes FOLDER/rankN.npz."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_collab.trainer.logprobs import head_log_probs
from tests.ranks import make_config, process_group

TEMPERATURES = (1.0, 0.7)


def compute(
    given: Mapping[str, np.ndarray],
    temperature: float,
    *,
    tokens: int | None = None,
    main_grad: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, np.ndarray]:
    """Log-probs, entropy and the gradients of their weighted sum, of this rank's rows of the head.

    `tokens`: only the first ones. `main_grad`: into a buffer that holds ones.
    """
    here = {name: torch.from_numpy(array).to(device) for name, array in given.items() if name != "vocab"}
    hidden = here["hidden"][:tokens].to(dtype).requires_grad_()
    head = here["head"].to(dtype).chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    if main_grad:
        head.main_grad = torch.ones(head.shape)
    log_probs, entropy = head_log_probs(hidden, head, here["labels"][:tokens], temperature, int(given["vocab"]))
    loss = (log_probs * here["of_log_prob"][:tokens]).sum() + (entropy * here["of_entropy"][:tokens]).sum()
    loss.backward()
    assert (head.grad is None) == main_grad
    head_grad = head.main_grad - 1 if main_grad else head.grad
    found = {"log_probs": log_probs, "entropy": entropy, "hidden_grad": hidden.grad, "head_grad": head_grad.float()}
    return {name: value.detach().cpu().float().numpy() for name, value in found.items()}


def main(folder: Path) -> None:
    given = dict(np.load(folder / "input.npz"))
    with process_group(make_config(folder, {"parallel.tp": 2})):
        found = {f"{name} {t}": value for t in TEMPERATURES for name, value in compute(given, t).items()}
        found |= {f"{name} empty": value for name, value in compute(given, 1.0, tokens=0).items()}
        np.savez(folder / f"rank{dist.get_rank()}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
