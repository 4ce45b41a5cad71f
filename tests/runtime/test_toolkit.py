"""CUDA's compiler and libraries: which are chosen, and the search paths of processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime import toolkit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Clears the cached choice: these tests change what is installed."""
    for choice in (toolkit.cuda_home, toolkit.torch_cuda):
        choice.cache_clear()
    yield
    for choice in (toolkit.cuda_home, toolkit.torch_cuda):
        choice.cache_clear()


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """site-packages/nvidia with the libraries of CUDA 13 and cuDNN, and folders without libraries."""
    for library in ("cu13/lib/libcudart.so.13", "cudnn/lib/libcudnn.so.9", "mathdx/include/mathdx.h", "nccl/lib/notes"):
        (tmp_path / "nvidia" / library).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / library).touch()
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    return tmp_path / "nvidia"


def test_the_folders_of_the_wheels_come_first_in_the_library_path(wheels: Path) -> None:
    ours = [str(wheels / "cu13/lib"), str(wheels / "cudnn/lib")]
    assert toolkit.libraries() == ours
    assert toolkit.library_path(None) == os.pathsep.join(ours)
    # An empty entry would be the current folder.
    assert toolkit.library_path("/opt/cuda/lib64::/opt/lib") == os.pathsep.join([*ours, "/opt/cuda/lib64", "/opt/lib"])
    assert toolkit.library_path(toolkit.library_path("/opt/lib")) == toolkit.library_path("/opt/lib")


def test_which_cuda_torch_has_is_known_without_importing_it() -> None:
    import torch

    assert toolkit.torch_cuda() == torch.version.cuda


def test_without_wheels_of_cuda_the_library_path_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    assert toolkit.libraries() == [] and toolkit.library_path("/opt/lib") == "/opt/lib"


def test_the_compiler_is_the_wheels_or_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(toolkit, "_INSTALLER", str(tmp_path / "installed"))
    assert not toolkit.nvcc()[0]
    assert toolkit.nvcc()[1] == "not in CUDA_HOME or PATH, and no wheel nvidia-cuda-nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "set"))
    for home in ("installed", "set", "nvidia/cu13"):  # each is preferred to those before
        (tmp_path / home / "bin").mkdir(parents=True)
        (tmp_path / home / "bin" / "nvcc").touch()
        toolkit.cuda_home.cache_clear()
        assert toolkit.cuda_home() == toolkit.nvcc()[1] == str(tmp_path / home)


def test_a_compiler_of_another_cuda_than_torchs_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clusters set CUDA_HOME for their other users; doctor reports that it is not used."""
    for home, release in (("set", "12.4"), ("nvidia/cu13", "13.1"), ("nvidia/cu12", "13.1")):
        (tmp_path / home / "bin").mkdir(parents=True)
        (nvcc := tmp_path / home / "bin" / "nvcc").write_text(
            f"#!/bin/sh\necho 'tools, release {release}, V{release}.9'\n"
        )
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "set"))
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    for cuda, used in (("13.0", "nvidia/cu13"), ("12.8", "set"), (None, "set")):
        toolkit.cuda_home.cache_clear()
        monkeypatch.setattr(toolkit, "torch_cuda", lambda cuda=cuda: cuda)
        assert toolkit.cuda_home() == str(tmp_path / used)
    toolkit.cuda_home.cache_clear()
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    assert toolkit.nvcc()[1] == f"{tmp_path}/nvidia/cu13; skipped {tmp_path}/set (CUDA 12.4)"


def test_kernels_are_linked_with_the_runtime_of_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIBRARY_PATH", "/opt/lib")
    (wheels := tmp_path / "cu13").mkdir()
    monkeypatch.setattr(toolkit, "cuda_home", lambda: str(wheels))
    assert toolkit.compilers(tmp_path / "lib") == {"PATH": toolkit.programs(), "CUDA_HOME": str(wheels)}
    (wheels / "lib").mkdir()
    (wheels / "lib" / "libcudart.so.13").write_text("the runtime")
    for _ in range(2):
        assert toolkit.compilers(tmp_path / "lib")["LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/opt/lib"
        assert [(file.name, file.read_text()) for file in (tmp_path / "lib").iterdir()] == [
            ("libcudart.so", "the runtime")
        ]


def test_ninja_is_looked_for_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert toolkit.ninja()[1] == "not installed"
    (tmp_path / "ninja").touch(mode=0o755)
    assert toolkit.ninja()[1] == str(tmp_path / "ninja")


def test_a_compiler_and_pythons_headers_are_both_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolkit.sysconfig, "get_path", lambda name: str(tmp_path))
    assert toolkit.cc() == (False, "no gcc, clang or cc in PATH, and CC is not set")
    (tmp_path / "cc").touch(mode=0o755)
    assert toolkit.cc() == (False, f"{tmp_path}/Python.h is missing; install Python's headers")
    (tmp_path / "Python.h").touch()
    assert toolkit.cc() == (True, str(tmp_path / "cc"))
