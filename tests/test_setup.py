"""The setup: pinned locks, extras, and a one-line message for everything that can go wrong."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# A stand-in for Python: answers questions about its version, headers and pip, and records installations.
STUB = """#!/bin/sh
case "$*" in
    -c*sysconfig*) echo {include} ;;
    -c*) echo {version} ;;
    *"pip --version"*) echo pip ;;
    *"pip install"* | *"pip wheel"*) echo $NVTE_NO_LOCAL_VERSION $PIP_CONSTRAINT "$@" >> {calls}; {install} ;;
    *) exit 1 ;;
esac
"""


# A stand-in for pip: keeps the list of packages, and creates an empty wheel on request.
WHEEL = "build/wheels/torch==2.14.1/transformer_engine_torch-2.20.2-cp312-cp312-linux_x86_64.whl"
PIP = f"""case "$*" in
    *"pip wheel"*) mkdir -p $(dirname {WHEEL}); touch {WHEEL} ;;
    *packages.lock*) cp .venv/tmp/packages.lock packages ;;
esac"""


# Programs that the setup calls besides Python and a compiler, for a PATH without the Pythons of this machine.
PROGRAMS = "awk bash cat cp cut dirname du getconf grep head make mkdir nproc rm sed sha256sum sort tail touch uname"


class Place:
    """A copy of the files that the setup reads, with stubs for the programs it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls = folder / "project", folder / "bin", folder / "calls"
        self.pyenv = folder / "pyenv"
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        (self.folder / "tools").mkdir()
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("setup.py", "tools/setup_env.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        for name in PROGRAMS.split():
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.python("true")
        for compiler in ("cc", "c++"):
            self.stub(self.bin / compiler, "#!/bin/sh\n")
        (folder / "Python.h").touch()
        self.disk(100 * 1024 * 1024)

    def stub(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def python(self, install: str, version: str = "3.12") -> None:
        """The environment's Python; `install` is the shell command that stands for pip install."""
        text = STUB.format(version=version, include=self.folder.parent, calls=self.calls, install=install)
        self.stub(self.folder / ".venv" / "bin" / "python", text)

    def system_python(self, path: Path, version: str) -> None:
        """A Python of the machine; it copies itself into environments it creates, and records `path` in `calls`."""
        make = f'echo {path} >> {self.calls}; mkdir -p .venv/bin; cp "$0" .venv/bin/python'
        text = STUB.format(version=version, include=self.folder.parent, calls=self.calls, install="true")
        self.stub(path, text.replace("    *) exit 1", f'    "-m venv"*) {make} ;;\n    *) exit 1'))

    def disk(self, free_kb: int) -> None:
        head, line = "Filesystem 1024-blocks Used Available Capacity Mounted", f"/dev/disk 999999999 1 {free_kb} 1% /"
        self.stub(self.bin / "df", f"#!/bin/sh\necho {head}\necho {line}\n")

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), "PYENV_ROOT": str(self.pyenv), "CC": "cc"}
        return subprocess.run(
            ["tools/setup_env.sh"],
            cwd=self.folder,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def installed(self) -> list[str]:
        """The pip calls so far."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def packages(self) -> set[str]:
        """The lines of the last list of packages that was installed, if PIP is the stand-in for pip."""
        return set((self.folder / "packages").read_text().splitlines())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one-line message of a setup that exited with code 1."""
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("setup: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("lock", ["base.lock", "dev.lock", "gpu.lock", "bench.lock"])
def test_every_line_of_a_lock_is_one_version(lock: str) -> None:
    lines = [line for line in (ROOT / "requirements" / lock).read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r'[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+( ; python_version < "3.13")?', line), line
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))


def pins(*locks: str) -> dict[str, str]:
    """The version of each package in the locks."""
    lines = [line for lock in locks for line in (ROOT / "requirements" / lock).read_text().splitlines()]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


def test_the_two_locks_are_one_resolution_of_the_list() -> None:
    """No package is in two of them, and together they have what packages.in names, as the override says."""
    base, gpu, dev, bench = pins("base.lock"), pins("gpu.lock"), pins("dev.lock"), pins("bench.lock")
    assert len({**base, **gpu, **dev, **bench}) == len(base) + len(gpu) + len(dev) + len(bench)
    for name in ("packages.in", "packages.override"):
        text = (ROOT / "requirements" / name).read_text()
        for requirement in map(Requirement, re.findall(r"^[^#\n]+$", text, re.MULTILINE)):
            version = {**base, **gpu}[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_a_cpu_build_of_torch_is_without_the_libraries_of_cuda() -> None:
    """Only gpu.lock names them, so an index of CPU builds gives an environment without them."""
    assert not [name for name in pins("base.lock") if re.match("nvidia-|cuda-|triton", name)]
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} <= pins("gpu.lock").keys()


