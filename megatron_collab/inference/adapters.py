"""Adapters that a server of the policy holds beside the base (model.lora.serve=adapters): its start, and their name.

SGLang makes room for A and B at its start, for adapters that it loads then, and a request names those that it is
sampled with. The run's have one name. They are loaded empty, so that A and B are zero, and written in place by every
weight sync (weight_sync/receiver.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from megatron_collab.config import Config
from megatron_collab.models import hf_config, lora
from megatron_collab.runtime import hub

NAME = "policy"
SLOTS = 2  # of A and B in each linear layer: the base's, where they stay zero, and the run's


def served(config: Config) -> str | None:
    """What requests name; None where servers hold merged weights."""
    return NAME if config.model.lora.served else None


def write(folder: Path, config: Config) -> None:
    """Adapters of the run's rank, alpha and targets, as SGLang reads them at its start: PEFT's files, of no tensor."""
    shape = hf_config.read(hub.folder(config.model.path) / "config.json")
    settings = {
        "peft_type": "LORA",
        "r": config.model.lora.rank,
        "lora_alpha": config.model.lora.alpha,
        "target_modules": lora.projections(shape, config.model.lora),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({}, folder / "adapter_model.safetensors")


def arguments(folder: Path, on_cpu: bool) -> dict[str, Any]:
    """SGLang's arguments for the adapters in `folder`; pinned, they keep their slot."""
    found: dict[str, Any] = {
        "lora-paths": {"lora_name": NAME, "lora_path": str(folder), "pinned": True},
        "max-loras-per-batch": SLOTS,
    }
    return found | ({"lora-backend": "torch_native"} if on_cpu else {})
