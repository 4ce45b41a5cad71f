"""Bundles for a machine without a network: packed, unpacked beside another Python, and rehearsed there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from tools.gpu import bundle

ROOT = Path(__file__).resolve().parents[2]


# Instead of this checkout: the stage `facts` says which bundle it is from, and waits until someone reads the pipe WAIT.
SMALL = {
    "tests/__init__.py": "",
    "megatron_collab/runtime/toolkit.py": "def library_path(path):\n    return path or ''\n",
    "tools/gpu/facts.py": """
import os, signal, sys
print("facts of EDITION", flush=True)
if pipe := os.environ.get("WAIT"):
    interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    open(pipe, "w").write(f"{os.getpid()} {interrupted}")
    signal.pause()
""",
}


def environment(python: str, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return kept | {"PYTHON": python} | variables


def run(folder: Path, *stages: str, python: str = sys.executable, seconds: float = 100) -> subprocess.CompletedProcess:
    command, variables = ["bash", str(folder / "run.sh"), *stages], environment(python, CUDA_VISIBLE_DEVICES="")
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=seconds)


def small(folder: Path, edition: str) -> None:
    """run.sh with a bundle of SMALL."""
    entries = []
    for name, text in SMALL.items():
        (path := folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("EDITION", edition))
        entries.append((f"checkout/{name}", path))
    bundle.pack("base", entries, folder)
    shutil.copy(ROOT / "tools/gpu/run.sh", folder)


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
    subprocess.run([sys.executable, ROOT / "tools/gpu/bundle.py", packed, "--dry", "--engine"], check=True, timeout=300)
    borrowed.mkdir()
    for file in filter(Path.is_file, packed.iterdir()):
        assert file.stat().st_size <= 60 << 20
        file.rename(borrowed / file.name)
    code = "import importlib.util as u, sys; print([name for name in sys.argv[1:] if u.find_spec(name)])"
    names = ["megatron", "hydra", "pytest", "sglang", "ray", "litellm", "pydantic", "transformers"]
    importable = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    assert importable.stdout == "['transformers']\n"
    done = run(borrowed, "--dry", "facts", "kernels", "memory", "engine", "server", python=python, seconds=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {file.name: file.read_text() for file in (borrowed / "results").iterdir()}
    assert "driver: 1 x Stand-in H100" in results["facts.md"] and "compute mode: DEFAULT" in results["facts.md"]
    for stage, least in {"kernels": 15, "memory": 1, "engine": 30, "server": 25}.items():
        collected = re.search(r"\b(\d+)/\d+ tests collected", results[f"{stage}.log"])
        assert collected and int(collected[1]) >= least, results[f"{stage}.log"][-3000:]
    assert re.search(r"- [1-9]\d+ passed, 0 failed, 0 skipped", results["kernels.md"])
    assert (
        "| `tests/weight_sync/test_colocated_memory.py::test_memory_goes_to_the_trainer_and_back[cpu]` |"
        in (results["memory.md"])
    )
    parts = b"".join(part.read_bytes() for part in sorted(borrowed.glob("engine-*")))
    subprocess.run(["tar", "-xz", "-C", borrowed / "unpacked"], input=parts, check=True)
    # Instead of wheels, TransformerEngine's Python part in this environment (tools/setup_env.sh).
    engine = Path(sys.prefix, "transformer-engine")
    folders = (borrowed / "unpacked/base/packages", borrowed / "unpacked/packages", engine)
    variables = {"PYTHONPATH": ":".join(map(str, folders)), "NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none"}
    code = "import transformer_engine.common.recipe as recipe; print(recipe.Float8BlockScaling().fp8_format)"
    done = subprocess.run([python, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    with pytest.raises(FileNotFoundError):
        bundle.pack("base", [("packages/content", tmp_path / "absent")], tmp_path)
    assert sorted(tmp_path.iterdir()) == [*parts, content]


@pytest.mark.processes
def test_only_tracked_files_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a second run, when the bundle lies in the checkout and git does not ignore it."""
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    monkeypatch.setattr(bundle, "PACKAGES", {"base": ""})
    (tmp_path / "tools/gpu").mkdir(parents=True)
    (tmp_path / "tools/gpu/run.sh").touch()
    (tmp_path / ".gitignore").write_text("ignored\n")
    subprocess.run("git init -q && git add . && touch .env ignored", shell=True, cwd=tmp_path, check=True)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["bundle.py", str(folder := tmp_path / "borrowed"), "--dry"])
        assert bundle.main() == 0
        (packed,) = folder.glob("base-*")
        with tarfile.open(packed) as archive:
            assert archive.getnames() == ["checkout/.gitignore", "checkout/tools/gpu/run.sh"]
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "left out" in line] == ["left out, since git does not track it: .env"]
    monkeypatch.setattr(sys, "argv", ["bundle.py", str(tmp_path / "tools"), "--dry"])
    with pytest.raises(SystemExit, match=r"tools has files that git tracks; choose another FOLDER"):
        bundle.main()
    assert not (tmp_path / "tools/wheels").exists()


