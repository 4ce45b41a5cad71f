"""The driver, as another process finds it: a stand-in, which is compiled here, in the place of NVIDIA's libraries."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime.driver import Device, driver

pytestmark = pytest.mark.processes
STAND_IN = Path(__file__).parents[1] / "gpu_set" / "libcuda.c"
DIES = "#include <stdlib.h>\nint cuInit(unsigned flags) { abort(); }"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    driver.cache_clear()
    yield
    driver.cache_clear()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which a process that is started finds libraries."""
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
    assert driver().devices == (Device("Stand-in H100", (9, 0)),) * 2
    (began,) = (libraries / "log").iterdir()
    assert began.name != str(os.getpid())


def test_a_driver_without_a_device_says_why(libraries: Path) -> None:
    put(STAND_IN, libraries / "libcuda.so.1")
    assert driver().devices == () and driver().fault == "no device: a stand-in for the driver (100)"


def test_a_machine_without_a_driver() -> None:
    assert driver().devices == () and "libcuda.so.1" in driver().fault


def test_a_driver_that_breaks_ends_another_process(libraries: Path) -> None:
    (libraries / "dies.c").write_text(DIES)
    put(libraries / "dies.c", libraries / "libcuda.so.1")
    assert "ended the process that asked it, with code -6" in driver().fault
