"""Pictures of the page: taken of any run, and those in the docs are those that the script takes."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.view import recorded_runs
from tests.view.browser import CHROMIUM
from tools import screenshots

ROOT = Path(screenshots.__file__).parents[1]
NAMES = {f"view_{name}.png" for name in screenshots.VIEWS}


def test_the_docs_show_what_the_script_takes() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"figures/(view_\w+\.png)", page.read_text())}
    assert shown == NAMES == {file.name for file in screenshots.FOLDER.glob("view_*.png")}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tools/setup_browser.sh installs it")
def test_pictures_of_a_run(tmp_path: Path) -> None:
    recorded_runs.write_run(tmp_path / "run", 7)
    recorded_runs.finish(tmp_path / "run")
    script = [sys.executable, screenshots.__file__, str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    subprocess.run(script, check=True, timeout=200, cwd=ROOT)
    assert {file.name for file in (tmp_path / "out").iterdir()} == NAMES
    sizes = [struct.unpack(">2I", file.read_bytes()[16:24]) for file in (tmp_path / "out").iterdir()]
    assert sizes == [tuple(screenshots.SIZE.values())] * len(NAMES)
