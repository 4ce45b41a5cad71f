"""The probes: what counts as available, and which device is selected."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from megatron_collab.launch.validate import load
from megatron_collab.runtime import device, driver, toolkit
from megatron_collab.settings import ConfigError


@pytest.fixture(autouse=True)
def fresh_probes():
    """Clears the probes' caches: these tests change what is installed."""
    device.probe.cache_clear()
    yield
    device.probe.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, distribution: str, version: str, code: str) -> None:
    """Install a distribution whose module of the same name runs `code` at import."""
    module = distribution.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


def with_cuda(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(device, "_cuda", lambda: (available, ""))


def test_probe_of_what_is_installed_gives_its_version() -> None:
    torch, megatron, sglang = (device.probe(name) for name in ("torch", "megatron", "sglang"))
    assert torch.available and torch.detail == metadata.version("torch")
    assert megatron.available and megatron.detail == "0.19.2"
    assert sglang.available and sglang.detail == "0.5.23"


def test_probe_of_a_working_library_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_cuda(monkeypatch, True)
    installed(monkeypatch, tmp_path, "flash-attn", "2.8.3", "")
    assert device.probe("flash_attn").available and device.probe("flash_attn").detail == "2.8.3"


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("transformer_engine", "transformer-engine"), ("apex", "apex"), ("flash_attn", "flash-attn")],
)
def test_cuda_kernels_are_not_found_without_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, distribution: str
) -> None:
    """TransformerEngine, for one, can be imported on a machine without a GPU; its layers cannot be built there."""
    installed(monkeypatch, tmp_path, distribution, "2.20.2", "__path__ = []")
    for module in ("transformer_engine.pytorch", "fused_weight_gradient_mlp_cuda"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    for cuda in (True, False):
        with_cuda(monkeypatch, cuda)
        device.probe.cache_clear()
        assert device.probe(name).available == cuda
    assert device.probe(name).detail == "2.20.2 needs a CUDA device"


def test_apex_counts_if_it_was_built_with_its_cuda_extensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_cuda(monkeypatch, True)
    installed(monkeypatch, tmp_path, "apex", "0.1", "")
    assert not device.probe("apex").available
    device.probe.cache_clear()
    monkeypatch.delitem(sys.modules, "fused_weight_gradient_mlp_cuda", raising=False)
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("")
    assert device.probe("apex") == device.Probe(
        "apex", True, "0.1", "fused Adam and gradient accumulation", "torch AdamW"
    )


def test_a_broken_install_is_not_found_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_cuda(monkeypatch, True)
    installed(monkeypatch, tmp_path, "flash-attn", "2.8.3", "raise ImportError('undefined symbol:\\n  _ZN3c10')")
    probe = device.probe("flash_attn")
    assert not probe.available
    assert probe.detail == "2.8.3 cannot be imported: undefined symbol: _ZN3c10"


@pytest.mark.parametrize("error", [OSError, RuntimeError, AssertionError, AttributeError])
def test_any_error_of_an_import_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type) -> None:
    """OSError: ctypes without a driver. AssertionError: TransformerEngine, whose parts are of different versions."""
    installed(monkeypatch, tmp_path, "torch-memory-saver", "0.0.10", f"raise {error.__name__}('libcuda.so.1: no file')")
    probe = device.probe("memory_saver")
    assert not probe.available
    assert probe.detail == "0.0.10 cannot be imported: libcuda.so.1: no file"


def test_the_placeholder_of_transformer_engine_is_not_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, tmp_path, "transformer-engine", "0.0.0", "")
    probe = device.probe("transformer_engine")
    assert not probe.available
    assert probe.detail == "0.0.0 is a placeholder"


def test_a_low_version_is_no_placeholder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """0.0.10 is a release: the one in requirements/gpu.lock, without which colocated servers are refused on GPUs."""
    assert "torch-memory-saver==0.0.10" in (Path(__file__).parents[2] / "requirements/gpu.lock").read_text()
    installed(monkeypatch, tmp_path, "torch-memory-saver", "0.0.10", "")
    assert device.probe("memory_saver").available and device.probe("memory_saver").detail == "0.0.10"


def test_missing_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not device.probe("slurm").available
    stub = tmp_path / "sbatch"
    stub.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    stub.chmod(0o755)
    device.probe.cache_clear()
    assert device.probe("slurm").detail == "slurm-wlm 22.05.8"


def test_auto_selects_cuda_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, True)
    assert device.select("auto") == device.select("cuda") == device.Device("cuda", "nccl")
    assert device.select("cpu") == device.Device("cpu", "gloo")


def test_missing_cuda_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, False)
    assert device.select("auto") == device.select("cpu") == device.Device("cpu", "gloo")
    with pytest.raises(ValueError, match=r"launch\.device=cuda: .* use launch\.device=cpu"):
        device.select("cuda")


def test_an_old_driver_is_named_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    devices = (driver.CudaDevice("NVIDIA H100", (9, 0)),)
    monkeypatch.setattr(driver, "driver", lambda: driver.Driver(devices, "", "550.54.14", 12040))
    with pytest.raises(
        ValueError, match=r"launch\.device=cuda: driver 550\.54\.14 found, .* needs 580 or newer: update the"
    ):
        device.select("cuda")
    assert device.count() == 0
    assert device.select("auto").type == "cpu"  # `doctor` says so; a run does not start on a CPU for that reason
    with pytest.raises(ValueError, match=r"launch\.device=auto: driver 550\.54\.14 found, .* use launch\.device=cpu"):
        device.refuse_unusable_driver("auto")
    device.refuse_unusable_driver("cpu")
    monkeypatch.setattr(driver, "driver", lambda: driver.Driver((), "libcuda.so.1: cannot open", "", 0))
    device.refuse_unusable_driver("auto")  # a machine without a driver


def test_a_run_is_refused_if_its_gpus_have_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(driver, "driver", lambda: driver.Driver((), "", "550.54.14", 12040))
    with pytest.raises(ConfigError, match=r"^launch\.device=auto: driver 550\.54\.14 found"):
        load(["experiment=booking"])


def with_devices(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], fault: str = "") -> None:
    devices = tuple(driver.CudaDevice("NVIDIA H100", capability) for capability in capabilities)
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(driver, "driver", lambda: driver.Driver(devices, fault, "580.95.05", 13000))


def test_the_weakest_device_decides_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, (9, 0), (8, 9), (10, 0))
    assert device.probe("cuda").detail == "3 x NVIDIA H100, driver 580.95.05"
    assert device.count() == 3 and device.capability() == (8, 9)


def test_without_a_device_there_is_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, fault="no driver")
    assert device.probe("cuda").detail == "no CUDA device is visible: no driver"
    assert device.count() == 0 and device.capability() is None


def test_a_torch_for_cpus_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, (9, 0))
    monkeypatch.setattr(toolkit, "torch_cuda", lambda: None)
    assert device.probe("cuda").detail == "torch is a CPU build"
    assert device.count() == 0 and device.capability() is None


@pytest.mark.processes
def test_importing_the_module_imports_no_library() -> None:
    """settings/schema.py needs it before any check; torch alone would cost over a second."""
    code = (
        "import sys, megatron_collab.runtime.device; print({'torch', 'ray', 'sglang', 'megatron'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.gpu
def test_the_cache_of_torch_is_returned_to_the_gpu() -> None:
    """Colocated servers allocate from the driver's free memory, not from torch's cache."""
    import torch

    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    kept, _ = torch.cuda.mem_get_info()
    device.free_cache()
    assert torch.cuda.mem_get_info()[0] >= kept + (1 << 29)
