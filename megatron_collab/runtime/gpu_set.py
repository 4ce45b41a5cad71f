"""Finds packages for GPUs that are missing, broken or of the wrong version, and the command that fixes each.

This package, TransformerEngine and SGLang declare what they need on GPUs; on a CPU they work without most of it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_collab.runtime import device, gpu_environment, toolkit

_OWNERS = {"megatron-collab": "gpu", "transformer-engine": "pytorch core-cu13", "sglang": ""}  # package: its extras
_LIFTED = ("openai",)  # requirements/packages.override has another version
_COMPILED = "transformer-engine-torch"  # has no wheel
# Some packages that `make setup GPU=1` adds; if one is installed, that setup was at least begun.
_SIGNS = (_COMPILED, "transformer-engine-cu13", "sglang-kernel", "flashinfer-python")
# Imported once the versions are right: this detects libraries built for another CUDA or torch.
_MODULES = {
    "torch": "torch",
    _COMPILED: "transformer_engine.pytorch",  # which loads it
    "sglang-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
    "torch-memory-saver": "torch_memory_saver",
}
_DRIVER = "libcuda.so"  # missing on machines without a GPU, which is not a fault of a package
_SAVER, _HOOK = "torch-memory-saver", "torch_memory_saver_hook_mode_preload"
_LIBRARY = "install the wheel that has this library, or name its folder in LD_LIBRARY_PATH"
_CUDA_LIBRARIES = ("cudart", "cublas", "cudnn", "nvrtc", "nccl")
_IMPORTS = """
import contextlib, torch
with contextlib.suppress(Exception):
    import transformer_engine.pytorch
"""
_MAPPED = "print(*sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}), sep='\\n')"


class Fault(NamedTuple):
    """A distribution, what is wrong with it, and the command that fixes it."""

    part: str
    detail: str
    mend: str


def faults() -> list[Fault]:
    """Faults of the installed GPU packages; empty if none of them is installed and no GPU is visible.

    If a GPU is visible and none of the packages is installed, that is the only fault.
    """
    if not any(map(_version, _SIGNS)):
        visible = device.probe(device.GPU).available
        detail = "a CUDA device is visible, but no GPU package is installed"
        return [Fault("the set for GPUs", detail, "make setup GPU=1")] if visible else []
    outdated = {fault.part: fault for owner, needed in _requirements() if (fault := _by_version(owner, needed))}
    broken = [fault for name in _MODULES if name not in outdated and (fault := _by_import(name))]
    saver_usable = not any(fault.part in (_SAVER, "torch") for fault in [*outdated.values(), *broken])
    if saver_usable and (hook := saver_hook()) and (failure := preload(hook).failure):
        broken.append(Fault(_SAVER, f"{_version(_SAVER)} cannot be preloaded, as servers do: {failure}", _LIBRARY))
    return [*outdated.values(), *broken]


class Preload(NamedTuple):
    """Result of starting a process with a preloaded library: its mapped libraries, or why it failed.

    `skipped`: the library needs the driver's, which this machine does not have.
    """

    libraries: tuple[str, ...] = ()
    failure: str = ""
    skipped: bool = False


def mapped() -> dict[str, list[str]]:
    """Files of each CUDA library that are mapped after importing torch, and TransformerEngine if possible.

    The process has the environment of a run. A library is right if it has one file, or several in one folder. Parts of
    a library, as cuDNN has, are listed only if their folder differs from the library's.
    """
    command = [sys.executable, "-c", _IMPORTS + _MAPPED]
    process = subprocess.run(command, env=gpu_environment.environment(os.environ), capture_output=True, text=True)
    files = process.stdout.splitlines()
    return {name: _library_files(name, files) for name in _CUDA_LIBRARIES}


def _library_files(name: str, files: list[str]) -> list[str]:
    main_files = [file for file in files if Path(file).name.startswith(f"lib{name}.so")]
    folders = {Path(file).parent for file in main_files}
    parts = (file for file in files if Path(file).name.startswith(f"lib{name}"))
    return main_files + [part for part in parts if Path(part).parent not in folders]


def saver_hook() -> Path | None:
    """The torch-memory-saver library that SGLang preloads into its schedulers; None if none fits torch's CUDA."""
    if not (toolkit.torch_cuda() and _version(_SAVER)):
        return None
    from torch_memory_saver.utils import get_binary_path_from_package

    return get_binary_path_from_package(_HOOK)


def preload(hook: Path) -> Preload:
    """Start a process as SGLang starts its schedulers, in the environment of servers.

    If a library is missing, it exits with code 127 before Python starts.
    """
    environment = gpu_environment.environment(os.environ) | {"LD_PRELOAD": str(hook)}
    command = [sys.executable, "-I", "-S", "-c", _MAPPED]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    libraries = tuple(process.stdout.split("\n"))
    if process.returncode == 0 and str(hook.resolve()) in libraries:
        return Preload(libraries)
    reason = " ".join(process.stderr.split()).rpartition("error while loading shared libraries: ")[2]
    return Preload(skipped=True) if _DRIVER in reason else Preload(failure=reason or f"exit code {process.returncode}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, Requirement]]:
    for owner, extras in _OWNERS.items():
        for needed in map(Requirement, metadata.requires(owner) or [] if _version(owner) else []):
            marker = needed.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras.split(" "))
            if applies and canonicalize_name(needed.name) not in _LIFTED:
                yield f"{owner} {_version(owner)}", needed


def _by_version(owner: str, requirement: Requirement) -> Fault | None:
    name, version = canonicalize_name(requirement.name), _version(requirement.name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    state = f"is {version}" if version else "is not installed"
    needed = str(requirement.specifier)
    return Fault(name, f"{state}; {owner} needs {needed or 'it'}", _command(name, needed))


def _by_import(name: str) -> Fault | None:
    package = _MODULES[name].partition(".")[0]
    if sys.modules.get(package, package) is None:  # hidden in this process, which trains on a CPU
        return None
    try:
        module = importlib.import_module(_MODULES[name])
    except Exception as error:  # an incompatible library may raise anything
        text = " ".join(str(error).split())
        return None if _DRIVER in text else _broken(name, f"cannot be imported: {text[:160]}")
    if name == "torch" and module.version.cuda is None:
        return _broken(name, "is a build for CPUs")
    return None


def _broken(name: str, detail: str) -> Fault:
    version = str(_version(name)).partition("+")[0]
    return Fault(name, f"{version} {detail}", _command(name, f"=={version}", "--force-reinstall "))


def _command(name: str, specifier: str, flags: str = "") -> str:
    pip = f"{sys.executable} -m pip install {flags}--no-deps"
    if name == _COMPILED:  # built for the installed torch, not taken from pip's cache
        pip = f"NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_NO_LOCAL_VERSION=1 {pip} --no-build-isolation --no-cache-dir"
    return f"{pip} '{name}{specifier}'"
