"""The losses of TRL's GRPOTrainer, in a separate process without torchvision, which it does not need.

Reads a JSON object from standard input, {"batch": name to [B][T], "cases": case to settings of the trainer}, and writes
one by case: {"loss": number, "gradient": [B][T]}, with the gradient in the log-probabilities.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.modules["torchvision"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

LEVEL = {"importance_sampling_level": "token", "beta": 0.0, "max_completion_length": 0}
ARGUMENTS = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
OFF = dict.fromkeys(("aux_loss_enabled", "_entropy_bonus_enabled", "use_vllm"), False)
OFF |= {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}


def loss(settings: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Loss and gradient of TRL's trainer for given log-probabilities instead of a model's."""
    log_probs = batch["new"].clone().requires_grad_()
    settings = {**OFF, **LEVEL, **settings}
    trainer: Any = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**{name: settings.get(name, value) for name, value in ARGUMENTS.items()}),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        current_gradient_accumulation_steps=1,
        vllm_importance_sampling_correction=settings["use_vllm"],
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    )
    mask = batch["mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "importance_sampling_ratio": (batch["old"] - batch["engine"]).exp().clamp(max=settings.get("cap", torch.inf)),
        "num_items_in_batch": mask.sum(),
    }
    total = GRPOTrainer._compute_loss(trainer, None, inputs)
    total.backward()
    return {"loss": total.item(), "gradient": log_probs.grad.tolist()}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in request["batch"].items()}
    print(json.dumps({name: loss(settings, tensors) for name, settings in request["cases"].items()}))
