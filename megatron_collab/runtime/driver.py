"""NVIDIA's driver and its devices, asked without CUDA beginning in this process.

CUDA reads its environment once, when it begins (cuInit), and `torch.cuda.is_available()` begins it: what decides that
environment must know the devices before. Another process asks: this file as a program, of the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR of cuda.h


class Device(NamedTuple):
    """A visible CUDA device: name and compute capability, as (9, 0)."""

    name: str
    capability: tuple[int, int]


class Driver(NamedTuple):
    """The visible devices, or why there are none."""

    devices: tuple[Device, ...] = ()
    fault: str = ""


@cache
def driver() -> Driver:
    """The driver of this machine, as it was when this process first asked."""
    process = subprocess.run([sys.executable, "-I", "-S", __file__], capture_output=True, text=True)
    if process.returncode != 0:
        return Driver(fault=f"the driver's library ended the process that asked it, with code {process.returncode}")
    answer = json.loads(process.stdout)
    devices = tuple(Device(name, (major, minor)) for name, major, minor in answer["devices"])
    return Driver(devices, answer["fault"])


def _ask() -> dict[str, Any]:
    """The fields of a Driver, by CUDA's own library."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"devices": [], "fault": str(error)}
    number, text = ctypes.c_int(), ctypes.c_char_p()
    if error := library.cuInit(0):
        library.cuGetErrorString(error, ctypes.byref(text))
        return {"devices": [], "fault": f"{(text.value or b'').decode()} ({error})"}
    library.cuDeviceGetCount(ctypes.byref(number))
    return {"devices": [_device(library, index) for index in range(number.value)], "fault": ""}


def _device(library: ctypes.CDLL, index: int) -> tuple[str, int, int]:
    handle, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, len(name), handle)
    capability = []
    for attribute in _COMPUTE_CAPABILITY:
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
        capability.append(number.value)
    major, minor = capability
    return name.value.decode(), major, minor


if __name__ == "__main__":
    print(json.dumps(_ask()))