def test_extras_are_requirements_and_gpu_pins_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    setup_arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: setup_arguments.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    extras = {name: [Requirement(line) for line in lines] for name, lines in setup_arguments["extras_require"].items()}
    assert set(extras) == {"cpu", "gpu", "logs", "dev", "bench"}
    for requirement in extras["cpu"] + extras["logs"] + extras["dev"]:
        assert str(requirement.specifier).startswith("==")
    gpu = {requirement.name: requirement for requirement in extras["gpu"]}
    versions = {"sglang": "==0.5.23", "megatron-core": "==0.19.2", "ray": "==2.60.0", "transformer-engine": "==2.20.2"}
    assert {name: str(gpu[name].specifier) for name in versions} == versions
    assert gpu["transformer-engine"].extras == {"pytorch", "core_cu13"}
    assert "megatron_collab" in setup_arguments["packages"] and "tests" not in setup_arguments["packages"]
    pythons = SpecifierSet(setup_arguments["python_requires"])
    assert ["3.11.9" in pythons, "3.12.0" in pythons, "3.13.9" in pythons, "3.14.0" in pythons] == [0, 1, 1, 0]


def test_rays_agent_is_the_same_everywhere() -> None:
    """Without its extra `default` Ray's agent lacks some services, and users would run another program than tests."""
    requirements = map(Requirement, metadata.requires("ray") or [])
    extra = {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker and requirement.marker.evaluate({"extra": "default"})
    }
    assert len(extra) > 8 and extra <= pins("base.lock").keys()


@pytest.mark.processes
def test_torch_comes_first_then_the_locks_without_dependencies_then_the_project(place: Place) -> None:
    place.python(PIP)
    done = place.run()
    assert done.returncode == 0, done.stderr
    torch, locks, compared, engine, project = place.installed()
    assert "torch==2.14.1" in torch and "--no-deps" not in torch and "--index-url" not in torch
    assert "--constraint requirements/base.lock --constraint requirements/gpu.lock" in torch
    assert "--no-deps" in locks and {"sglang==0.5.23", "pytest==9.2.0"} <= place.packages()
    assert not {"sglang-kernel==0.4.10", "nvidia-cublas==13.1.1.3"} & place.packages()
    # Without its compiled part it must not be importable by every process.
    assert "transformer-engine==2.20.2" not in place.packages()
    assert engine.endswith("--target .venv/transformer-engine transformer-engine==2.20.2")
    assert compared.endswith("--target .venv/compared -r requirements/bench.lock")
    assert project.endswith("--no-deps --no-build-isolation -e .")
    assert [line.split("]")[0] for line in done.stdout.splitlines()[:5]] == [f"setup [{n}/5" for n in range(1, 6)]


@pytest.mark.processes
def test_versions_are_those_of_the_locks_in_a_container_with_its_own_constraints(place: Place) -> None:
    assert place.run(PIP_CONSTRAINT="/etc/pip/constraint.txt").returncode == 0
    assert len(place.installed()) == 5 and not any("/etc/pip" in call for call in place.installed())


