"""The driver as a child process detects it; a compiled stand-in replaces NVIDIA's libraries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime.driver import CudaDevice, driver, fault, refused_processes

pytestmark = pytest.mark.processes
STAND_IN = Path(__file__).parents[1] / "gpu_set" / "libcuda.c"
NVML = STAND_IN.with_name("libnvidia-ml.c")
DIES = "#include <stdlib.h>\nint cuDriverGetVersion(int *version) { abort(); }"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    driver.cache_clear()
    yield
    driver.cache_clear()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on the library path of child processes."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return tmp_path


def put(source: Path, library: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)


def test_its_devices_are_known_before_cuda_begins_in_this_process(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    put(STAND_IN, libraries / "libcuda.so.1")
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    monkeypatch.setenv("STAND_IN_LOG", str(libraries / "log"))
    (libraries / "log").mkdir()
    assert driver().devices == (CudaDevice("Stand-in H100", (9, 0)),) * 2
    (began,) = {int(file.stem) for file in (libraries / "log").iterdir()}
    assert began != os.getpid()


def test_a_driver_without_a_device_says_why(libraries: Path) -> None:
    put(STAND_IN, libraries / "libcuda.so.1")
    assert fault("13.0") == "no CUDA device is visible: no device: a stand-in for the driver (100)"


def test_a_machine_without_a_driver() -> None:
    assert str(fault("13.0")).startswith("no CUDA device is visible: libcuda.so.1: ")


def test_a_driver_that_is_too_old_for_torchs_cuda_is_named(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """It has devices, but torch sees none. A newer CUDA library from cuda-compat is sufficient."""
    put(STAND_IN, libraries / "libcuda.so.1")
    put(NVML, libraries / "libnvidia-ml.so.1")
    for name, value in {"DEVICES": "2", "CUDA": "12040", "DRIVER": "550.54.14"}.items():
        monkeypatch.setenv(f"STAND_IN_{name}", value)
    assert fault("13.0") == (
        "driver 550.54.14 found, for CUDA 12.4; CUDA 13.0 needs 580 or newer: update the driver, or install "
        "cuda-compat-13-0 and name its folder in LD_LIBRARY_PATH"
    )
    assert fault("12.8") is None  # minor versions of a CUDA are compatible
    driver.cache_clear()
    monkeypatch.setenv("STAND_IN_CUDA", "13000")
    assert fault("13.0") is None and driver().version == "550.54.14"


def test_a_driver_of_unknown_version_is_named_by_its_cuda(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    put(STAND_IN, libraries / "libcuda.so.1")
    put(NVML, libraries / "libnvidia-ml.so.1")  # does not answer
    monkeypatch.setenv("STAND_IN_CUDA", "12020")
    assert str(fault("13.0")).startswith("driver found, for CUDA 12.2; CUDA 13.0 needs 580 or newer: ")


def test_a_container_with_nvidia_smi_alone_is_told_how_to_start(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    put(NVML, libraries / "libnvidia-ml.so.1")
    monkeypatch.setenv("STAND_IN_DRIVER", "580.95.05")
    text = str(fault("13.0"))
    assert text.startswith("driver 580.95.05 found, without its CUDA library (libcuda.so.1: ")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in text


def test_a_driver_that_breaks_ends_another_process(libraries: Path) -> None:
    (libraries / "dies.c").write_text(DIES)
    put(libraries / "dies.c", libraries / "libcuda.so.1")
    assert "crashed the process that queried it (code -6)" in driver().fault


def test_a_compute_mode_that_excludes_processes_is_named(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """A rank and a server share a GPU, so one process is not enough."""
    put(STAND_IN, libraries / "libcuda.so.1")
    monkeypatch.setenv("STAND_IN_DEVICES", "1")
    for mode, alone, shared in (("0", None, None), ("3", None, "EXCLUSIVE_PROCESS"), ("2", "PROHIBITED", "PROHIBITED")):
        driver.cache_clear()
        monkeypatch.setenv("STAND_IN_COMPUTE_MODE", mode)
        assert (alone or "None") in str(fault("13.0")) and (shared or "None") in str(refused_processes(2))