@pytest.mark.processes
def test_a_new_bundle_replaces_what_was_unpacked(tmp_path: Path) -> None:
    """In a folder whose name is a pattern, with the Python of a virtual environment by its relative path."""
    (folder := tmp_path / "g[1]").mkdir()
    (results := folder / "results").mkdir()
    (results / "facts.md").write_text("of an earlier run")
    python = os.path.relpath(sys.executable, folder)
    for edition in ("one", "one", "two"):
        small(folder, edition)
        done = run(folder, "facts", python=python)
        assert (done.returncode, done.stdout) == (0, f"facts of {edition}\nfacts: passed\n"), done.stderr
        assert [file.name for file in results.iterdir()] == ["facts.log"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_stage_and_its_process(tmp_path: Path, number: signal.Signals) -> None:
    small(tmp_path, "one")
    os.mkfifo(pipe := tmp_path / "pipe")
    command = ["env", f"--default-signal={number.name[3:]}", "bash", str(tmp_path / "run.sh"), "facts", "facts"]
    with subprocess.Popen(
        command, env=environment(sys.executable, WAIT=str(pipe)), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as running:
        process, interrupted = pipe.read_text().split()
        running.send_signal(number)
        _, errors = running.communicate()
    assert running.returncode == 128 + number and interrupted == "True"
    assert errors == f"run.sh: stopped by {number.name} in the stage facts\n"
    assert not psutil.pid_exists(int(process))


@pytest.mark.slow
@pytest.mark.processes
def test_a_stage_whose_tests_are_all_skipped_has_not_passed(tmp_path: Path) -> None:
    """The report is the real one; conftest.py and the test are small."""
    (conftest := tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests import gpus\n\n"
        "def pytest_addoption(parser):\n    parser.addoption('--gpu-report', type=Path)\n\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(gpus.Report(config.getoption('--gpu-report')))\n"
    )
    (skipped := tmp_path / "skipped.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_memory():\n    pytest.skip('needs 1 GPU, 0 here')\n"
    )
    test = "checkout/tests/weight_sync/test_colocated_memory.py"
    names = (
        "checkout/megatron_collab/__",
        "checkout/megatron_collab/runtime/",
        "checkout/tests/gpus.py",
        "checkout/tools/gpu",
    )
    package = [entry for entry in bundle.checkout(tmp_path) if entry[0].startswith(names)]
    bundle.pack("base", [*package, ("checkout/tests/conftest.py", conftest), (test, skipped)], tmp_path)
    shutil.copy(ROOT / "tools/gpu/run.sh", tmp_path)
    done = run(tmp_path, "memory")
    assert done.returncode == 1 and "memory: nothing ran; " in done.stdout, done.stdout + done.stderr
    assert "needs 1 GPU, 0 here" in (tmp_path / "results/memory.md").read_text()


@pytest.mark.processes
def test_servers_have_their_own_transformer_engine(tmp_path: Path) -> None:
    """That of the bundle was compiled for another torch. A stand-in for pytest prints the path of modules."""
    small(tmp_path, "1")
    (python := tmp_path / "python").write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pytest"*) echo "$PYTHONPATH"; exit;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = run(tmp_path, "memory", "server", "kernels", python=str(python))
    assert done.returncode == 0, done.stdout + done.stderr
    paths = {stage: (tmp_path / f"results/{stage}.log").read_text() for stage in ("memory", "server", "kernels")}
    assert all("base/packages" in path for path in paths.values())
    assert [stage for stage, path in paths.items() if "engine/packages" in path] == ["memory", "kernels"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "stages", "message"),
    [
        ([], ["kernels"], "no bundle base in "),
        (["base-cp399.tar.gz.001of001"], ["facts"], "base-cp399.tar.gz.001of001 is not for the Python of "),
        ([f"base-{bundle.PYTHON}.tar.gz.001of002"], ["facts"], "bundle base has 1 of 002 files"),
        ([f"base-{bundle.PYTHON}.tar.gz.001of001"], ["facts"], "bundle base cannot be unpacked"),
        ([], [], "which stages?"),
        ([], ["facts", "kernel"], "there is no stage kernel"),
    ],
)
def test_what_is_missing_is_said_in_a_line(tmp_path: Path, files: list[str], stages: list[str], message: str) -> None:
    shutil.copy(ROOT / "tools/gpu/run.sh", tmp_path)
    for name in files:
        (tmp_path / name).touch()
    done = run(tmp_path, *stages)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"run.sh: {message}")
