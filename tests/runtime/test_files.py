from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_collab.runtime import files
from megatron_collab.runtime.process import RunStopped

WRITER = """
import json, sys
from pathlib import Path
from megatron_collab.runtime import files
file, n = Path(sys.argv[1]), 0
while True:
    files.replace(file, json.dumps([n] * 50_000))
    n += 1
"""


@pytest.mark.processes
def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "spend.json"
    files.replace(file, "[]")
    for kill in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)])
        before = file.stat().st_ino
        while file.stat().st_ino == before:
            time.sleep(0.001)
        time.sleep(0.0013 * kill)
        writer.kill()
        writer.wait()
        assert len(set(json.loads(file.read_text()))) == 1


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "spend.json"
    files.replace(file, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            RunStopped, match=rf"^{file}: cannot be written: File too large; free space there; "
        ) as stopped:
            files.replace(file, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(stopped.value) and file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file], "a draft would keep the disk full"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "spend.json"
    files.replace(file, "old")
    with pytest.raises(UnicodeEncodeError):
        files.replace(file, "new \ud800")  # fails in the middle of writing
    assert file.read_text() == "old"


def test_only_a_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {"pipe": "a named pipe", "socket": "a socket"}
        for name, kind in kinds.items():
            with pytest.raises(ValueError, match=f"{name}: is {kind}, not a file; write its content to a file"):
                files.read_text(tmp_path / name)
    for device in ("/dev/zero", "/dev/null", "/dev/stdin"):
        if not Path(device).resolve().is_file():
            assert files.irregular(Path(device))
    (tmp_path / "pointer").write_text("version https://git-lfs.example/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ValueError, match="pointer: is a pointer of Git LFS, without the content; get it with git lfs"):
        files.read_text(tmp_path / "pointer")
    (tmp_path / "text").write_bytes(b"a\r\nb\xc3\xa4")
    (tmp_path / "link").symlink_to("text")
    assert files.read_text(tmp_path / "link", 6) == "a\nbä"
    with pytest.raises(ValueError, match="text: has more than 5 bytes; give a shorter one"):
        files.read_text(tmp_path / "text", 5)
