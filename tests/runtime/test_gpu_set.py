"""A half-installed GPU set: each missing part is named, with the command that repairs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_collab.runtime import device, gpu_set, toolkit

Put = Callable[..., None]
SGLANG = "torch==2.14.1\nsglang-kernel==0.4.10\nflashinfer_python[cu13]==0.7.2\nopenai==2.8.0\ntorchao; extra == 'x'"
ENGINE = "transformer_engine_torch==2.20.2; extra == 'pytorch'\ntransformer_engine_cu13==2.20.2; extra == 'core-cu13'"
OURS = (
    "sglang==0.5.23; extra == 'gpu'\ntransformer-engine[pytorch]==2.20.2; extra == 'gpu'\ntorch==2.14.1; extra == 'gpu'"
)
WHOLE = {
    "megatron-collab": ("2.0", "", OURS),
    "torch": ("2.14.1", "version = __import__('types').SimpleNamespace(cuda='13.0')", ""),
    "sglang": ("0.5.23", "", SGLANG),
    "sglang-kernel": ("0.4.10", "", ""),
    "flashinfer-python": ("0.7.2", "", ""),
    "transformer-engine": ("2.20.2", "", ENGINE),
    "transformer-engine-torch": ("2.20.2", "", ""),
    "transformer-engine-cu13": ("2.20.2", "", ""),
}


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Put:
    """Install the whole set in place of this machine's; arguments override the version and module code of parts."""

    def install(**changed: tuple[str, str] | None) -> None:
        monkeypatch.delitem(gpu_set._MODULES, "torch-memory-saver")
        versions = {name.replace("_", "-"): value for name, value in changed.items()}
        for name, (version, code, requires) in WHOLE.items():
            version, code = versions.get(name, (version, code)) or ("", "")
            module = f"{name.replace('-', '_')}_here"
            monkeypatch.delitem(sys.modules, module, raising=False)
            if name in gpu_set._MODULES:
                monkeypatch.setitem(gpu_set._MODULES, name, module)
            if not version:
                continue
            (tmp_path / f"{module}.py").write_text(code)
            (info := tmp_path / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
            requirements = "".join(f"Requires-Dist: {line}\n" for line in requires.splitlines())
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}")

    def distribution(name: str) -> metadata.Distribution:
        return next(iter(metadata.distributions(name=name, path=[str(tmp_path)])), None) or missing(name)

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    here = SimpleNamespace(
        version=lambda name: distribution(name).version,
        requires=lambda name: distribution(name).requires,
        PackageNotFoundError=metadata.PackageNotFoundError,
    )
    monkeypatch.setattr(gpu_set, "metadata", here)
    monkeypatch.syspath_prepend(str(tmp_path))
    return install


def faults() -> dict[str, tuple[str, str]]:
    return {part: (detail, mend.replace(sys.executable, "python")) for part, detail, mend in gpu_set.faults()}


def test_a_whole_set_has_no_faults(put: Put) -> None:
    put()
    assert faults() == {}


def test_the_set_of_this_machine_is_for_cpus_or_whole() -> None:
    """No fault for a CPU set: TransformerEngine's Python part, which tests need, is not half a GPU set."""
    assert gpu_set.faults() == []


@pytest.mark.parametrize(
    ("changed", "part", "detail", "mend"),
    [
        (
            {"transformer_engine_torch": None},
            "transformer-engine-torch",
            "is not installed; transformer-engine 2.20.2 needs ==2.20.2",
            "NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_NO_LOCAL_VERSION=1 python -m pip install --no-deps "
            "--no-build-isolation --no-cache-dir 'transformer-engine-torch==2.20.2'",
        ),
        (
            {"flashinfer_python": None},
            "flashinfer-python",
            "is not installed; sglang 0.5.23 needs ==0.7.2",
            "python -m pip install --no-deps 'flashinfer-python==0.7.2'",
        ),
        (
            {"sglang_kernel": ("0.4.9", "")},
            "sglang-kernel",
            "is 0.4.9; sglang 0.5.23 needs ==0.4.10",
            "python -m pip install --no-deps 'sglang-kernel==0.4.10'",
        ),
        (
            {"sglang_kernel": ("0.4.10", "raise ImportError('libcudart.so.12:\\n no such file')")},
            "sglang-kernel",
            "0.4.10 cannot be imported: libcudart.so.12: no such file",
            "python -m pip install --force-reinstall --no-deps 'sglang-kernel==0.4.10'",
        ),
        (
            {"torch": ("2.14.1+cpu", "version = __import__('types').SimpleNamespace(cuda=None)")},
            "torch",
            "2.14.1 is a build for CPUs",
            "python -m pip install --force-reinstall --no-deps 'torch==2.14.1'",
        ),
        (
            {"transformer_engine": None},
            "transformer-engine",
            "is not installed; megatron-collab 2.0 needs ==2.20.2",
            "python -m pip install --no-deps 'transformer-engine==2.20.2'",
        ),
    ],
)
def test_each_part_is_named_with_what_mends_it(
    put: Put, changed: dict[str, tuple[str, str] | None], part: str, detail: str, mend: str
) -> None:
    put(**changed)
    assert faults() == {part: (detail, mend)}


