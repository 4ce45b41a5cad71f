"""A run with a judge's scores, ratings of a blind test and labels of a file, which agree with the judge in part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.observability import evaluations, folder, ratings, transcripts
from megatron_collab.observability.ratings import FIRST, SECOND, TIE, RatedSide, Rating
from megatron_collab.view.labels import Label
from tests.view import recorded_runs

Row = dict[str, Any]
TASKS, ROLLOUTS = 24, 2
OLD, NEW = "judge-1", "judge-2"
SIDES = ("before", "after")


@dataclass(frozen=True)
class Names:
    """What a run calls its judged metric, the beginning of its tasks, the judge's later version and the rater."""

    metric: str = "polite"
    task: str = "t"
    version: str = NEW
    rater: str = "Ada"


NAMES = Names()


def groups(seed: int, names: Names = NAMES) -> list[list[Row]]:
    """Tasks, of which half were judged by the later version; a longer reply has a higher score."""
    chance = random.Random(seed)
    of_tasks = []
    for at in range(TASKS):
        lengths = [chance.randint(1, 100) for _ in range(ROLLOUTS)]
        scores = [min(1.0, length / 150 + 0.3 * chance.random()) for length in lengths]
        version = (OLD, names.version)[at % 2]
        of_tasks.append(
            [
                row(f"{names.task}{at}", rollout, length, score, names.metric, version)
                for rollout, (length, score) in enumerate(zip(lengths, scores, strict=True))
            ]
        )
    return of_tasks


def row(task: str, rollout: int, length: int, score: float, metric: str, version: str) -> Row:
    """A conversation whose reply has `length` letters, with a judged score and one without a judge."""
    return {
        "task": task,
        "rollout": rollout,
        "future": 0,
        "reward": score,
        "ending": "user_done",
        "error": "",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * length}],
        "scores": {"tokens": float(length), metric: score},
        "judgments": {metric: {"reason": "as it is", "answer": f"{score}", "versions": [version]}},
    }


def write_run(run: Path, names: Names = NAMES) -> None:
    """A finished run: two evaluations, a step of training, and a rating of each task but the last."""
    run.mkdir(parents=True)
    folder.replace(run / evaluations.FILE, {part: {"step": at, "set": ""} for at, part in enumerate(SIDES)})
    by_side = [groups(seed, names) for seed in range(2)]
    for part, of_side in zip(SIDES, by_side, strict=True):
        transcripts.write(evaluations.file_of(run, part), of_side)
    transcripts.write_step(run, 3, groups(2, names))
    folder.append(run / "metrics.jsonl", [{"step": 3, "reward": 0.5}])
    recorded_runs.finish(run)  # so that the page asks for no further steps
    for at in range(TASKS - 1):
        rows = [of_side[at][0] for of_side in by_side]
        write_rating(run, rows, (FIRST, SECOND, TIE)[at % 3], (FIRST, SECOND)[at % 2], rater=names.rater)


def write_rating(run: Path, rows: list[Row], verdict: str, shown: str, path: str = ".", rater: str = "Ada") -> None:
    """A rating of two conversations, of which the sides are those of the run at `path`."""
    a, b = (RatedSide(path, part, ratings.digest(of["messages"])) for part, of in zip(SIDES, rows, strict=True))
    ratings.append(run, Rating("2026-01-01", rater, rows[0]["task"], (a, b), shown, verdict))


def labels(yes_or_no: bool = True, names: Names = NAMES) -> Iterator[Label]:
    """Of the conversations of step 3: yes if they are short, or their length."""
    for group in groups(2, names):
        for of in group:
            length = len(of["messages"][1]["content"])
            label = float(length < 50) if yes_or_no else length / 100
            yield Label("training/3", of["task"], of["rollout"], 0, label, names.rater, "")
