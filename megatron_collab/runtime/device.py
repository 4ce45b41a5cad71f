"""Probes of this machine: device, torch.distributed backend and optional libraries. No other module probes.

Import-light: torch and the probed libraries are imported only by their probes. CUDA is not initialized here.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from megatron_collab.runtime import driver, toolkit

if TYPE_CHECKING:
    import torch

GPU = "cuda"  # as torch names it


class Probe(NamedTuple):
    """A component that this machine may have.

    `detail` is its version, or why it is not used; `fallback` is what replaces it, empty if it is required.
    """

    name: str
    available: bool
    detail: str
    enables: str
    fallback: str


class Device(NamedTuple):
    """Device of the trainer: torch device type and torch.distributed backend."""

    type: str
    backend: str


# name: (module to import, distribution, what it enables, what is used without it)
_LIBRARIES = {
    "torch": ("torch", "torch", "everything", ""),
    "megatron": ("megatron.core", "megatron-core", "the trainer", ""),
    "transformer_engine": (
        "transformer_engine.pytorch",
        "transformer-engine",
        "bfloat16 on GPUs, FP8, context parallelism",
        "Megatron's local layers with torch attention; on GPUs only float32",
    ),
    # apex is useless without its CUDA extensions; this is one of them.
    "apex": ("fused_weight_gradient_mlp_cuda", "apex", "fused Adam and gradient accumulation", "torch AdamW"),
    "flash_attn": ("flash_attn", "flash-attn", "FlashAttention in the trainer", "torch scaled_dot_product_attention"),
    "sglang": ("sglang", "sglang", "rollouts", ""),
    "memory_saver": (
        "torch_memory_saver",
        "torch-memory-saver",
        "servers that release their GPU memory during training",
        "servers on separate GPUs",
    ),
    "ray": ("ray", "ray", "conversations and scoring", ""),
}

_CUDA_ONLY = ("transformer_engine", "apex", "flash_attn")  # can be imported without a CUDA device, but not run
_NOT_IMPORTED = ("megatron.core", "sglang")  # on CPU they can be imported only after patches.apply
# Version of a package that only reserves its name; an unpinned transformer-engine may resolve to it. The comparison
# is exact: releases of torch-memory-saver begin with 0.0 too.
_PLACEHOLDER = "0.0.0"
# name: (detection, what it enables, what is used without it)
_SERVER_KERNELS = ("kernels of servers on GPUs, compiled when they start", "servers on CPUs")
_COMPILERS = {
    "nvcc": (toolkit.nvcc, *_SERVER_KERNELS),
    "ninja": (toolkit.ninja, *_SERVER_KERNELS),
    "cc": (toolkit.cc, "kernels of Triton, which ranks and servers on GPUs compile", "ranks and servers on CPUs"),
}


def kind(tensor: torch.Tensor | torch.UntypedStorage) -> str:
    """Device type of `tensor`, which decides how it is computed with."""
    return tensor.device.type


@cache
def probe(name: str) -> Probe:
    """Look for `name`: cuda, nvcc, ninja, cc, slurm, or one of _LIBRARIES."""
    if name == "cuda":
        return Probe(name, *_cuda(), "training and sampling on GPUs, NCCL", "CPU, gloo")
    if name == "slurm":
        return Probe(name, *_slurm(), "sbatch on a cluster", "torchrun on this machine")
    if name in _COMPILERS:
        detect, enables, fallback = _COMPILERS[name]
        return Probe(name, *detect(), enables, fallback)
    module, distribution, enables, fallback = _LIBRARIES[name]
    return Probe(name, *_library(module, distribution, name in _CUDA_ONLY), enables, fallback)


def probes() -> list[Probe]:
    """Every probe, in the order of the doctor's table."""
    return [probe(name) for name in ("cuda", *_LIBRARIES, *_COMPILERS, "slurm")]


def _library(module: str, distribution: str, cuda_only: bool) -> tuple[bool, str]:
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False, "not installed"
    if version == _PLACEHOLDER:
        return False, f"{version} is a placeholder"
    if cuda_only and not probe("cuda").available:
        return False, f"{version} needs a CUDA device"
    try:
        if module not in _NOT_IMPORTED:
            importlib.import_module(module)
    except Exception as error:  # OSError without a driver, AssertionError if versions do not match, …
        return False, f"{version} cannot be imported: {' '.join(str(error).split())[:80]}"
    return True, version


def _cuda() -> tuple[bool, str]:
    if not probe("torch").available:
        return False, "torch is missing"
    cuda = toolkit.torch_cuda()
    if not cuda:
        return False, "torch is a CPU build"
    if fault := driver.fault(cuda):
        return False, fault
    nvidia = driver.driver()
    return True, f"{len(nvidia.devices)} x {nvidia.devices[0].name}, driver {nvidia.version or 'without NVML'}"


def _slurm() -> tuple[bool, str]:
    if shutil.which("sbatch") is None:
        return False, "not installed"
    return True, subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout.strip()


def count() -> int:
    """Number of visible CUDA devices."""
    return len(driver.driver().devices) if probe(GPU).available else 0


def capability() -> tuple[int, int] | None:
    """CUDA compute capability of the weakest visible device, as (9, 0); None without a device."""
    devices = driver.driver().devices if probe(GPU).available else ()
    return min((device.capability for device in devices), default=None)


def pci_address() -> str:
    """Of torch's current GPU, as the kernel names it: 0000:1b:00.0."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def synchronize(*tensors: torch.Tensor) -> None:
    """If one of `tensors` is on a GPU, wait until all work queued on the current GPU is done."""
    if any(tensor.is_cuda for tensor in tensors):
        import torch

        torch.cuda.synchronize()


def free_cache() -> None:
    """Once all queued work is done, return the cached memory of torch's CUDA allocator to the GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def select(setting: str) -> Device:
    """The device for launch.device: auto takes CUDA if it is visible.

    Raises ValueError if cuda is set but not visible.
    """
    use_cuda = setting != "cpu" and probe("cuda").available
    if setting == "cuda" and not use_cuda:
        raise ValueError(f"launch.device=cuda: {probe(GPU).detail}; else use launch.device=cpu")
    return Device("cuda", "nccl") if use_cuda else Device("cpu", "gloo")


def refuse_unusable_driver(setting: str) -> None:
    """Raises ValueError if `auto` would take the CPU of a machine whose GPUs torch cannot use with their driver."""
    cuda = toolkit.torch_cuda()
    if setting == "auto" and cuda and (reason := driver.unusable(cuda)):
        raise ValueError(f"launch.device=auto: {reason}; else use launch.device=cpu")