def test_a_missing_driver_is_no_fault_of_a_package(put: Put) -> None:
    put(sglang_kernel=("0.4.10", "raise ImportError('libcuda.so.1: cannot open shared object file')"))
    assert faults() == {}


def test_what_a_training_on_a_cpu_hides_is_no_fault(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put()
    monkeypatch.setitem(sys.modules, gpu_set._MODULES["transformer-engine-torch"], None)
    assert faults() == {}


def test_a_gpu_without_any_of_it(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put(**dict.fromkeys(name.replace("-", "_") for name in gpu_set._SIGNS))
    for cuda in (True, False):
        monkeypatch.setattr(device, "probe", lambda name, cuda=cuda: device.Probe(name, cuda, "", "", ""))
        assert [fault.mend for fault in gpu_set.faults()] == ["make setup GPU=1"] * cuda


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """A library that depends on libneeded.so.1 in the folder `wheels`."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "empty.c").touch()
    needed, hook = tmp_path / "wheels" / "libneeded.so.1", tmp_path / "hook.so"
    compiler = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", str(tmp_path / "empty.c")]
    subprocess.run([*compiler, "-Wl,-soname,libneeded.so.1", "-o", needed], check=True)
    subprocess.run([*compiler, needed, "-o", hook], check=True)
    return hook


def with_libraries(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(toolkit, "wheels", lambda: folders[0] if folders else None)
    monkeypatch.setattr(toolkit, "libraries", lambda: [str(folder) for folder in folders])


@pytest.mark.processes
def test_a_hook_is_preloaded_with_the_libraries_of_the_wheels(
    monkeypatch: pytest.MonkeyPatch, hook: Path, put: Put
) -> None:
    """Without them the loader ends SGLang's schedulers with code 127."""
    put()
    monkeypatch.setattr(gpu_set, "saver_hook", lambda: hook)
    with_libraries(monkeypatch, hook.parent / "wheels")
    assert str(hook.parent / "wheels" / "libneeded.so.1") in gpu_set.preload(hook).libraries
    assert faults() == {}
    with_libraries(monkeypatch)
    detail, mend = faults()["torch-memory-saver"]
    assert "libneeded.so.1: cannot open shared object file" in detail and "LD_LIBRARY_PATH" in mend


@pytest.mark.processes
def test_on_a_login_node_no_hook_is_tried(monkeypatch: pytest.MonkeyPatch, hook: Path) -> None:
    monkeypatch.setattr(gpu_set, "_DRIVER", "libneeded.so")
    with_libraries(monkeypatch)
    assert gpu_set.preload(hook).skipped


@pytest.mark.processes
def test_the_files_of_cudas_libraries_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A separate process lists them from the folders of the wheels."""
    (tmp_path / "empty.c").touch()
    (wheels := tmp_path / "wheels").mkdir()
    (module := tmp_path / "module").mkdir()
    cudnn, nccl, stranger = wheels / "libcudnn.so.9", wheels / "libnccl.so.2", module / "libcudnn_ops.so.9"
    libraries = [cudnn, wheels / "libcudnn_graph.so.9", nccl, stranger]
    for library in libraries:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "empty.c"], check=True)
    names = [library.name for library in libraries]
    monkeypatch.setattr(gpu_set, "_IMPORTS", f"import ctypes\nfor name in {names}: ctypes.CDLL(name)\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(module))
    with_libraries(monkeypatch, wheels)
    listed = {"cudnn": [str(cudnn), str(stranger)], "nccl": [str(nccl)]}
    assert gpu_set.mapped() == {"cudart": [], "cublas": [], "nvrtc": []} | listed
