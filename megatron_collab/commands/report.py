"""Rewrite report.html of a run from the files in its folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_collab.config import ArgumentParser
from megatron_collab.observability import report
from megatron_collab.runtime.process import EXIT_BAD_INPUT


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("megatron-collab report", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    folder = parser.parse_args(arguments).run
    if not (folder / "metrics.jsonl").exists():
        print(f"megatron-collab: {folder}: has no metrics.jsonl; give the folder of a run", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(report.write(folder))
    return 0
