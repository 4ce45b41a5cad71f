"""What this machine has: the device, its torch.distributed backend, and optional libraries. No other module probes.

Import-light: torch and the probed libraries are imported only when they are asked about.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GPU = "cuda"  # as torch names it


@dataclass(frozen=True)
class Probe:
    """One thing that may be there.

    `detail` is its version, or the reason why it is not used; `fallback` what is used without it, empty where
    nothing is.
    """

    name: str
    found: bool
    detail: str
    enables: str
    fallback: str


@dataclass(frozen=True)
class Device:
    """Where the trainer computes: torch device type and torch.distributed backend."""

    type: str
    backend: str


# name: (module to import, distribution, what it enables, what is used without it, empty where nothing is)
_LIBRARIES = {
    "torch": ("torch", "torch", "everything", ""),
    "megatron": ("megatron.core", "megatron-core", "the trainer", ""),
    "transformer_engine": (
        "transformer_engine.pytorch",
        "transformer-engine",
        "FP8, fused layers, context parallelism",
        "Megatron's local layers with torch attention; no FP8",
    ),
    # Without its CUDA extensions apex is of no use; this is one of them.
    "apex": ("fused_weight_gradient_mlp_cuda", "apex", "fused Adam and gradient accumulation", "torch AdamW"),
    "flash_attn": ("flash_attn", "flash-attn", "FlashAttention in the trainer", "torch scaled_dot_product_attention"),
    "sglang": ("sglang", "sglang", "rollouts", ""),
    "memory_saver": (
        "torch_memory_saver",
        "torch-memory-saver",
        "servers that give their GPU memory back while the trainer trains",
        "servers on GPUs of their own",
    ),
    "ray": ("ray", "ray", "conversations and scoring", ""),
}

# These need a CUDA device to run, though not to be installed or imported.
_CUDA_ONLY = ("transformer_engine", "apex", "flash_attn")
# On CPU these two can be imported only after patches.apply.
_NOT_IMPORTED = ("megatron.core", "sglang")

# Version of a package that only reserves its name; an unpinned transformer-engine may resolve to one. Compared as a
# whole: the releases of torch-memory-saver begin with 0.0 too.
_PLACEHOLDER = "0.0.0"


@cache
def probe(name: str) -> Probe:
    """Look for `name`: cuda, slurm, or one of _LIBRARIES."""
    if name == "cuda":
        return _cuda()
    if name == "slurm":
        return _slurm()
    module, distribution, enables, fallback = _LIBRARIES[name]
    found, detail = _library(module, distribution, name in _CUDA_ONLY)
    return Probe(name, found, detail, enables, fallback)


def probes() -> list[Probe]:
    """Every probe, in the order of the doctor's table."""
    return [probe(name) for name in ("cuda", *_LIBRARIES, "slurm")]


def _library(module: str, distribution: str, cuda_only: bool) -> tuple[bool, str]:
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False, "not installed"
    if version == _PLACEHOLDER:
        return False, f"{version} is a placeholder"
    if cuda_only and not probe("cuda").found:
        return False, f"{version} needs a CUDA device"
    if module in _NOT_IMPORTED:
        return True, version
    try:
        importlib.import_module(module)
    except Exception as error:  # OSError without a driver, AssertionError where versions do not match, …
        return False, f"{version} cannot be imported: {' '.join(str(error).split())[:80]}"
    return True, version


def _cuda() -> Probe:
    found, detail = False, "torch is missing"
    if probe("torch").found:
        import torch

        found = torch.cuda.is_available()
        if found:
            detail = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        else:
            detail = "no CUDA device is visible" if torch.version.cuda else "torch is a CPU build"
    return Probe("cuda", found, detail, "training and sampling on GPUs, NCCL", "CPU, gloo")


def _slurm() -> Probe:
    found = shutil.which("sbatch") is not None
    detail = "not installed"
    if found:
        detail = subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout.strip()
    return Probe("slurm", found, detail, "sbatch on a cluster", "torchrun on this machine")


def count() -> int:
    """How many CUDA devices are visible."""
    if not probe("cuda").found:
        return 0
    import torch

    return torch.cuda.device_count()


def synchronize(*tensors: torch.Tensor) -> None:
    """Wait until all work queued on the current GPU is done, where one of `tensors` is on a GPU."""
    if any(tensor.is_cuda for tensor in tensors):
        import torch

        torch.cuda.synchronize()


@cache
def capability() -> tuple[int, int] | None:
    """CUDA compute capability of the weakest visible device, as (9, 0); None where there is no device."""
    if not probe("cuda").found:
        return None
    import torch

    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def check_device(setting: str) -> None:
    """ValueError where launch.device asks for a device that is not there."""
    if setting == "cuda" and not probe("cuda").found:
        raise ValueError("launch.device=cuda: no CUDA device is visible; use launch.device=cpu")


def select(setting: str) -> Device:
    """The device for launch.device: auto takes CUDA where it is visible.

    Raises ValueError for cuda where there is none.
    """
    check_device(setting)
    found = setting != "cpu" and probe("cuda").found
    return Device("cuda", "nccl") if found else Device("cpu", "gloo")