@pytest.mark.processes
def test_a_second_run_installs_nothing_and_a_changed_lock_installs(place: Place) -> None:
    place.run()
    place.calls.unlink()
    repeated = place.run()
    assert (repeated.returncode, repeated.stdout, repeated.stderr, place.installed()) == (0, "", "", [])
    with (place.folder / "requirements" / "base.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert place.run().returncode == 0
    assert len(place.installed()) == 5


@pytest.mark.processes
def test_a_half_finished_setup_is_completed(place: Place) -> None:
    place.python('case "$*" in *--no-deps*) exit 1 ;; esac')
    assert "pip failed" in refused(place.run())
    assert not (place.folder / ".venv" / "setup.stamp").exists()
    place.python("true")
    assert place.run().returncode == 0


@pytest.mark.processes
def test_transformer_engine_is_compiled_once(place: Place) -> None:
    """A new environment, as on another node with the same folder, reuses the wheel."""
    place.python(PIP)
    done = place.run(GPU="1", MAX_JOBS="3")
    assert done.returncode == 0, done.stderr
    assert [line.split("]")[0] for line in done.stdout.splitlines()[:6]] == [f"setup [{n}/6" for n in range(1, 7)]
    torch, _, compared, wheel, engine, project = place.installed()
    assert "torch==2.14.1" in torch and "--no-deps" not in torch
    assert {"sglang-kernel==0.4.10", "pytest==9.2.0", "transformer-engine-cu13==2.20.2"} <= place.packages()
    assert {"sglang==0.5.23", "transformer-engine==2.20.2"} <= place.packages()
    assert "transformer-engine-torch==2.20.2" not in place.packages()  # there is no wheel of it
    assert compared.endswith("--target .venv/compared -r requirements/bench.lock")
    assert wheel.endswith("--wheel-dir build/wheels/torch==2.14.1 transformer-engine-torch==2.20.2")
    assert wheel.startswith("1 -m pip wheel") and "--no-build-isolation" in wheel and "--no-cache-dir" in wheel
    assert "--no-index --find-links build/wheels/torch==2.14.1" in engine
    assert project.endswith("--no-deps --no-build-isolation -e .")
    (place.folder / ".venv" / "setup.stamp").unlink()
    place.calls.unlink()
    assert place.run(GPU="1").returncode == 0
    assert not any("pip wheel" in call for call in place.installed())


@pytest.mark.processes
def test_a_wheel_for_another_python_is_not_used(place: Place) -> None:
    other = place.folder / WHEEL.replace("cp312", "cp313")
    place.stub(other, "")
    place.python(PIP)
    assert place.run(GPU="1").returncode == 0
    assert any("pip wheel" in call for call in place.installed())


@pytest.mark.processes
def test_the_packages_for_gpus_are_added_and_stay(place: Place) -> None:
    """`make test` after `make setup GPU=1` keeps them, and a changed lock updates them."""
    place.python(PIP)
    assert place.run().returncode == 0
    place.calls.unlink()
    added = place.run(GPU="1")
    assert added.returncode == 0 and "sglang-kernel==0.4.10" in place.packages(), added.stderr
    place.calls.unlink()
    kept = place.run()
    assert (kept.returncode, kept.stdout, place.installed()) == (0, "", [])
    with (place.folder / "requirements" / "gpu.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert place.run().returncode == 0
    assert "another==1.0" in place.packages()
    assert "GPU=yes is neither 1, with the packages for GPUs, nor 0" in refused(place.run(GPU="yes"))


@pytest.mark.processes
def test_torch_from_another_index(place: Place) -> None:
    """Only torch and torchvision come from there, now and when a lock changes; dependencies come as usual."""
    index = "https://packages.example/cpu"
    place.run(TORCH_INDEX=index)
    build, dependencies, *remaining = place.installed()
    assert build.endswith(f"--no-deps --only-binary=:all: --index-url {index} torch==2.14.1 torchvision==0.29.2")
    assert "--no-deps" not in dependencies and "torch==2.14.1" in dependencies
    assert not any("--index-url" in call for call in [dependencies, *remaining])
    place.calls.unlink()
    assert place.run().stdout == ""
    with (place.folder / "requirements" / "base.lock").open("a") as lock:
        lock.write("another==1.0\n")
    place.run()
    assert place.installed()[0] == build
    message = "torch in .venv is from another index than TORCH_INDEX; remove .venv and run make setup again"
    assert message in refused(place.run(TORCH_INDEX="https://packages.example/other"))


def add_wheel(index: Path, name: str, version: str, requires: str = "") -> None:
    """An empty package, in a folder that pip can use as an index."""
    stem, page = f"{name.replace('-', '_')}-{version}", index / name / "index.html"
    info, file = f"{stem}.dist-info", f"{stem}-py3-none-any.whl"
    page.parent.mkdir(parents=True, exist_ok=True)
    with page.open("a") as links:
        links.write(f'<a href="{file}">{file}</a>\n')
    with zipfile.ZipFile(page.parent / file, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
@pytest.mark.processes
def test_an_index_of_cpu_builds_gives_an_environment_without_cuda(place: Place) -> None:
    """With real pip, which accepts 2.14.1+cpu as the version of the locks and keeps it when it uses another index."""
    folder = place.folder.parent
    versions = {"setuptools": "84.2.1", "torchvision": "0.29.2", "nvidia-cublas": "13.1.1.3"}
    for name, version in versions.items():
        add_wheel(folder / "everything", name, version)
    add_wheel(folder / "everything", "torch", "2.14.1", "Requires-Dist: nvidia-cublas")
    add_wheel(folder / "cpu", "torch", "2.14.1+cpu", "Requires-Dist: setuptools")
    add_wheel(folder / "cpu", "torchvision", "0.29.2+cpu")
    locks = {"base": "setuptools==84.2.1\ntorch==2.14.1\ntorchvision==0.29.2\n", "gpu": "nvidia-cublas==13.1.1.3\n"}
    for name in ("base", "gpu", "dev", "bench"):
        (place.folder / "requirements" / f"{name}.lock").write_text(locks.get(name, ""))
    shutil.rmtree(place.folder / ".venv")
    indexes = {"PIP_INDEX_URL": str(folder / "everything"), "TORCH_INDEX": str(folder / "cpu")}
    done = place.run(PYTHON=sys.executable, PIP_CONFIG_FILE=os.devnull, **indexes)
    assert "setup [4/5]" in done.stdout and done.returncode == 1, done.stderr  # there is nothing to compare with
    packages = [path.name.removesuffix(".dist-info") for path in (place.folder / ".venv").glob("lib/*/*/*.dist-info")]
    assert sorted(packages)[1:] == ["setuptools-84.2.1", "torch-2.14.1+cpu", "torchvision-0.29.2+cpu"]  # after pip


@pytest.mark.processes
def test_a_cpu_build_of_torch_gets_no_packages_for_gpus(place: Place) -> None:
    build = place.folder / ".venv/lib/python3.12/site-packages/torch/version.py"
    place.stub(build, "from typing import Optional\n__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\n")
    line = refused(place.run(GPU="1"))
    assert "torch in .venv is a CPU build" in line and "remove .venv and run make setup GPU=1 again" in line
    assert len(place.installed()) == 1
    place.stub(build, "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert "CPU build" not in place.run(GPU="1").stderr


@pytest.mark.processes
def test_requirements_of_the_gpu_packages_are_checked_before_anything_is_installed(place: Place) -> None:
    place.disk(12 * 1024 * 1024)
    assert "16 GB are needed; free some space and run make setup GPU=1 again" in refused(place.run(GPU="1"))
    place.disk(100 * 1024 * 1024)
    assert "no C++ compiler" in refused(place.run(GPU="1", CXX="c++-nowhere"))
    (place.folder.parent / "Python.h").unlink()
    line = refused(place.run(GPU="1"))
    assert "has no headers" in line and "apt-get install python3.12-dev" in line
    assert place.installed() == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "c++: fatal error: Killed signal terminated program cc1plus",
            "memory ran out while transformer-engine-torch was compiled; fewer files at a time need less: make setup "
            "GPU=1 MAX_JOBS=1",
        ),
        (
            "cast.cpp:7:10: fatal error: cudnn.h: No such file or directory",
            "transformer-engine-torch was not compiled: cast.cpp:7:10: fatal error: cudnn.h: No such file",
        ),
    ],
)
def test_a_compiler_error_is_reported_in_one_line(place: Place, output: str, message: str) -> None:
    (place.folder / "output").write_text(f"{output}\n  ERROR: Failed building wheel for transformer-engine-torch\n")
    place.python(f'case "$*" in *"pip wheel"*) cat {place.folder}/output; exit 1 ;; esac')
    assert message in refused(place.run(GPU="1"))
    assert len(place.installed()) == 4


@pytest.mark.processes
def test_a_missing_python(place: Place) -> None:
    line = refused(place.run(PYTHON="python3.12-nowhere"))
    assert "python3.12-nowhere is not there; install Python 3.12" in line and "make setup PYTHON=" in line


PYENV = "pyenv/versions"
# pyenv's command in PATH for a version that is installed but not selected.
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"bin/python3": "3.11", "bin/python3.12": "3.12", "bin/python3.13": "3.13"}, "bin/python3.12"),
        ({"bin/python3": "3.11", "bin/python3.13": "3.13", f"{PYENV}/3.12.1/bin/python": "3.12"}, "bin/python3.13"),
        ({"bin/python3": "3.12"}, "bin/python3"),
        ({"bin/python3.12": "", "later/python3.12": "3.12"}, "later/python3.12"),
        (
            {"bin/python3.12": "", f"{PYENV}/3.12.9/bin/python": "3.12", f"{PYENV}/3.12.10/bin/python": "3.12"},
            f"{PYENV}/3.12.10/bin/python",
        ),
        (
            {"bin/python3.12": "", f"{PYENV}/3.9.18/bin/python": "3.9", f"{PYENV}/3.13.0/bin/python": "3.13"},
            f"{PYENV}/3.13.0/bin/python",
        ),
        ({"bin/python3": "3.14", f"{PYENV}/3.13.0t/bin/python": "3.13t", "uv/python": "3.13"}, "uv/python"),
    ],
)
def test_the_search_for_a_python(place: Place, pythons: dict[str, str], chosen: str) -> None:
    """On PATH, except for pyenv shims that run nothing, then under pyenv, then among those of uv."""
    folder = place.folder.parent
    shutil.rmtree(place.folder / ".venv")
    for name, version in pythons.items():
        if version:
            place.system_python(folder / name, version)
        else:
            place.stub(folder / name, SHIM)
        if name.startswith("uv/"):
            arguments = f"python find --managed-python --no-python-downloads {version}"
            place.stub(place.bin / "uv", f'#!/bin/sh\n[ "$*" = "{arguments}" ] && echo {folder / name}\n')
    done = place.run(PATH=f"{place.bin}:{folder / 'later'}")
    assert done.returncode == 0, done.stderr
    assert place.installed()[0] == str(folder / chosen)


