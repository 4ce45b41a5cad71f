"""Write the transcripts of a run as lines of JSON, a future a line.

    megatron-collab export RUN [--step N | --evaluation NAME | --ratings] [--out FILE.jsonl]

Without --step, --evaluation or --ratings: the futures of all steps, in order. Without --out: to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from megatron_collab.commands import ArgumentParser
from megatron_collab.data.pairs import pair
from megatron_collab.observability import evaluations, ratings, transcripts
from megatron_collab.observability.transcripts import Row
from megatron_collab.runtime import screen
from megatron_collab.runtime.files import draft_of, irregular
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import WRITTEN_FILE, check_path, require

_MOST_FAULTS = 5  # in a warning


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("export", __doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--jsonl", action="store_true", help="as lines of JSON, which is the only format")
    parser.add_argument("--step", type=int, help="step of training [all]")
    parser.add_argument("--evaluation", metavar="NAME", help="instead of steps: before, after, SET/step_20, …")
    help_text = (
        "instead of futures: pairs for train.stage=dpo, of the conversations that raters of a blind test preferred"
    )
    parser.add_argument("--ratings", action="store_true", help=help_text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write [standard output]")
    options = parser.parse_args(arguments)
    number = sum([options.step is not None, options.evaluation is not None, options.ratings])
    require(number <= 1, "--step, --evaluation and --ratings: give one of them")
    if options.out:
        check_path("--out", options.out, WRITTEN_FILE)
    rows = iter(_pairs(options.run) if options.ratings else _rows(options.run, options.step, options.evaluation))
    first = next(rows, None)
    lacking = "ratings from which a pair can be made" if options.ratings else f"transcripts {_label(options)}"
    require(first is not None, f"{options.run}: has no {lacking}; give the folder of a run")
    lines = (json.dumps(row).encode() + b"\n" for row in chain([first], rows))  # keys were redacted when it was written
    if options.out:
        file = options.out.resolve()  # a link's target, which stays a link
        fault = irregular(file) if file.exists() else ""
        require(not fault, f"--out={options.out}: {fault}")
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(file) as draft, screen.phase(f"writing {file.name}"):
            draft.writelines(lines)
        return 0
    # Not through sys.stdout, which drops what cannot be written: a full disk must not look like the end of the run.
    with suppress(BrokenPipeError), open(sys.stdout.fileno(), "wb", closefd=False) as stream:  # head has its lines
        stream.writelines(lines)
    return 0


def _label(options: argparse.Namespace) -> str:
    if options.evaluation:
        return f"of evaluation {options.evaluation}"
    return "of futures" if options.step is None else f"of step {options.step}"


def _pairs(run: Path) -> Iterator[Row]:
    """The pairs of raters that train.stage=dpo can read; how many others there are is printed in the end.

    Raises ConfigError if there are only others.
    """
    number, faults = 0, Counter[str]()
    for row, fault in ratings.rated_pairs(run):
        fault = fault or _fault(row)
        faults.update([fault] if fault else [])
        if not fault:
            number += 1
            yield row
    if faults:
        counts = "; ".join(f"{count} {fault}" for fault, count in faults.most_common(_MOST_FAULTS))
        message = f"{faults.total()} rated pairs cannot be trained on: {counts}"
        message += "; …" if len(faults) > _MOST_FAULTS else ""
        require(number > 0, f"{run}: {message}")
        print(message, file=sys.stderr)


def _fault(row: Row) -> str:
    """Why the row is no pair to train on; empty if it is."""
    try:
        pair(row)
    except ValueError as error:
        return one_line(str(error))
    return ""


def _rows(run: Path, step: int | None, evaluation: str | None) -> Iterable[Row]:
    if evaluation is None:
        return transcripts.run_rows(run, step)
    known = evaluations.read(run)
    choices = f"it has {', '.join(known) or 'none'}"
    require(evaluation in known, f"--evaluation={evaluation}: not in {run / evaluations.FILE}; {choices}")
    return filter(None, transcripts.rows_of_file(evaluations.file_of(run, evaluation)))
