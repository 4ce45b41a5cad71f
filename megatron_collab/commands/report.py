"""Make report.html of a run again: `python tools/report.py RUN`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_collab.observability import report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    folder = parser.parse_args().run
    if not (folder / "metrics.jsonl").exists():
        print(f"{folder}: no metrics.jsonl there; give the folder of a run", file=sys.stderr)
        return 2
    print(report.write(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