# The Python of these tests, posing as a free-threaded build, for which there are no wheels.
FREE_THREADED = f'exec {sys.executable} -c \'import sys; sys.abiflags = "t"; exec(sys.argv[1])\' "$2"'


@pytest.mark.processes
def test_no_python_is_reported_in_one_line(place: Place) -> None:
    shutil.rmtree(place.folder / ".venv")
    place.stub(place.bin / "python3.12", SHIM)
    line = refused(place.run())
    assert "no Python 3.12 or 3.13 on PATH" in line and "apt-get install python3.12 python3.12-venv" in line
    assert "uv python install 3.12" in line and "make setup PYTHON=/path/to/python3.12" in line


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "message"), [("echo 3.11", "is Python 3.11"), ("exit 1", "is no Python"), (FREE_THREADED, "t, 3.12 or")]
)
def test_a_python_of_another_version(place: Place, command: str, message: str) -> None:
    place.stub(place.bin / "python3", f"#!/bin/sh\n{command}\n")
    line = refused(place.run(PYTHON="python3"))
    assert message in line and "3.12 or 3.13 is needed" in line and "make setup PYTHON=" in line
    assert place.installed() == []


@pytest.mark.processes
def test_an_environment_keeps_its_python(place: Place) -> None:
    place.python("true", version="3.13")
    place.system_python(place.bin / "python3.12", "3.12")
    done = place.run()
    assert done.returncode == 0 and "environment in .venv, Python 3.13" in done.stdout, done.stderr
    line = refused(place.run(PYTHON="python3.12"))  # even if it is complete
    assert ".venv was made with Python 3.13, python3.12 is 3.12; remove .venv" in line


