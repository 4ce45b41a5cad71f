"""Adapters outside of a model: put together for a parameter, merged, read from a checkpoint, as a folder of PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_collab.checkpoint.hf import HFTensors
from megatron_collab.checkpoint.stored import Stored
from megatron_collab.config import ConfigError, LoraConfig
from megatron_collab.models import lora as plan
from megatron_collab.models.hf_to_megatron import ModelShape, Shape, shard_shape, table
from megatron_collab.models.lora import Blocks

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of a name in a PEFT folder
_WAY_OUT = "give the model that the run started from"


def rows_of(blocks: Blocks, b: Sequence[Tensor]) -> Tensor:
    """The k matrices B [rows, r] of a parameter as one [out, k r]: the rows of each in r columns of its own.

    In the order of the parameter's rows (models.lora.blocks); zero elsewhere.
    """
    rank, width = b[0].shape[1], sum(each.shape[1] for each in b)
    parts = [iter(each.split([rows for of, rows in blocks if of == number])) for number, each in enumerate(b)]
    made = [
        b[0].new_zeros(rows, width)
        if number is None
        else F.pad(next(parts[number]), (number * rank, width - (number + 1) * rank))
        for number, rows in blocks
    ]
    return torch.cat(made)


def merged(weight: Tensor, blocks: Blocks, a: Sequence[Tensor], b: Sequence[Tensor], scale: float) -> Tensor:
    """W + alpha / rank B A, summed in float32, in the dtype of `weight`: a parameter [out, in], or a rank's shard."""
    delta = rows_of(blocks, b).float() @ torch.cat(list(a)).float()
    return torch.add(weight.float(), delta, alpha=scale).to(weight.dtype)


class StoredAdapters:
    """The adapters in a checkpoint, and with them merged the parameters of `base`, read one by one as of `Stored`."""

    def __init__(self, stored: Stored, lora: LoraConfig, base: HFTensors, shape: ModelShape, source: Path) -> None:
        """`source`: the folder of the base. ConfigError where the adapters are not those of such a model."""
        self.folder, self.lora = stored.folder, lora
        self._stored, self._base, self._shape = stored, base, shape
        self._entries = {entry.megatron: entry for entry in table(shape)}
        factors = plan.factors(shape, lora)
        for factor in factors:
            if (found := stored.shape(factor.key)) != factor.shape:
                there = f"has shape {found}" if found else "is missing"
                raise ConfigError(
                    f"--model={source}: {factor.key} has shape {factor.shape}; in the checkpoint it {there}; {_WAY_OUT}"
                )
        if others := stored.beside(factor.key for factor in factors):
            raise ConfigError(f"--model={source}: has no place for {others[0]} of the checkpoint; {_WAY_OUT}")
        self._keys = [factor.key for factor in factors]

    def dtype(self, name: str) -> torch.dtype:
        """That of all adapters, in which the run held the base too."""
        return self._stored.dtype(self._keys[0])

    def shape(self, name: str) -> Shape | None:
        return shard_shape(self._entries[name], tp=1) if name in self._entries else None

    def read(self, name: str) -> Tensor:
        """A parameter as a whole, as the run publishes it."""
        entry = self._entries[name]
        weight = self._base.shard(entry, self._shape, 1, 0, self.dtype(name))
        own = plan.adapters(entry, self.lora)
        if not own:
            return weight
        a, b = ([self._stored.read(factor.key) for factor in each] for each in zip(*(f for _, *f in own), strict=True))
        return merged(weight, plan.blocks(entry, self._shape, self.lora, 1), a, b, plan.scale(self.lora))

    def factors(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Every A and B by its key, in `dtype` or that of the checkpoint."""
        return {key: self._stored.read(key).to(dtype) for key in self._keys}


def write_peft(folder: Path, lora: LoraConfig, factors: dict[str, Tensor], base: str) -> None:
    """Write adapters as PEFT's `PeftModel.from_pretrained` reads them; `base` is its name for the base model.

    ConfigError where what was written is not what is read again.
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
    again = read_peft(folder)
    if again.keys() != factors.keys() or not all(torch.equal(again[key], factors[key]) for key in factors):
        raise ConfigError(f"{folder / PEFT_WEIGHTS}: what was written is not what is read; check this host's memory")


def read_peft(folder: Path) -> dict[str, Tensor]:
    """Every A and B of a PEFT folder by its key (models.lora.Factor)."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / PEFT_WEIGHTS).items()}
