"""Adapters that a policy server holds besides the base (model.lora.serve=adapters): files and arguments at its start.

SGLang allocates A and B at its start for the adapters that it loads then, and a request names the adapters to sample
with. They are loaded empty, so that A and B are zero, and every weight sync writes
them in place (weight_sync/receiver.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from megatron_collab.models import hf_config, lora
from megatron_collab.models.lora import ServedAdapters
from megatron_collab.runtime import hub

NAME = "policy"  # of the adapters in requests
SLOTS = 2  # of A and B in each linear layer: one for the base, which stays zero, and one for the run's adapters


def write(folder: Path, model: str, adapters: ServedAdapters) -> None:
    """Write the run's adapters of `model` (folder or Hub name) for SGLang's start: PEFT's files without tensors."""
    shape = hf_config.read(hub.folder(model) / "config.json")
    settings = {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "target_modules": lora.projections(shape, adapters),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({}, folder / "adapter_model.safetensors")


def arguments(folder: Path, on_cpu: bool) -> dict[str, Any]:
    """SGLang's arguments for the adapters in `folder`; they are pinned, so they keep their slot."""
    options: dict[str, Any] = {
        "lora-paths": {"lora_name": NAME, "lora_path": str(folder), "pinned": True},
        "max-loras-per-batch": SLOTS,
    }
    return options | ({"lora-backend": "torch_native"} if on_cpu else {})
