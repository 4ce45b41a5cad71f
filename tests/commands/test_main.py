"""The program `megatron-collab`: its commands, and how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab import __version__
from megatron_collab.commands import __main__ as program
from megatron_collab.runtime.files import COMPILE_CACHE

TOOL = Path(__file__).resolve().parents[2] / "tools" / "convert_ckpt.py"


def run(*arguments: str, setup: str = "") -> subprocess.CompletedProcess[str]:
    """The program in a process that also prints, last, which heavy libraries it has imported."""
    code = f"import sys\n{setup}\nfrom megatron_collab.commands.__main__ import main\ncode = main()\n"
    code += "print(sorted({'torch', 'hydra'} & sys.modules.keys()))\nsys.exit(code)"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.processes
def test_help_and_version_answer_without_anything_heavy() -> None:
    shown = run("--help")
    assert shown.returncode == 0 and shown.stderr == ""
    first, *commands, _, heavy = shown.stdout.splitlines()
    assert first.startswith("usage: megatron-collab") and heavy == "[]"
    assert [line.split()[0] for line in commands] == list(program.COMMANDS)
    assert run().stdout == shown.stdout
    assert run("--version").stdout == f"megatron-collab {__version__}\n[]\n"


def test_a_command_compiles_into_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder = COMPILE_CACHE
    monkeypatch.delenv(name)
    assert program.run("nothing", []) == 2
    assert os.environ[name] == folder


@pytest.mark.parametrize("command", [name for name in program.COMMANDS if name not in program.PROGRAMS])
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-collab", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: megatron-collab {command} ")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "train")) for name in program.PROGRAMS]
)
def test_what_torchrun_runs_is_a_program_of_its_own(name: str) -> None:
    """In a process of its own, whose exit code is that of the program."""
    done = run(name, *(["booking"] if name == "reproduce" else ["experiment=booking"]), "parallel.pq=3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("megatron-collab: ") and done.stderr.count("\n") == 1
    assert "parallel.pq" in done.stderr


@pytest.mark.processes
def test_a_library_that_is_not_installed_is_one_line() -> None:
    """As after an installation without one of the extras."""
    done = run("doctor", setup="sys.modules['hydra'] = None")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "megatron-collab: hydra is not installed; install the extra cpu or gpu" in done.stderr


def test_a_report_needs_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-collab", "report", str(tmp_path)])
    assert program.main() == 2
    message = f"{tmp_path}: has no metrics.jsonl or evaluations.json; give the folder of a run"
    assert capsys.readouterr().err == f"megatron-collab: {message}\n"


@pytest.mark.processes
def test_the_checkpoint_converter_of_a_checkout_runs_in_any_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: megatron-collab convert "), done.stderr
