"""Reproduce a published comparison: train and evaluate each assistant of STUDY.

    megatron-collab reproduce collabllm --tasks math --budget 300

STUDY is one of those below, or your own FILE.yaml. Every program has its own folder in --out. If the study is
interrupted, the same command continues it. page.md in --out has the results. Settings
(option=value) apply to every program, for example llm.max_concurrent=64.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_collab.commands import EXIT_BAD_INPUT, ArgumentParser, positive
from megatron_collab.reproduce import plan, run, study
from megatron_collab.runtime import console
from megatron_collab.settings import WRITTEN_FOLDER, ConfigError, check_path, require

logger = logging.getLogger("megatron_collab")  # __name__ is __main__ if this module is the program


def main(arguments: Sequence[str]) -> int:
    console.begin()
    options = _parse(arguments)
    try:
        require(options.seeds >= 1, f"--seeds={options.seeds}: must be 1 or more")
        train_seeds = options.train_seeds
        require(train_seeds is None or train_seeds >= 1, f"--train-seeds={train_seeds}: must be 1 or more")
        first_seed = options.first_seed
        require(first_seed is None or first_seed >= 0, f"--first-seed={first_seed}: must be 0 or more")
        require(options.jobs >= 1, f"--jobs={options.jobs}: must be 1 or more")
        message = f"--jobs={options.jobs}: each program gets all that is left of --budget; leave one of them out"
        require(options.jobs == 1 or options.budget is None, message)
        require(options.pilot >= 0, f"--pilot={options.pilot}: must be 0 or more")
        require(options.replay is None or options.replay.is_dir(), f"--replay={options.replay}: no such folder")
        definition = study.read(options.study)
        if first_seed is not None:
            definition = replace(definition, first_seed=first_seed)
        study_options = plan.StudyOptions(
            options.out or Path("runs") / definition.name,
            study.select(options.tasks, definition.tasks, "--tasks"),
            study.select(options.arms, definition.arms, "--arms"),
            options.model or definition.model,
            options.seeds,
            train_seeds or definition.train_seeds,
            options.build,
            options.pilot,
            options.record,
            options.replay,
            tuple(options.settings),
        )
        for name in ("out", "record"):
            if folder := getattr(options, name):
                check_path(f"--{name}", folder, WRITTEN_FOLDER)
        stages = plan.stages(definition, study_options)
        if options.commands:
            print("\n".join(run.shell_command(stage) for stage in stages))
            return 0
        return run.run(definition, study_options, stages, options.budget, options.jobs)
    except (ConfigError, OSError) as error:
        logger.error(str(error))
        return EXIT_BAD_INPUT


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser("reproduce", __doc__)
    parser.add_argument("study", metavar="STUDY", help=f"one of {', '.join(study.known())}, or FILE.yaml")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of the study [all]")
    parser.add_argument("--arms", metavar="A,B", help="arms to compare; arms they start from are trained too [all]")
    parser.add_argument("--model", help="base model of all arms [the study's]")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of each problem [3]")
    parser.add_argument("--train-seeds", type=int, metavar="N", help="trainings of each arm [the study's]")
    parser.add_argument("--first-seed", type=int, metavar="N", help="seed of the first training [the study's]")
    parser.add_argument(
        "--jobs", type=int, default=1, help="programs at once, each after those whose output it reads [1]"
    )
    parser.add_argument("--build", action="store_true", help="build the training data instead of using published data")
    parser.add_argument("--out", type=Path, help="folder of the study [runs/STUDY]")
    parser.add_argument("--budget", type=positive, metavar="USD", help="stop once total spending reaches this")
    parser.add_argument(
        "--pilot", type=int, default=4, help="conversations per task for the cost forecast; 0: no forecast [4]"
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record all calls to language models in FOLDER")
    parser.add_argument(
        "--replay", type=Path, metavar="FOLDER", help="answer calls from this recording: no key, no network, no cost"
    )
    parser.add_argument("--commands", action="store_true", help="print the commands without running them")
    parser.add_argument("settings", nargs="*", metavar="option=value", help="settings of every program")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
