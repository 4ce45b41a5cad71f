"""Takes docs/figures/view_*.png of a run as `megatron-collab view` shows it: `python tools/screenshots.py RUN`.

RUN is the folder of a finished run with evaluations before and after, such as runs/quickstart/rl. It needs
Chromium (tools/setup_browser.sh).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
SIZE: Any = {"width": 1280, "height": 800}  # pixels
SECONDS = 60  # for anything that the page does
# By picture: the address after #, and what has to be there.
VIEWS = {
    "overview": ("overview", "#overview .chart"),
    "conversations": ("conversations?sort=advantage&descending=1", "#conversations .turn.chosen"),
    "compare": ("compare", "#compare .pair .scores"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures [docs/figures]")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, "-m", "megatron_collab.commands", "view", str(options.run)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address.startswith("http"):
            sys.exit(f"screenshots: {options.run} cannot be viewed")
        with sync_playwright() as library:
            chromium = library.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            with closing(chromium):
                page = chromium.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
                page.set_default_timeout(1000 * SECONDS)
                page.goto(address)
                for name, (place, content) in VIEWS.items():
                    page.goto(f"{page.url.partition('#')[0]}#{place}")
                    page.locator(content).first.wait_for()
                    page.screenshot(path=options.out / f"view_{name}.png", animations="disabled")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
