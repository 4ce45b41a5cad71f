"""The blind test of a comparison: ratings are written to the run at the right, and what they say so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from itertools import combinations
from typing import Any

from megatron_collab.observability import ratings
from megatron_collab.observability.ratings import FIRST, SECOND, SKIP, TIE, VERDICTS, RatedSide, Rating
from megatron_collab.observability.records import number, parsed
from megatron_collab.observability.transcripts import Row
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import require
from megatron_collab.statistics import kappa, share_at_any_time, sign_evidence
from megatron_collab.view.comparison import Side, side
from megatron_collab.view.runs import RunView, interval

LONGEST_NAME = 80  # characters of a rater's name
_FIELDS = (FIRST, SECOND, "task", "rater", "shown_left", "verdict")
_EVIDENCE = 20  # times as likely: a side is called better, wrongly in at most one of as many tests


def rate(runs: Sequence[RunView], body: bytes) -> dict[str, Any]:
    """Write the rating that `body` has as JSON.

    Raises ConfigError if it is malformed or cannot be written, LookupError if its sides or its task are not there.
    """
    row = parsed(body.decode(errors="replace"))
    require(row is not None and set(row) == set(_FIELDS), f"a rating has {', '.join(_FIELDS)} and nothing else")
    assert row is not None
    require(all(isinstance(value, str) for value in row.values()), "all of a rating are texts")
    rater = row["rater"].strip()
    require(0 < len(rater) <= LONGEST_NAME and rater.isprintable(), f"rater: give a name, of at most {LONGEST_NAME}")
    require(row["shown_left"] in (FIRST, SECOND), f"shown_left: give {FIRST} or {SECOND}")
    require(row["verdict"] in VERDICTS, f"verdict: give one of {', '.join(VERDICTS)}")
    sides = [side(runs, name, row[name]) for name in (FIRST, SECOND)]
    answers = [of.conversations(row["task"]) for of in sides]
    task, folder = answers[0]["task"], sides[1].run.folder
    a, b = (
        RatedSide(ratings.path_of(of.run.folder, folder), of.part, ratings.digest(answer["rows"][0]["messages"]))
        for of, answer in zip(sides, answers, strict=True)
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    ratings.append(folder, Rating(now, rater, task, (a, b), row["shown_left"], row["verdict"]))
    return {}


def result(first: Side, second: Side) -> dict[str, Any]:
    """What was rated, and what it says about `second` (at the right) against `first`.

    The first verdict about a task counts, whoever rates it later; ties say nothing of the better
    side. Ratings of conversations that an evaluation has replaced are left out (`outdated`). `agreement` has Cohen's
    kappa of every two raters, and of verdicts and the sign of a metric's difference.
    """
    recorded = _recorded(first, second)
    shown = [_first_rows(of, {rating.task for rating in recorded}) for of in (first, second)]
    rated = [rating for rating in recorded if _is_of(rating, shown)]
    verdicts = ratings.first_verdicts(rated)
    counted = {task: next(iter(by_rater.values())) for task, by_rater in verdicts.items()}
    wins, losses, ties = ([*counted.values()].count(verdict) for verdict in (SECOND, FIRST, TIE))
    evidence = sign_evidence(wins, losses)
    return {
        "rated": [{"rater": rating.rater, "task": rating.task} for rating in rated],
        "outdated": len(recorded) - len(rated),
        "skipped": sum(rating.verdict == SKIP for rating in rated),
        "wins": wins,
        "ties": ties,
        "losses": losses,
        "share": interval(share_at_any_time(wins, losses)),
        "evidence": evidence,
        "decided": evidence >= _EVIDENCE,
        "agreement": [*_of_raters(verdicts), *_of_metrics(counted, shown)],
    }


def _recorded(first: Side, second: Side) -> list[Rating]:
    """The ratings of the comparison in the folders of both runs, by time."""
    recorded = list[Rating]()
    for folder in dict.fromkeys(of.run.folder for of in (first, second)):
        sides = [(ratings.path_of(of.run.folder, folder), of.part) for of in (first, second)]
        recorded += ratings.between(ratings.read(folder), sides)
    return sorted(recorded, key=lambda rating: rating.time)


def _of_raters(verdicts: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(rater for by_rater in verdicts.values() for rater in by_rater)
    for a, b in combinations(names, 2):
        yield from _agreement(f"{a} and {b}", [(of[a], of[b]) for of in verdicts.values() if a in of and b in of])


def _of_metrics(verdicts: Mapping[str, str], shown: Sequence[Mapping[str, Row]]) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(name for task in verdicts for name in shown[0][task]["scores"])
    for name in names:
        pairs = []
        for task, verdict in verdicts.items():
            a, b = (number(of_side[task]["scores"].get(name)) for of_side in shown)
            if a is not None and b is not None:
                pairs.append((verdict, SECOND if b > a else FIRST if b < a else TIE))
        yield from _agreement(f"verdicts and {one_line(name, 80)}", pairs)


def _first_rows(of: Side, tasks: Set[str]) -> dict[str, Row]:
    """By task, the first conversation of a side, which is the one that is rated."""
    rows: dict[str, Row] = {}
    for row in of.rows() if tasks else ():
        if row["task"] in tasks:
            rows.setdefault(row["task"], row)
    return rows


def _is_of(rating: Rating, shown: Sequence[Mapping[str, Row]]) -> bool:
    rows = [of_side.get(rating.task) for of_side in shown]
    digests = [row and ratings.digest(row["messages"]) for row in rows]
    return digests == [rated_side.digest for rated_side in rating.sides]


def _agreement(name: str, pairs: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    if pairs:
        yield {"name": name, "kappa": kappa(pairs), "tasks": len(pairs)}
