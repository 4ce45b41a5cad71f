"""Temporary folders are removed by their process, or by the next start after a SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.runtime.files import ScratchFolder

MAKES = """
import sys
from megatron_collab.runtime.files import ScratchFolder
print(ScratchFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_the_folder_is_removed_with_its_contents(root: Path) -> None:
    with ScratchFolder() as folder:
        assert folder.parent == root and folder.stat().st_mode & 0o777 == 0o700
        (folder / "deeper").mkdir()
        (folder / "deeper" / "file").touch()
    assert not list(root.iterdir())


def test_the_folder_can_be_removed_twice(root: Path) -> None:
    scratch = ScratchFolder()
    scratch.remove()
    scratch.remove()
    assert not list(root.iterdir())


@pytest.mark.processes
def test_the_next_start_removes_only_the_folder_of_a_killed_process(root: Path) -> None:
    (root / "mgcollab-file").touch()  # not a scratch folder
    process = subprocess.Popen([sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "file").touch()
        with ScratchFolder():
            assert (theirs / "file").exists(), "its process lives"
    finally:
        process.kill()
        process.wait()
    assert (theirs / "file").exists()
    with ScratchFolder():
        assert not theirs.exists()
    assert [entry.name for entry in root.iterdir()] == ["mgcollab-file"]


def test_the_folder_is_elsewhere_if_socket_paths_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 8)))
    with ScratchFolder() as folder:
        assert folder.parent == Path("/tmp")


def test_a_nested_folder_is_created_beside_the_outer_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its path would grow, and the next start would not find it after a SIGKILL."""
    with ScratchFolder() as launcher:
        monkeypatch.setattr(tempfile, "tempdir", str(launcher))
        with ScratchFolder() as folder:
            assert folder.parent == root
    assert not list(root.iterdir())
