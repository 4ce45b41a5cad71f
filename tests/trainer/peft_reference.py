"""Adapters by PEFT on a model of transformers, in a separate process without torchvision, like TRL's losses.

Called with folders. In each case.json names the model, the PEFT folder of the first adapters, AdamW's settings and the
number of steps; samples.npz has token_ids and loss_mask of each sample. Writes there before.npz and after.npz, the
log-probs of the trained tokens of each sample, and gradients.safetensors, trained.safetensors: the adapters' first
gradients of the mean loss, and the adapters after the steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["torchvision"] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import PeftModel, get_peft_model_state_dict  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    samples = np.load(folder / "samples.npz", allow_pickle=True)
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, case["adapters"], is_trainable=True)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), **case["adamw"])

    def log_probs() -> list[torch.Tensor]:
        rows = []
        for ids, mask in zip(samples["token_ids"], samples["loss_mask"], strict=True):
            tokens = torch.from_numpy(ids.astype(np.int64))
            scores = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            rows.append(scores[torch.from_numpy(mask[1:] > 0)])
        return rows

    def save(name: str) -> None:
        with torch.no_grad():
            np.savez(folder / name, *(scores.numpy() for scores in log_probs()))

    save("before.npz")
    for step in range(case["steps"]):
        optimizer.zero_grad()
        (-torch.cat(log_probs()).mean()).backward()
        if step == 0:
            gradients = {name.replace(".default.", "."): weight.grad.clone() for name, weight in trained.items()}
            save_file(gradients, folder / "gradients.safetensors")
        torch.nn.utils.clip_grad_norm_(list(trained.values()), case["clip_grad"])
        optimizer.step()
    save("after.npz")
    save_file(get_peft_model_state_dict(model), folder / "trained.safetensors")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
