"""LoRA adapters outside of a model: combined per parameter, merged, read from a checkpoint, written for PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_collab.checkpoint.hf import HFTensors
from megatron_collab.checkpoint.stored import StoredWeights
from megatron_collab.models import lora as plan
from megatron_collab.models.hf_to_megatron import ModelShape, Shape, shard_shape, table
from megatron_collab.models.lora import Blocks
from megatron_collab.settings import ConfigError, LoraConfig

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of tensor names in a PEFT folder
_HINT = "give the model that the run started from"


def rows_of(blocks: Blocks, b: Sequence[Tensor]) -> Tensor:
    """The k matrices B [rows, r] of a parameter combined into one [out, k r]: each B fills its own r columns.

    Rows are in the parameter's order (models.lora.blocks); other elements are zero.
    """
    rank, width = b[0].shape[1], sum(matrix.shape[1] for matrix in b)
    parts = [iter(matrix.split([rows for of, rows in blocks if of == number])) for number, matrix in enumerate(b)]
    padded = [
        b[0].new_zeros(rows, width)
        if number is None
        else F.pad(next(parts[number]), (number * rank, width - (number + 1) * rank))
        for number, rows in blocks
    ]
    return torch.cat(padded)


def merged_weight(weight: Tensor, blocks: Blocks, a: Sequence[Tensor], b: Sequence[Tensor], scale: float) -> Tensor:
    """W + scale B A, summed in float32, in the dtype of `weight`: a parameter [out, in], or a rank's shard."""
    delta = rows_of(blocks, b).float() @ torch.cat(list(a)).float()
    return torch.add(weight.float(), delta, alpha=scale).to(weight.dtype)


class StoredAdapters:
    """The adapters in a checkpoint, and the parameters of `base` with them merged, read like `StoredWeights`."""

    def __init__(
        self, stored: StoredWeights, lora: LoraConfig, base: HFTensors, shape: ModelShape, source: Path
    ) -> None:
        """`source`: the folder of the base. Raises ConfigError if the adapters do not fit its model."""
        self.folder, self.lora = stored.folder, lora
        self._stored, self._base, self._shape = stored, base, shape
        self._entries = {entry.megatron: entry for entry in table(shape)}
        factors = plan.factors(shape, lora)
        for factor in factors:
            if (stored_shape := stored.shape(factor.key)) != factor.shape:
                state = f"has shape {stored_shape}" if stored_shape else "is missing"
                raise ConfigError(
                    f"--model={source}: {factor.key} has shape {factor.shape}; in the checkpoint it {state}; {_HINT}"
                )
        if extra := stored.uncovered_keys(factor.key for factor in factors):
            raise ConfigError(f"--model={source}: has no place for {extra[0]} of the checkpoint; {_HINT}")
        self._keys = [factor.key for factor in factors]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the adapters; the run kept the base in the same."""
        return self._stored.dtype(self._keys[0])

    def shape(self, name: str) -> Shape | None:
        return shard_shape(self._entries[name], tp=1) if name in self._entries else None

    def read(self, name: str) -> Tensor:
        """The full parameter with adapters merged, as the run publishes it."""
        entry = self._entries[name]
        weight = self._base.shard(entry, self._shape, 1, 0, self.dtype(name))
        adapters = plan.adapters(entry, self.lora)
        if not adapters:
            return weight
        pairs = (pair for _, *pair in adapters)
        a, b = ([self._stored.read(factor.key) for factor in column] for column in zip(*pairs, strict=True))
        return merged_weight(weight, plan.blocks(entry, self._shape, self.lora, 1), a, b, plan.scale(self.lora))

    def factors(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Every A and B by its key, in `dtype` (None: the checkpoint's)."""
        return {key: self._stored.read(key).to(dtype) for key in self._keys}


def write_peft(folder: Path, lora: LoraConfig, factors: dict[str, Tensor], base: str) -> None:
    """Write adapters for PEFT's `PeftModel.from_pretrained`; `base`: the name of the base model in its config.

    Reads the files back; raises ConfigError if they differ.
    """
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({key.split(".")[-3] for key in factors}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file({_PREFIX + key: tensor for key, tensor in factors.items()}, folder / PEFT_WEIGHTS, {"format": "pt"})
    reread = read_peft(folder)
    if reread.keys() != factors.keys() or not all(torch.equal(reread[key], factors[key]) for key in factors):
        raise ConfigError(f"{folder / PEFT_WEIGHTS}: differs when read back; check this host's memory")


def read_peft(folder: Path) -> dict[str, Tensor]:
    """Every A and B of a PEFT folder by its key (models.lora.Factor)."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / PEFT_WEIGHTS).items()}
