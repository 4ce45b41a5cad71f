"""CUDA's compiler and libraries on this machine: from torch's CUDA wheels, else from an installed toolkit.

Import-light: torch's CUDA version is read from its version.py.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_INSTALLER = "/usr/local/cuda"  # the folder of CUDA's own installer


def programs() -> str:
    """PATH with the programs of this environment, even if it is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@cache
def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, as 13.0, without importing it; None for a CPU build or no torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    return runpy.run_path(str(file))["cuda"] if file and file.is_file() else None


def _major() -> str:
    return (torch_cuda() or "").partition(".")[0]


def wheels() -> Path | None:
    """The folder of torch's CUDA wheels, as site-packages/nvidia/cu13; None if it has no CUDA runtime."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{_major()}"
    return folder if any(folder.glob("lib/libcudart.so.*")) else None


def libraries() -> list[str]:
    """Library folders of the CUDA wheels, the runtime's first; empty without such wheels.

    torch finds them by itself. Libraries without an rpath depend on LD_LIBRARY_PATH: SGLang preloads
    torch-memory-saver's hook, which ends the process before Python starts if libcudart.so.13 is not found there.
    """
    home = wheels()
    if home is None:
        return []
    folders = sorted(folder for folder in home.parent.glob("*/lib") if any(folder.glob("*.so*")))
    return [str(home / "lib"), *(str(folder) for folder in folders if folder.parent != home)]


def library_path(inherited: str | None) -> str:
    """LD_LIBRARY_PATH: the wheels' folders, then those of `inherited`."""
    folders = [*libraries(), *(inherited or "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, folders)))


@cache
def cuda_home() -> str | None:
    """The folder of CUDA's compiler: in the wheels, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda; None without one.

    Compilers for another CUDA than torch's are skipped, since their kernels need another runtime library. nvcc in PATH
    may be a script that calls a compiler elsewhere.
    """
    return next((home for home in homes() if not other_cuda(home)), None)


def homes() -> list[str]:
    """Folders that contain nvcc, in order of preference."""
    on_path, in_wheels = shutil.which("nvcc"), Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{_major()}"
    folders = [str(in_wheels), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders += [on_path and str(Path(on_path).parents[1]), _INSTALLER]
    return [folder for folder in dict.fromkeys(filter(None, folders)) if (Path(folder) / "bin" / "nvcc").is_file()]


def other_cuda(home: str) -> str | None:
    """The version of the compiler in `home` if its major version differs from torch's CUDA; None also if unknown."""
    try:
        output = subprocess.run([Path(home) / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    release = re.search(r"release (\d+)\.\d+", output)
    return release[0].removeprefix("release ") if release and _major() and release[1] != _major() else None


def compilers(folder: Path) -> dict[str, str]:
    """Environment variables to compile kernels: with ninja, CUDA's compiler and its runtime library.

    CUDA's wheels contain the runtime library only under its versioned name, which no linker finds; so a link to it is
    created in `folder`.
    """
    variables = {"PATH": programs()}
    if home := cuda_home():
        variables["CUDA_HOME"] = home
        for runtime in Path(home).glob("lib/libcudart.so.*"):
            folder.mkdir(parents=True, exist_ok=True)
            (link := folder / str(os.getpid())).symlink_to(runtime)
            link.replace(folder / "libcudart.so")  # atomic: several servers may start at the same time
            variables["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LIBRARY_PATH")]))
    return variables


def nvcc() -> tuple[bool, str]:
    """For the probe: whether there is a compiler for torch's CUDA, and which ones are skipped."""
    home = cuda_home()
    skipped = [f"skipped {other} (CUDA {version})" for other in homes() if (version := other_cuda(other))]
    detail = home or "not in CUDA_HOME or PATH, and no wheel nvidia-cuda-nvcc"
    return home is not None, "; ".join([detail, *skipped])


def cc() -> tuple[bool, str]:
    """For the probe: whether Triton can compile its launchers, for which it needs a C compiler and Python's headers."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        return False, "no gcc, clang or cc in PATH, and CC is not set"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return (True, compiler) if header.is_file() else (False, f"{header} is missing; install Python's headers")


def ninja() -> tuple[bool, str]:
    """For the probe: whether ninja is beside the interpreter or in PATH."""
    path = shutil.which("ninja", path=programs())
    return path is not None, path or "not installed"
