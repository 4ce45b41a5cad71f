"""The judge check: what people said about recorded conversations, beside a judge's scores of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_collab.observability import ratings, transcripts
from megatron_collab.observability.conversations import TRAINING, rows_of_part
from megatron_collab.observability.ratings import RatedSide, Rating
from megatron_collab.observability.records import number
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError, require
from megatron_collab.view import agreement
from megatron_collab.view.agreement import Figure, Labeled, Preference
from megatron_collab.view.comparison import Side
from megatron_collab.view.labels import Label
from megatron_collab.view.runs import RunView, interval

RATINGS, LABELS = SOURCES = ("ratings", "labels")
MOST_DISAGREEMENTS = 20  # conversations in an answer
_MOST_VERSIONS, _LONGEST_VERSION = 20, 200  # of a judge in an answer; characters


class _Conversation(NamedTuple):
    """A row of a transcript as far as the check reads it, and its place: of its group, and of itself in the group."""

    row: Mapping[str, Any]
    position: int
    number: int

    @property
    def length(self) -> int:
        """Characters that the assistant wrote."""
        return sum(len(str(of.get("content"))) for of in self.row["messages"] if of.get("role") == "assistant")

    def score(self, metric: str) -> float | None:
        return number(self.row["scores"].get(metric))

    def judgment(self, metric: str) -> Mapping[str, Any]:
        judgments = self.row.get("judgments")
        judgment = judgments.get(metric) if isinstance(judgments, dict) else None
        return judgment if isinstance(judgment, dict) else {}


class _Pair(NamedTuple):
    """A rating, its sides as the page names them, and their conversations."""

    rating: Rating
    sides: Sequence[str]
    conversations: Sequence[_Conversation]


class _Labeling(NamedTuple):
    """A label and its conversation."""

    label: Label
    conversation: _Conversation


def judge_check(runs: Sequence[RunView], number_of_run: int, source: str, metric: str) -> dict[str, Any]:
    """How far the judge of a metric agrees with people about conversations of a run, from one of SOURCES.

    `source` and `metric` may be empty: the first source with labels; the first metric with a judge, of those that
    labels are about. Raises ConfigError if there is no such source.
    """
    run = runs[number_of_run]
    rated = ratings.first_ratings(ratings.read(run.folder))
    counts = {RATINGS: len(rated), LABELS: len(run.labels)}
    message = f"source={one_line(source, 80)}: give one of {', '.join(SOURCES)}"
    require(source in ("", *SOURCES), message)
    chosen = source or next((name for name in SOURCES if counts[name]), RATINGS)
    omitted = Counter[str]()
    pairs = [*_pairs(runs, run, rated, omitted)] if chosen == RATINGS else []
    labelings = [*_labelings(run, omitted)] if chosen == LABELS else []
    shown = [*(of for pair in pairs for of in pair.conversations), *(of.conversation for of in labelings)]
    metrics = _metrics(shown)
    named = {of.label.metric for of in labelings}
    metric = metric or next((name for name in metrics if name in named or "" in named), next(iter(metrics), ""))
    scored = [pair for pair in pairs if all(of.score(metric) is not None for of in pair.conversations)]
    about = [of for of in labelings if of.label.metric in ("", metric)]
    labeled = [of for of in about if of.conversation.score(metric) is not None]
    omitted["without a score of the metric"] += len(pairs) - len(scored) + len(about) - len(labeled)
    omitted["about another metric"] += len(labelings) - len(about)
    rows = [_labeled(of, metric) for of in labeled]
    bins = agreement.calibration(rows)
    answers = [_preference(pair, metric) for pair in scored]
    return {
        "sources": counts,
        "source": chosen,
        "metrics": [{"name": name, "judged": judged} for name, judged in metrics.items()],
        "metric": metric,
        "omitted": {reason: count for reason, count in omitted.items() if count},
        "versions": _versions(shown, metric),
        "figures": [
            _figure(of) for of in (agreement.of_preferences(answers) if answers else agreement.of_labels(rows))
        ],
        "calibration": {
            "error": agreement.calibration_error(bins),
            "bins": [of_bin._asdict() | {"label": interval(of_bin.label)} for of_bin in bins],
        },
        "disagreements": [*_contested(scored, answers), *_mislabeled(labeled, rows, number_of_run)],
    }


def _pairs(runs: Sequence[RunView], run: RunView, rated: Sequence[Rating], omitted: Counter[str]) -> Iterator[_Pair]:
    """The ratings whose conversations are still there, in runs that are shown; `omitted` counts the others."""
    numbers = {os.path.realpath(shown.folder): at for at, shown in enumerate(runs)}
    folder = os.path.realpath(run.folder)
    tasks: dict[tuple[str, str], set[str]] = {}
    for rating in rated:
        for of in rating.sides:
            tasks.setdefault(of[:2], set()).add(rating.task)
    places = {name: numbers.get(os.path.realpath(os.path.join(folder, name[0]))) for name in tasks}
    rows: dict[tuple[str, str], dict[str, _Conversation]] = {}
    for name, number_of_run in places.items():
        if number_of_run is not None:
            rows[name] = _first(runs[number_of_run], name[1], tasks[name])
    for rating in rated:
        if any(places[of[:2]] is None for of in rating.sides):
            omitted["of a run that is not shown here"] += 1
            continue
        conversations = [rows[of[:2]].get(rating.task) for of in rating.sides]
        matching = [
            of for of, rated_side in zip(conversations, rating.sides, strict=True) if of and _is(of, rated_side)
        ]
        if len(matching) < 2:
            omitted["of conversations that have been replaced"] += 1
            continue
        yield _Pair(rating, [f"{places[of[:2]]}:{of.part}" for of in rating.sides], matching)


def _first(run: RunView, part: str, tasks: set[str]) -> dict[str, _Conversation]:
    """By task, the first conversation, which is the rated one."""
    rows: dict[str, _Conversation] = {}
    try:
        for row in Side(run, part).rows():
            if row["task"] in tasks:
                rows.setdefault(row["task"], _Conversation(row, 0, 0))
    except LookupError:
        pass
    return rows


def _is(conversation: _Conversation, rated_side: RatedSide) -> bool:
    return ratings.digest(conversation.row["messages"]) == rated_side.digest


def _labelings(run: RunView, omitted: Counter[str]) -> Iterator[_Labeling]:
    """The labels of conversations that the run has; `omitted` counts the others."""
    by_part: dict[str, dict[tuple[str, int, int], list[Label]]] = {}
    for label in run.labels:
        places = by_part.setdefault(label.part, {})
        places.setdefault((label.task, label.rollout, label.future), []).append(label)
    for part, places in by_part.items():
        try:
            groups = transcripts.by_group(rows_of_part(run.folder, part))
            for position, group in enumerate(groups):
                for at, row in enumerate(group):
                    # Of a task that a step plays twice the first group counts.
                    for label in places.pop((row["task"], _place(row, "rollout"), _place(row, "future")), ()):
                        yield _Labeling(label, _Conversation(row, position, at))
        except (ConfigError, OSError, ValueError):  # no file can have such a name, or it is damaged
            pass
        omitted["of conversations that the run does not have"] += sum(map(len, places.values()))


def _place(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    return value if type(value) is int else -1


def _metrics(conversations: Iterable[_Conversation]) -> dict[str, bool]:
    """By metric with scores, whether a judge answered for it; those first."""
    metrics: dict[str, bool] = {}
    for of in conversations:
        for name in of.row["scores"]:
            if of.score(name) is not None:
                metrics[name] = metrics.get(name, False) or bool(of.judgment(name).get("answer"))
    return dict(sorted(metrics.items(), key=lambda item: not item[1]))


def _versions(conversations: Iterable[_Conversation], metric: str) -> list[tuple[str, int]]:
    """The versions of the judge that answered, with the number of conversations."""
    counts = Counter[str]()
    for of in conversations:
        versions = of.judgment(metric).get("versions")
        if isinstance(versions, list):
            counts.update(one_line(str(version), _LONGEST_VERSION) for version in versions)
    return counts.most_common(_MOST_VERSIONS)


def _scores(pair: _Pair, metric: str) -> tuple[float, float]:
    a, b = (of.score(metric) for of in pair.conversations)
    assert a is not None and b is not None
    return a, b


def _preference(pair: _Pair, metric: str) -> Preference:
    rating, (a, b) = pair.rating, pair.conversations
    lengths = a.length, b.length
    return Preference(rating.task, rating.verdict, rating.shown_left, _scores(pair, metric), lengths)


def _labeled(of: _Labeling, metric: str) -> Labeled:
    score = of.conversation.score(metric)
    assert score is not None
    return Labeled(of.label.task, of.label.label, score, of.conversation.length)


def _figure(figure: Figure) -> dict[str, Any]:
    return {"name": figure.name, **interval(figure.estimate), "count": figure.count, "tasks": figure.tasks}


def _contested(pairs: Sequence[_Pair], answers: Sequence[Preference]) -> Iterator[dict[str, Any]]:
    """The pairs about which judge and rater disagree, by how far apart the scores are."""
    gaps = [abs(of.scores[0] - of.scores[1]) if of.verdict != of.judged else -1.0 for of in answers]
    for at in _greatest(gaps, lambda gap: gap >= 0):
        pair, answer = pairs[at], answers[at]
        yield {
            "task": answer.task,
            "sides": pair.sides,
            "rater": pair.rating.rater,
            "people": answer.verdict,
            "scores": answer.scores,
            "gap": gaps[at],
        }


def _mislabeled(
    labelings: Sequence[_Labeling], rows: Sequence[Labeled], number_of_run: int
) -> Iterator[dict[str, Any]]:
    """The conversations whose label and score are farthest apart."""
    gaps = agreement.disagreements(rows).tolist() if rows else []
    for at in _greatest(gaps, lambda gap: gap > 0):
        label, (_, position, place) = labelings[at]
        is_step = label.part.startswith(TRAINING)
        yield {
            "task": label.task,
            "run": number_of_run,
            "part": label.part,
            **({"step": int(label.part.removeprefix(TRAINING)), "position": position} if is_step else {}),
            "rollout": label.rollout,
            "future": label.future,
            "number": place,
            "rater": label.rater,
            "people": label.label,
            "scores": [rows[at].score],
            "gap": gaps[at],
        }


def _greatest(gaps: Sequence[float], is_shown: Callable[[float], bool]) -> list[int]:
    """The places of the greatest gaps that are shown, in descending order."""
    places = sorted(range(len(gaps)), key=lambda at: -gaps[at])
    return [at for at in places if is_shown(gaps[at])][:MOST_DISAGREEMENTS]
