"""NVIDIA's driver and its devices, queried without initializing CUDA in this process.

CUDA reads its environment once, at cuInit, and `torch.cuda.is_available()` calls it. The code that sets that
environment needs the devices earlier. So a subprocess runs the query: this file as a program, standard library only.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR and _COMPUTE_MODE of cuda.h
_COMPUTE_CAPABILITY, _COMPUTE_MODE = (75, 76), 20
_COMPUTE_MODES = {0: "DEFAULT", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}  # CUcomputemode
_FIRST_DRIVERS = {12: 525, 13: 580}  # by CUDA's major version: "Minimum Required Driver Version" in its release notes
_TEXT_LENGTH = 256


class CudaDevice(NamedTuple):
    """A visible CUDA device: name, compute capability, as (9, 0), and compute mode by NVIDIA's name."""

    name: str
    capability: tuple[int, int]
    compute_mode: str = "DEFAULT"


class Driver(NamedTuple):
    """The visible devices, or why there are none (`fault`), and the driver's versions.

    `version`: from NVML, as 580.95.05; empty without NVML. `cuda`: the newest CUDA that libcuda supports, 13000 for
    13.0; 0 without libcuda.
    """

    devices: tuple[CudaDevice, ...] = ()
    fault: str = ""
    version: str = ""
    cuda: int = 0


@cache
def driver() -> Driver:
    """The driver of this machine, queried once per process."""
    process = subprocess.run([sys.executable, "-I", "-S", __file__], capture_output=True, text=True)
    if process.returncode != 0:
        return Driver(fault=f"the driver's library crashed the process that queried it (code {process.returncode})")
    answer = json.loads(process.stdout)
    devices = tuple(CudaDevice(name, tuple(capability), mode) for name, capability, mode in answer.pop("devices"))
    return Driver(devices, **answer)


def fault(cuda: str) -> str | None:
    """Why a torch built with `cuda` (as 13.0) has no device here, and how to fix it; None if it has one."""
    if reason := unusable(cuda):
        return reason
    if not driver().devices:
        return f"no CUDA device is visible: {driver().fault}"
    return refused_processes(1)


def refused_processes(count: int) -> str | None:
    """Why `count` processes cannot use the same device here, and how to fix it; None if they can."""
    refusing = {"PROHIBITED"} if count == 1 else {"PROHIBITED", "EXCLUSIVE_PROCESS"}
    mode = next((device.compute_mode for device in driver().devices if device.compute_mode in refusing), None)
    admits = {"PROHIBITED": "no process", "EXCLUSIVE_PROCESS": "one process (runs are not tested with MPS)"}
    advice = "set it with `nvidia-smi --compute-mode=DEFAULT` (as root), or ask Slurm's administrator"
    return mode and f"the compute mode of a GPU is {mode}, which admits {admits[mode]}: {advice}"


def unusable(cuda: str) -> str | None:
    """Why a torch built with `cuda` cannot use the driver of this machine, and how to fix it; None if it can.

    Also None if there is no driver: a machine without GPUs.
    """
    installed, major = driver(), int(cuda.partition(".")[0])
    name = f"driver {installed.version} found" if installed.version else "driver found"
    if installed.cuda and installed.cuda // 1000 < major:
        newest = f"{installed.cuda // 1000}.{installed.cuda % 1000 // 10}"
        first = f"{_FIRST_DRIVERS[major]} or newer" if major in _FIRST_DRIVERS else "a newer one"
        advice = (
            f"update the driver, or install cuda-compat-{cuda.replace('.', '-')} and name its folder in LD_LIBRARY_PATH"
        )
        return f"{name}, for CUDA {newest}; CUDA {cuda} needs {first}: {advice}"
    if installed.version and not installed.cuda:
        advice = "set NVIDIA_DRIVER_CAPABILITIES=compute,utility in a container, else install the driver's libraries"
        return f"{name}, without its CUDA library ({installed.fault}): {advice}"
    return None


def _ask() -> dict[str, Any]:
    """The fields of a Driver, from NVML and libcuda."""
    answer: dict[str, Any] = {"devices": [], "fault": "", "version": _version(), "cuda": 0}
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return answer | {"fault": str(error)}
    number, text = ctypes.c_int(), ctypes.c_char_p()
    if not library.cuDriverGetVersion(ctypes.byref(number)):
        answer["cuda"] = number.value
    if code := library.cuInit(0):
        library.cuGetErrorString(code, ctypes.byref(text))
        return answer | {"fault": f"{(text.value or b'').decode()} ({code})"}
    library.cuDeviceGetCount(ctypes.byref(number))
    return answer | {"devices": [_device(library, index) for index in range(number.value)]}


def _version() -> str:
    """The driver's version from NVML, as in nvidia-smi; empty without NVML, or if it fails."""
    text = ctypes.create_string_buffer(_TEXT_LENGTH)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return ""
    return text.value.decode()


def _device(library: ctypes.CDLL, index: int) -> tuple[str, list[int], str]:
    handle, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_TEXT_LENGTH)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, len(name), handle)
    values = []
    for attribute in (*_COMPUTE_CAPABILITY, _COMPUTE_MODE):
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
        values.append(number.value)
    *capability, mode = values
    return name.value.decode(), capability, _COMPUTE_MODES.get(mode, str(mode))


if __name__ == "__main__":
    print(json.dumps(_ask()))