@pytest.mark.processes
def test_an_environment_of_another_python(place: Place) -> None:
    """Created by an earlier version of the project, or by a Python that was uninstalled."""
    place.python("true", version="3.11")
    message = ".venv was made with Python 3.11, 3.12 or 3.13 is needed; remove .venv and run make setup again"
    assert message in refused(place.run())
    python = place.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.12")
    assert ".venv was made with a Python that is gone" in refused(place.run())
    assert place.installed() == []


@pytest.mark.processes
def test_no_compiler(place: Place) -> None:
    line = refused(place.run(CC="cc-nowhere"))
    assert "no C compiler" in line and "build-essential" in line


@pytest.mark.processes
def test_a_full_disk_is_detected_before_anything_is_installed(place: Place) -> None:
    place.disk(2 * 1024 * 1024)
    line = refused(place.run())
    assert "2048 MB free" in line and "10 GB are needed" in line
    assert place.installed() == []


OUTPUTS = [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full"),
    (
        "WARNING: Retrying: NewConnectionError: Failed to establish a new connection: [Errno -2] Name or service not "
        "known\nERROR: No matching distribution found for torch==2.14.1",
        "the package index does not answer",
    ),
    ("error: metadata-generation-failed\nERROR: something else", "pip failed: ERROR: something else"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("output", "message"), OUTPUTS)
def test_a_pip_error_is_reported_in_one_line(place: Place, output: str, message: str) -> None:
    (place.folder / "output").write_text(output + "\n")
    place.python(f"cat {place.folder}/output; exit 1")
    assert message in refused(place.run())


@pytest.mark.processes
def test_a_missing_wheel_is_named(place: Place) -> None:
    """With real pip, so that the script matches its actual wording."""
    place.python(f"exec {sys.executable} -m pip download --no-index --no-deps a-package-of-ours==7.7")
    line = refused(place.run())
    assert "no wheel of a-package-of-ours==7.7" in line and "PIP_INDEX_URL" in line


@pytest.mark.processes
def test_make_stops_if_the_setup_fails(place: Place) -> None:
    shutil.copy(ROOT / "Makefile", place.folder)
    done = subprocess.run(
        ["make", "test", "PYTHON=python3.12-nowhere"],
        cwd=place.folder,
        env={"PATH": str(place.bin), "SHELL": "/bin/bash"},  # without the variables of the make that runs the tests
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "python3.12-nowhere is not there" in done.stderr and "pytest" not in done.stdout
