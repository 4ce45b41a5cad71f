"""The set-up: pinned locks, extras, and one line for everything that can stand in its way."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# A Python that is asked for its version, its headers, pip's version and for installations, and notes the latter.
STUB = """#!/bin/sh
case "$*" in
    -c*sysconfig*) echo {include} ;;
    -c*) echo {version} ;;
    *"pip --version"*) echo pip ;;
    *"pip install"* | *"pip wheel"*) echo $NVTE_NO_LOCAL_VERSION "$@" >> {calls}; {install} ;;
    *) exit 1 ;;
esac
"""


# What stands for pip: it keeps the list of packages, and makes an empty wheel where one is asked for.
WHEEL = "build/wheels/torch==2.14.1/transformer_engine_torch-2.20.2-cp311-cp311-linux_x86_64.whl"
PIP = f"""case "$*" in
    *"pip wheel"*) mkdir -p $(dirname {WHEEL}); touch {WHEEL} ;;
    *.lock*) cp .venv/tmp/packages.lock packages ;;
esac"""


class Place:
    """A copy of what the set-up reads, with stubs for every program it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.calls = folder / "project", folder / "bin", folder / "calls"
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")
        (self.folder / "tools").mkdir()
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("setup.py", "tools/setup_env.sh"):
            shutil.copy(ROOT / name, self.folder / name)
        self.python("true")
        shutil.copy(self.folder / ".venv" / "bin" / "python", self.bin / "python3.11")
        for compiler in ("cc", "c++"):
            self.stub(self.bin / compiler, "#!/bin/sh\n")
        (folder / "Python.h").touch()
        self.disk(100 * 1024 * 1024)

    def stub(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def python(self, install: str, version: str = "3.11") -> None:
        """The environment's Python; `install` is the shell command that stands for pip install."""
        text = STUB.format(version=version, include=self.folder.parent, calls=self.calls, install=install)
        self.stub(self.folder / ".venv" / "bin" / "python", text)

    def disk(self, free_kb: int) -> None:
        head, line = "Filesystem 1024-blocks Used Available Capacity Mounted", f"/dev/disk 999999999 1 {free_kb} 1% /"
        self.stub(self.bin / "df", f"#!/bin/sh\necho {head}\necho {line}\n")

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHON": "python3.11", "CC": "cc"}
        environment.pop("GPU", None)  # of the make that runs the tests
        command = ["tools/setup_env.sh"]
        return subprocess.run(
            command, cwd=self.folder, env={**environment, **variables}, capture_output=True, text=True, timeout=60
        )

    def installed(self) -> list[str]:
        """The pip calls so far."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def packages(self) -> set[str]:
        """The lines of the last list of packages that was installed; where PIP stands for pip."""
        return set((self.folder / "packages").read_text().splitlines())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a set-up that ended with 1."""
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("setup: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("lock", ["cpu.lock", "dev.lock", "gpu.lock", "bench.lock"])
def test_every_line_of_a_lock_is_one_version(lock: str) -> None:
    lines = [line for line in (ROOT / "requirements" / lock).read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))


def test_extras_are_requirements_and_gpu_pins_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    extras = {name: [Requirement(line) for line in lines] for name, lines in given["extras_require"].items()}
    assert set(extras) == {"cpu", "gpu", "logs", "dev", "bench"}
    for requirement in extras["cpu"] + extras["logs"] + extras["dev"]:
        assert str(requirement.specifier).startswith("==")
    gpu = {requirement.name: requirement for requirement in extras["gpu"]}
    pins = {"sglang": "==0.5.23", "megatron-core": "==0.16.1", "ray": "==2.60.0", "transformer-engine": "==2.20.2"}
    assert {name: str(gpu[name].specifier) for name in pins} == pins
    assert gpu["transformer-engine"].extras == {"pytorch", "core_cu13"}
    assert "megatron_collab" in given["packages"] and "tests" not in given["packages"]


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_rays_agent_is_the_same_everywhere(lock: str) -> None:
    """Without its extra `default` it starts without a part of its services, another program than in the tests."""
    wanted = map(Requirement, metadata.requires("ray") or [])
    extra = {
        canonicalize_name(each.name) for each in wanted if each.marker and each.marker.evaluate({"extra": "default"})
    }
    pinned = {
        canonicalize_name(line.split("==")[0]) for line in (ROOT / "requirements" / lock).read_text().splitlines()
    }
    assert len(extra) > 8 and extra <= pinned


@pytest.mark.processes
def test_torch_comes_first_then_the_locks_without_dependencies_then_the_project(place: Place) -> None:
    place.python(PIP)
    done = place.run()
    assert done.returncode == 0, done.stderr
    torch, locks, engine, compared, project = place.installed()
    assert "torch==2.13.0" in torch and "--no-deps" not in torch
    assert "--no-deps" in locks and {"sglang==0.5.23", "pytest==9.2.0"} <= place.packages()
    # Without its compiled part it must not be where every process finds it.
    assert "transformer-engine==2.20.2" not in place.packages()
    assert engine.endswith("--target .venv/transformer-engine transformer-engine==2.20.2")
    assert compared.endswith("--target .venv/compared -r requirements/bench.lock")
    assert project.endswith("--no-deps --no-build-isolation -e .")
    assert [line.split("]")[0] for line in done.stdout.splitlines()[:5]] == [f"setup [{n}/5" for n in range(1, 6)]


@pytest.mark.processes
def test_again_installs_nothing_and_a_changed_lock_installs(place: Place) -> None:
    place.run()
    place.calls.unlink()
    again = place.run()
    assert (again.returncode, again.stdout, again.stderr, place.installed()) == (0, "", "", [])
    with (place.folder / "requirements" / "cpu.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert place.run().returncode == 0
    assert len(place.installed()) == 5


@pytest.mark.processes
def test_a_half_finished_set_up_goes_on(place: Place) -> None:
    place.python('case "$*" in *--no-deps*) exit 1 ;; esac')
    assert "pip failed" in refused(place.run())
    assert not (place.folder / ".venv" / "setup.stamp").exists()
    place.python("true")
    assert place.run().returncode == 0


@pytest.mark.processes
def test_the_set_for_gpus_is_compiled_once(place: Place) -> None:
    """In an environment made anew, as on another node that has the same folder, the wheel is taken."""
    place.python(PIP)
    done = place.run(GPU="1", MAX_JOBS="3")
    assert done.returncode == 0, done.stderr
    assert [line.split("]")[0] for line in done.stdout.splitlines()[:5]] == [f"setup [{n}/5" for n in (1, 2, 3, 4, 5)]
    torch, _, wheel, engine, project = place.installed()
    assert "torch==2.14.1" in torch and "--no-deps" not in torch
    assert {"sglang-kernel==0.4.10", "pytest==9.2.0", "transformer-engine-cu13==2.20.2"} <= place.packages()
    assert "transformer-engine-torch==2.20.2" not in place.packages()  # of which there is no wheel
    assert wheel.endswith("--wheel-dir build/wheels/torch==2.14.1 transformer-engine-torch==2.20.2")
    assert wheel.startswith("1 -m pip wheel") and "--no-build-isolation" in wheel and "--no-cache-dir" in wheel
    assert "--no-index --find-links build/wheels/torch==2.14.1" in engine
    assert project.endswith("--no-deps --no-build-isolation -e .")
    (place.folder / ".venv" / "setup.stamp").unlink()
    place.calls.unlink()
    assert place.run(GPU="1").returncode == 0
    assert not any("pip wheel" in call for call in place.installed())


@pytest.mark.processes
def test_an_environment_keeps_its_set(place: Place) -> None:
    """`make test` after `make setup GPU=1` tests the set for GPUs, and does not install the other over it."""
    place.python(PIP)
    place.run(GPU="1")
    place.calls.unlink()
    kept = place.run()
    assert (kept.returncode, kept.stdout, place.installed()) == (0, "", [])
    said = ".venv holds the set for GPUs; remove .venv and run make setup again"
    assert said in refused(place.run(GPU="0"))
    with (place.folder / "requirements" / "gpu.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert place.run().returncode == 0
    assert "another==1.0" in place.packages()


@pytest.mark.processes
def test_the_set_for_gpus_does_not_replace_the_one_for_cpus(place: Place) -> None:
    place.run()
    said = ".venv holds the set for CPUs; remove .venv and run make setup GPU=1 again"
    assert said in refused(place.run(GPU="1"))
    assert "GPU=yes is neither 1, the set for GPUs, nor 0" in refused(place.run(GPU="yes"))


@pytest.mark.processes
def test_what_the_set_for_gpus_needs_is_seen_before_anything_is_installed(place: Place) -> None:
    place.disk(12 * 1024 * 1024)
    assert "16 GB are needed; free some space and run make setup GPU=1 again" in refused(place.run(GPU="1"))
    place.disk(100 * 1024 * 1024)
    assert "no C++ compiler" in refused(place.run(GPU="1", CXX="c++-nowhere"))
    (place.folder.parent / "Python.h").unlink()
    assert "python3.11 has no headers" in refused(place.run(GPU="1"))
    assert place.installed() == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("output", "said"),
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
def test_what_the_compiler_stumbled_over_is_one_line(place: Place, output: str, said: str) -> None:
    (place.folder / "output").write_text(f"{output}\n  ERROR: Failed building wheel for transformer-engine-torch\n")
    place.python(f'case "$*" in *"pip wheel"*) cat {place.folder}/output; exit 1 ;; esac')
    assert said in refused(place.run(GPU="1"))
    assert len(place.installed()) == 3


@pytest.mark.processes
def test_a_python_that_is_not_there(place: Place) -> None:
    line = refused(place.run(PYTHON="python3.11-nowhere"))
    assert "python3.11-nowhere is not there; install Python 3.11" in line and "make setup PYTHON=" in line


@pytest.mark.processes
@pytest.mark.parametrize(("command", "said"), [("echo 3.12", "is 3.12 Python"), ("exit 1", "is no Python")])
def test_a_python_of_another_version(place: Place, command: str, said: str) -> None:
    place.stub(place.bin / "python3", f"#!/bin/sh\n{command}\n")
    line = refused(place.run(PYTHON="python3"))
    assert said in line and "3.11 is needed" in line and "make setup PYTHON=" in line
    assert place.installed() == []


@pytest.mark.processes
def test_an_environment_of_another_python(place: Place) -> None:
    place.python("true", version="3.12")
    assert "remove .venv and run make setup again" in refused(place.run())


@pytest.mark.processes
def test_no_compiler(place: Place) -> None:
    line = refused(place.run(CC="cc-nowhere"))
    assert "no C compiler" in line and "build-essential" in line


@pytest.mark.processes
def test_a_full_disk_is_seen_before_anything_is_installed(place: Place) -> None:
    place.disk(2 * 1024 * 1024)
    line = refused(place.run())
    assert "2048 MB free" in line and "6 GB are needed" in line
    assert place.installed() == []


OUTPUTS = [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full"),
    (
        "WARNING: Retrying: NewConnectionError: Failed to establish a new connection: [Errno -2] Name or service not "
        "known\nERROR: No matching distribution found for torch==2.13.0",
        "the package index does not answer",
    ),
    ("error: metadata-generation-failed\nERROR: something else", "pip failed: ERROR: something else"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("output", "said"), OUTPUTS)
def test_what_pip_stumbled_over_is_one_line(place: Place, output: str, said: str) -> None:
    (place.folder / "output").write_text(output + "\n")
    place.python(f"cat {place.folder}/output; exit 1")
    assert said in refused(place.run())


@pytest.mark.processes
def test_a_missing_wheel_is_named(place: Place) -> None:
    """With pip itself, so that its wording is what the script looks for."""
    place.python(f"exec {sys.executable} -m pip download --no-index --no-deps a-package-of-ours==7.7")
    line = refused(place.run())
    assert "no wheel of a-package-of-ours==7.7" in line and "PIP_INDEX_URL" in line


@pytest.mark.processes
def test_make_stops_where_the_set_up_does(place: Place) -> None:
    shutil.copy(ROOT / "Makefile", place.folder)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {**outside, "PATH": f"{place.bin}:{os.environ['PATH']}"}  # not those of the make that runs the tests
    done = subprocess.run(
        ["make", "test", "PYTHON=python3.11-nowhere"], cwd=place.folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "python3.11-nowhere is not there" in done.stderr and "pytest" not in done.stdout
