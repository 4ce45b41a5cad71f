"""The divergence of TRL's GKDTrainer, in a separate process without torchvision, which it does not need.

Reads a JSON object from standard input, {"hidden": [T][H], "head": [V][H], "teacher_hidden", "teacher_head", "of_kl":
[T], "temperature"}, and writes one: the reverse KL of each token (beta = 1), and the gradients of its sum weighted by
`of_kl`.
"""

from __future__ import annotations

import json
import sys

sys.modules["torchvision"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from trl.experimental.gkd.gkd_trainer import GKDTrainer  # noqa: E402

if __name__ == "__main__":
    request = json.load(sys.stdin)
    temperature = request.pop("temperature")
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in request.items()}
    hidden, head = tensors["hidden"].requires_grad_(), tensors["head"].requires_grad_()
    logits = hidden @ head.t(), tensors["teacher_hidden"] @ tensors["teacher_head"].t()
    kl = GKDTrainer.generalized_jsd_loss(*logits, beta=1, temperature=temperature, reduction="none").sum(-1)
    (kl * tensors["of_kl"]).sum().backward()
    print(json.dumps({"kl": kl.tolist(), "hidden_grad": hidden.grad.tolist(), "head_grad": head.grad.tolist()}))
