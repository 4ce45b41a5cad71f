"""The environment of processes that may use a GPU: CUDA of the wheels, and variables that ranks set before CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.config import Config
from megatron_collab.runtime import device, files, gpu_environment, toolkit
from tests.helpers import configured

MODULE = {
    "CUDA_HOME": "/opt/cuda-12.4",
    "CUDA_PATH": "/opt/cuda-12.4",
    "CUDA_ROOT": "/opt/cuda-12.4",
    "CUDNN_HOME": "/opt/cudnn",
    "CUDNN_PATH": "/opt/cudnn",
    "LD_LIBRARY_PATH": "/opt/cuda-12.4/lib64:/opt/cudnn/lib",
    "HOME": "/home/someone",
    "TORCHINDUCTOR_CACHE_DIR": "/scratch/compiled",
}


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "cu13").mkdir()
    monkeypatch.setattr(toolkit, "wheels", lambda: tmp_path / "cu13")
    monkeypatch.setattr(toolkit, "libraries", lambda: [str(tmp_path / "cu13/lib"), str(tmp_path / "cudnn/lib")])
    monkeypatch.setattr(toolkit, "cuda_home", lambda: str(tmp_path / "cu13"))
    return tmp_path


def test_cuda_is_the_wheels_whatever_a_module_has_loaded(wheels: Path) -> None:
    assert gpu_environment.environment(MODULE) == {
        "CUDA_HOME": str(wheels / "cu13"),
        "CUDNN_HOME": str(wheels / "cudnn"),
        "LD_LIBRARY_PATH": f"{wheels}/cu13/lib:{wheels}/cudnn/lib:/opt/cuda-12.4/lib64:/opt/cudnn/lib",
        "HOME": "/home/someone",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch/compiled",
    }


def test_without_the_wheels_it_is_the_one_that_is_around_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "wheels", lambda: None)
    assert gpu_environment.environment(MODULE) == MODULE


def test_what_torch_compiles_is_kept_with_other_caches() -> None:
    assert gpu_environment.environment({})["TORCHINDUCTOR_CACHE_DIR"] == str(files.CACHE / "torchinductor")


def test_a_process_enters_it(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    before = dict(os.environ)
    for name, value in MODULE.items():
        monkeypatch.setenv(name, value)
    try:
        gpu_environment.enter()
        assert "CUDA_PATH" not in os.environ and os.environ["CUDNN_HOME"] == str(wheels / "cudnn")
        assert gpu_environment.environment(os.environ) == dict(os.environ)
    finally:
        monkeypatch.undo()
        os.environ.clear()
        os.environ.update(before)


def defaults(settings: dict[str, object]) -> dict[str, str]:
    config = configured(Config(), settings)
    return gpu_environment.rank_variables(config.launch.device, config.parallel, config.model)


@pytest.mark.parametrize(
    ("settings", "capability", "variables"),
    [
        ({}, (9, 0), {}),
        ({"parallel.tp": 2}, (9, 0), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"parallel.tp": 2}, (10, 0), {}),
        ({"parallel.cp": 2}, (10, 0), {}),  # Megatron refuses a choice of attention by variables
        ({"model.fp8": "hybrid", "model.fp8_recipe": "delayed"}, (9, 0), {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}),
        ({"parallel.tp": 2, "launch.device": "cpu"}, (9, 0), {}),
    ],
)
def test_the_environment_of_ranks_on_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], capability: tuple[int, int], variables: dict[str, str]
) -> None:
    monkeypatch.setattr(toolkit, "wheels", lambda: None)
    monkeypatch.setattr(device, "probe", lambda name: device.Probe(name, True, "", "", ""))
    monkeypatch.setattr(device, "capability", lambda: capability)
    inherited = dict([files.COMPILE_CACHE])
    assert gpu_environment.environment(inherited, defaults(settings)) == inherited | variables


def test_what_is_set_for_ranks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "wheels", lambda: None)
    monkeypatch.setattr(device, "probe", lambda name: device.Probe(name, True, "", "", ""))
    monkeypatch.setattr(device, "capability", lambda: (9, 0))
    inherited = dict([files.COMPILE_CACHE]) | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert gpu_environment.environment(inherited, defaults({"parallel.tp": 2})) == inherited


RELOADS = """
import os, sys
from pathlib import Path
from megatron_collab.runtime import gpu_environment, toolkit
toolkit.wheels, toolkit.libraries = lambda: Path("/wheels/cu13"), lambda: ["/wheels/cu13/lib"]
print("started", os.getpid())
sys.stdout.flush()
gpu_environment.reload()
read = dict(entry.partition("=")[::2] for entry in Path("/proc/self/environ").read_text().split(chr(0)))
print("loader", read["LD_LIBRARY_PATH"], sys.argv[1:])
"""


@pytest.mark.processes
def test_a_program_starts_again_once_if_its_loader_has_read_another_path() -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": "/opt/cudnn/lib"}
    command = [sys.executable, "-c", RELOADS, "an argument"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second, loader = done.stdout.splitlines()
    assert first == second and first.startswith("started ")  # the same process
    assert loader == "loader /wheels/cu13/lib:/opt/cudnn/lib ['an argument']"
