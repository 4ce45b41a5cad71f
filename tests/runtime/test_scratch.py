"""Temporary folders end with their process: by it, or by the next one after a SIGKILL."""

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


def test_it_is_removed_with_all_that_is_in_it(root: Path) -> None:
    with ScratchFolder() as folder:
        assert folder.parent == root and folder.stat().st_mode & 0o777 == 0o700
        (folder / "deeper").mkdir()
        (folder / "deeper" / "file").touch()
    assert not list(root.iterdir())


def test_it_can_be_removed_twice(root: Path) -> None:
    scratch = ScratchFolder()
    scratch.remove()
    scratch.remove()
    assert not list(root.iterdir())


@pytest.mark.processes
def test_the_next_start_removes_that_of_a_process_that_was_killed_and_no_other(root: Path) -> None:
    (root / "mgcollab-file").touch()  # not ours
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
    assert [left.name for left in root.iterdir()] == ["mgcollab-file"]


def test_where_sockets_would_have_too_long_a_path_it_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 8)))
    with ScratchFolder() as folder:
        assert folder.parent == Path("/tmp")


def test_one_of_a_process_whose_temporary_folder_is_one_lies_beside_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its path would grow, and the next start would not find it after a SIGKILL."""
    with ScratchFolder() as launcher:
        monkeypatch.setattr(tempfile, "tempdir", str(launcher))
        with ScratchFolder() as folder:
            assert folder.parent == root
    assert not list(root.iterdir())
