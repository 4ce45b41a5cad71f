"""Bundles for a machine without a network: packed, unpacked beside another Python, and rehearsed there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.gpu import bundle

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *stages: str, python: str = sys.executable, seconds: float = 100) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    command = ["bash", folder / "run.sh", *stages]
    return subprocess.run(
        command, env=kept | {"PYTHON": python}, cwd=folder, capture_output=True, text=True, timeout=seconds
    )


def needed(*packages: str) -> set[str]:
    """The packages with all that their import needs; their programs need typer, which brings half a dozen more."""
    names, waiting = {"typer"}, set(packages)
    while waiting:
        names.add(name := waiting.pop())
        requirements = map(Requirement, metadata.requires(name) or ())
        waiting |= {need.name for need in requirements if need.marker is None or need.marker.evaluate()} - names
    return names - {"typer"}


def machine(folder: Path) -> str:
    """A Python of its own with torch, triton and transformers."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for package in needed("torch", "triton", "transformers"):
        distribution = metadata.distribution(package)
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(distribution.locate_file(name)))
    return str(folder / "bin/python")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_stages_are_rehearsed_on_a_machine_with_torch_and_transformers(tmp_path: Path) -> None:
    """It has no other package of this environment; a stand-in names a GPU, which can compute nothing."""
    packed, borrowed, python = tmp_path / "packed", tmp_path / "borrowed", machine(tmp_path / "machine")
    subprocess.run([sys.executable, ROOT / "tools/gpu/bundle.py", packed, "--dry"], check=True, timeout=300)
    borrowed.mkdir()
    for file in filter(Path.is_file, packed.iterdir()):
        assert file.stat().st_size <= 60 << 20
        file.rename(borrowed / file.name)
    code = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
    names = ["megatron", "hydra", "pytest", "sglang", "ray", "litellm", "pydantic", "transformers"]
    importable = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    assert importable.stdout == "['transformers']\n"
    done = run(borrowed, "--dry", "facts", "kernels", "memory", "engine", python=python, seconds=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {file.name: file.read_text() for file in (borrowed / "results").iterdir()}
    assert "driver: 1 x Stand-in H100" in results["facts.md"] and "compute mode: DEFAULT" in results["facts.md"]
    for stage, least in {"kernels": 15, "memory": 1, "engine": 30}.items():
        collected = re.search(r"\b(\d+)/\d+ tests collected", results[f"{stage}.log"])
        assert collected and int(collected[1]) >= least, results[f"{stage}.log"][-3000:]
    assert re.search(r"- [1-9]\d+ passed, 0 failed, 0 skipped", results["kernels.md"])
    assert (
        "| `tests/weight_sync/test_colocated_memory.py::test_memory_goes_to_the_trainer_and_back[cpu]` |"
        in (results["memory.md"])
    )


def test_a_bundle_is_split_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LIMIT", 1000)
    (content := tmp_path / "content").write_bytes(os.urandom(2500))
    (tmp_path / f"base-{bundle.PYTHON}.tar.gz.001of009").touch()  # of an earlier time
    bundle.pack("base", [("packages/content", content)], tmp_path)
    parts = sorted(tmp_path.glob("base-*"))
    assert [part.name.rpartition(".")[2] for part in parts] == ["001of003", "002of003", "003of003"]
    joined = b"".join(part.read_bytes() for part in parts)
    extracted = subprocess.run(["tar", "-xzO", "packages/content"], input=joined, capture_output=True, check=True)
    assert extracted.stdout == content.read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "stages", "message"),
    [
        ([], ["kernels"], "no bundle base in "),
        (["base-cp399.tar.gz.001of001"], ["facts"], "base-cp399.tar.gz.001of001 is not for the Python of "),
        ([f"base-{bundle.PYTHON}.tar.gz.001of002"], ["facts"], "bundle base has 1 of 002 files"),
        ([f"base-{bundle.PYTHON}.tar.gz.001of001"], ["facts"], "bundle base cannot be unpacked"),
        ([], [], "which stages?"),
    ],
)
def test_what_is_missing_is_said_in_a_line(tmp_path: Path, files: list[str], stages: list[str], message: str) -> None:
    shutil.copy(ROOT / "tools/gpu/run.sh", tmp_path)
    for name in files:
        (tmp_path / name).touch()
    done = run(tmp_path, *stages)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"run.sh: {message}")
