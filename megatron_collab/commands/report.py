"""Rewrite report.html of a run from the files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_collab.commands import ArgumentParser
from megatron_collab.observability import evaluations, report
from megatron_collab.settings import require


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("report", __doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    folder = parser.parse_args(arguments).run
    is_run = any((folder / name).exists() for name in ("metrics.jsonl", evaluations.FILE))
    require(is_run, f"{folder}: has no metrics.jsonl or {evaluations.FILE}; give the folder of a run")
    print(report.write(folder))
    return 0
