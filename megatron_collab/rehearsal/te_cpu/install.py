"""Replaces the compiled kernels by the reference kernels, and makes torch report a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from megatron_collab.patches.megatron import with_reference_kernels
from megatron_collab.patches.rehearsal import GPU, LAYERS
from megatron_collab.rehearsal.te_cpu import extension, imports, permutation

# TransformerEngine's Python part in an environment for CPUs (tools/setup_env.sh); one for GPUs has the package.
FOLDER = Path(sys.prefix, "transformer-engine")


def install() -> None:
    """Import TransformerEngine with the reference kernels, permanently in this process; call before importing Megatron.

    TransformerEngine and Megatron then see one Hopper GPU, and all tensors claim to be on it. If the compiled part is
    installed but no GPU is visible, as on a login node, the reference kernels replace it in this process.
    Raises RuntimeError if there is a GPU, whose kernels should be used, or if Megatron was already imported;
    ModuleNotFoundError if the distribution transformer-engine is missing.
    """
    if with_reference_kernels():
        return
    if torch.cuda.is_available():
        raise RuntimeError("the reference kernels are for machines without a GPU; set CUDA_VISIBLE_DEVICES= (empty)")
    early = [name for name in ("megatron.core", "transformer_engine") if name in sys.modules]
    if early:
        raise RuntimeError(f"te_cpu's install must be called before the first import of {early[0]}")
    if importlib.util.find_spec("transformer_engine") is None:
        sys.path.append(str(FOLDER))
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(f"transformer-engine: not installed, neither in {FOLDER}; run make setup")
    GPU.put_in_force()
    imports.import_over(extension.module())
    permutation.replace_kernels()
    LAYERS.put_in_force()
