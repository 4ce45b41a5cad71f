"""The wheel: installed into a fresh environment, it trains from any folder without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from megatron_collab import __version__

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
PAGE = "megatron_collab/view/static/index.html"
SOURCES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "requirements",
    "conf",
    "megatron_collab",
)


def run(*command: object, cwd: Path) -> str:
    """The output of a program that must succeed without seeing the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def copy_sources(folder: Path) -> Path:
    """A copy of the checkout that a build may write to."""
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    return checkout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = copy_sources(folder)
    stale = checkout / "build" / "lib" / "megatron_collab" / "stale.py"  # as an earlier build leaves them
    stale.parent.mkdir(parents=True)
    stale.touch()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, checkout, cwd=folder)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", *folder.glob("*.whl"), cwd=folder)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    shutil.rmtree(checkout)
    return folder / "venv"


def test_the_wheel_contains_files_that_are_not_modules(environment: Path) -> None:
    package = next(environment.glob("lib/python*/site-packages/megatron_collab"))
    packed = {str(file.relative_to(package)) for file in package.rglob("*") if file.suffix not in (".py", ".pyc")}
    conf = {str(file.relative_to(ROOT)) for file in (ROOT / "conf").rglob("*")}
    prompts = {f"prompts/{file.name}" for file in (ROOT / "megatron_collab" / "prompts").iterdir()}
    pages = {f"view/static/{file.name}" for file in (ROOT / "megatron_collab" / "view" / "static").iterdir()}
    assert (
        "view/static/index.html" in pages
        and conf | prompts | {"py.typed", "observability/templates/report.html.j2"} | pages <= packed
    )
    assert not (package / "stale.py").exists()


def test_a_source_distribution_holds_what_setup_reads(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path)
    run(sys.executable, "setup.py", "sdist", cwd=checkout)
    with tarfile.open(next((checkout / "dist").iterdir())) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"conf/config.yaml", "requirements/base.lock", "megatron_collab/py.typed", "pyproject.toml", PAGE} <= names


def test_the_program_runs_from_any_folder(environment: Path, tmp_path: Path) -> None:
    program = environment / "bin" / "megatron-collab"
    assert run(program, "--version", cwd=tmp_path) == f"megatron-collab {__version__}\n"
    assert "launch.device=auto selects" in run(program, "doctor", cwd=tmp_path)
    assert "-m megatron_collab.train experiment=" in run(program, "reproduce", "booking", "--commands", cwd=tmp_path)
    assert "on 128 GPUs" in run(program, "doctor", "--plan", "experiment=train_70b", cwd=tmp_path)


def test_it_trains_from_any_folder(environment: Path, tmp_path: Path) -> None:
    settings = ["experiment=booking_sft", "launch.device=cpu", "train.steps=2", "run.dir=run", "data.dir=world"]
    settings += ["optim.warmup_steps=0"]
    run(environment / "bin" / "megatron-collab", "train", *settings, cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and (tmp_path / "run" / "hf" / "model.safetensors").is_file()
    report = tmp_path / "run" / "report.html"
    report.unlink()
    assert run(environment / "bin" / "megatron-collab", "report", "run", cwd=tmp_path) == "run/report.html\n"
    assert report.is_file()
