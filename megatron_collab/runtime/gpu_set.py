"""Which packages for GPUs are missing, of another version or broken where some are installed, and what mends each.

This package, TransformerEngine and SGLang name what they need on GPUs; on a CPU they work without most of it.
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

_OWNERS = {"megatron-collab": "gpu", "transformer-engine": "pytorch core-cu13", "sglang": ""}  # with their extras
_LIFTED = ("openai",)  # requirements/packages.override has another version
_COMPILED = "transformer-engine-torch"  # has no wheel
# Of those that `make setup GPU=1` adds; one of them means that it was begun.
_SIGNS = (_COMPILED, "transformer-engine-cu13", "sglang-kernel", "flashinfer-python")
# What is imported, once the versions are right: libraries of another CUDA or torch are found so.
_MODULES = {
    "torch": "torch",
    _COMPILED: "transformer_engine.pytorch",  # which loads it
    "sglang-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
    "torch-memory-saver": "torch_memory_saver",
}
_DRIVER = "libcuda.so"  # is not there without a GPU, which is no fault of a package
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
    """A distribution, what is wrong with it, and the command that mends it."""

    part: str
    detail: str
    mend: str


def faults() -> list[Fault]:
    """Those of a set for GPUs that was begun, by hand or by `make setup GPU=1`; none where there is no such set.

    Where there is a GPU and no such set, that is the only one.
    """
    if not any(map(_version, _SIGNS)):
        seen = device.probe(device.GPU).found
        said = "a CUDA device is visible, and none of the packages for GPUs is installed"
        return [Fault("the set for GPUs", said, "make setup GPU=1")] if seen else []
    found = {fault.part: fault for owner, each in _wanted() if (fault := _by_version(owner, each))}
    broken = [fault for name in _MODULES if name not in found and (fault := _by_import(name))]
    whole = not any(fault.part in (_SAVER, "torch") for fault in [*found.values(), *broken])
    if whole and (hook := saver_hook()) and (failure := preload(hook).failure):
        broken.append(Fault(_SAVER, f"{_version(_SAVER)} cannot be preloaded, as servers do: {failure}", _LIBRARY))
    return [*found.values(), *broken]


class Preload(NamedTuple):
    """What a process saw that was started with a library preloaded: the libraries in it, or why it failed.

    `skipped`: it needs the driver's library, which this machine does not have.
    """

    libraries: tuple[str, ...] = ()
    failure: str = ""
    skipped: bool = False


def mapped() -> dict[str, list[str]]:
    """By name, the files of CUDA's libraries in a process that imported torch, and TransformerEngine if it can.

    It has the environment of a run's processes. One file is right, or more of one folder; of parts of a library, as
    cuDNN's, those are listed that are from another folder than the library.
    """
    command = [sys.executable, "-c", _IMPORTS + _MAPPED]
    process = subprocess.run(command, env=gpu_environment.environment(os.environ), capture_output=True, text=True)
    files = process.stdout.splitlines()
    return {name: _of_library(name, files) for name in _CUDA_LIBRARIES}


def _of_library(name: str, files: list[str]) -> list[str]:
    whole = [file for file in files if Path(file).name.startswith(f"lib{name}.so")]
    folders = {Path(file).parent for file in whole}
    parts = (file for file in files if Path(file).name.startswith(f"lib{name}"))
    return whole + [part for part in parts if Path(part).parent not in folders]


def saver_hook() -> Path | None:
    """The library of torch-memory-saver that SGLang preloads into its schedulers; None without one for torch's CUDA."""
    if not (toolkit.torch_cuda() and _version(_SAVER)):
        return None
    from torch_memory_saver.utils import get_binary_path_from_package

    return get_binary_path_from_package(_HOOK)


def preload(hook: Path) -> Preload:
    """Start a process as SGLang starts its schedulers, in the environment of servers.

    A library that is missing ends it before Python begins, with code 127.
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


def _wanted() -> Iterator[tuple[str, Requirement]]:
    for owner, extras in _OWNERS.items():
        for each in map(Requirement, metadata.requires(owner) or [] if _version(owner) else []):
            applies = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras.split(" "))
            if applies and canonicalize_name(each.name) not in _LIFTED:
                yield f"{owner} {_version(owner)}", each


def _by_version(owner: str, requirement: Requirement) -> Fault | None:
    name, version = canonicalize_name(requirement.name), _version(requirement.name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    found = f"is {version}" if version else "is not installed"
    needed = str(requirement.specifier)
    return Fault(name, f"{found}; {owner} needs {needed or 'it'}", _command(name, needed))


def _by_import(name: str) -> Fault | None:
    package = _MODULES[name].partition(".")[0]
    if sys.modules.get(package, package) is None:  # hidden in this process, which trains on a CPU
        return None
    try:
        module = importlib.import_module(_MODULES[name])
    except Exception as error:  # whatever a library raises that does not fit the others
        text = " ".join(str(error).split())
        return None if _DRIVER in text else _broken(name, f"cannot be imported: {text[:160]}")
    if name == "torch" and module.version.cuda is None:
        return _broken(name, "is a build for CPUs")
    return None


def _broken(name: str, detail: str) -> Fault:
    version = str(_version(name)).partition("+")[0]
    return Fault(name, f"{version} {detail}", _command(name, f"=={version}", "--force-reinstall "))


def _command(name: str, specifier: str, again: str = "") -> str:
    pip = f"{sys.executable} -m pip install {again}--no-deps"
    if name == _COMPILED:  # for the torch that is here, not from pip's cache
        pip = f"NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_NO_LOCAL_VERSION=1 {pip} --no-build-isolation --no-cache-dir"
    return f"{pip} '{name}{specifier}'"
