"""What the index selects, sorts and opens equals what the rows themselves say."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.observability import evaluations, transcript_index, transcripts
from megatron_collab.observability.transcript_index import FuturePlace, Index, Query
from megatron_collab.settings import ConfigError
from tests.observability.test_transcripts import ODD, group, old_lines, row

Rows = list[dict[str, Any]]
WORDS = ("alpha", "beta", "alphabet", "Straße", "naïve", "東京都", "gamma_2", "x" * 150)


def random_group(task: str, rng: random.Random) -> Rows:
    return [
        row(
            task,
            rollout,
            future,
            text=" ".join(rng.choices(WORDS, k=2)),
            reward=rng.choice([None, round(rng.uniform(-1, 1), 2)]),
            ending=rng.choice(["user_done", "length", None]),
            scores={"right": rng.choice([0.0, 0.5, 1.0]), **({"rare": 2.0} if rng.random() < 0.1 else {})},
        )
        for rollout in range(rng.randint(1, 3))
        for future in range(rng.randint(1, 3))
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of steps 0 to 3, the first two written by an earlier version; step 3 has several row groups."""
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(0)
    old_lines(folder, 0, 1, tail='{"step": 1, "task": 7}\n{"step": 1, "torn')
    transcripts.write_step(folder, 2, [random_group(f"task-{number % 20}", rng) for number in range(40)])
    transcripts.write_step(folder, 3, [random_group(f"task-{number}", rng) for number in range(300)])
    return folder


@pytest.fixture(scope="module")
def rows(run: Path) -> Rows:
    return [dict(future) for future in transcripts.run_rows(run) if "messages" in future]


def within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, float) and low <= value <= high


def has_words(rows: Rows, *words: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a future's group has words that contain these; groups of equal step and task are told apart by place."""
    matching = set[int]()
    for of_group in transcripts.by_group(rows):
        known = [word for future in of_group for text in texts(future) for word in transcripts.words_of(text)]
        if all(any(part in word for word in known) for part in words):
            matching |= {id(future) for future in of_group}
    return lambda future: id(future) in matching


def texts(future: Any) -> list[str]:
    reasons = [score["missing"] for score in future["scores"].values() if isinstance(score, dict)]
    return [*(message["content"] for message in future["messages"]), *reasons]


QUERIES: dict[str, tuple[Query, Callable[[Rows], Callable[[dict[str, Any]], Any]]]] = {
    "all": (Query(), lambda rows: lambda future: True),
    "steps": (Query(steps=(1, 2)), lambda rows: lambda future: 1 <= future["step"] <= 2),
    "task": (Query(task="sk-1"), lambda rows: lambda future: "sk-1" in future["task"]),
    "ending": (Query(ending="length"), lambda rows: lambda future: future["ending"] == "length"),
    "no such ending": (Query(ending="bored"), lambda rows: lambda future: False),
    "reward": (Query(reward=(-0.5, 0.2)), lambda rows: lambda future: within(future["reward"], -0.5001, 0.2001)),
    "score": (Query(scores={"right": (0.5, 1)}), lambda rows: lambda future: within(future["scores"]["right"], 0.5, 1)),
    "rare": (Query(scores={"rare": (0, 3)}), lambda rows: lambda future: "rare" in future["scores"]),
    "no such score": (Query(scores={"none": (0, 3)}), lambda rows: lambda future: False),
    "a word": (Query(words="ALPHA"), lambda rows: has_words(rows, "alpha")),
    "words": (Query(words="beta, straß"), lambda rows: has_words(rows, "beta", "straß")),
    "a part of a word": (Query(words="京"), lambda rows: has_words(rows, "京")),
    "a long word": (Query(words="x" * 150), lambda rows: has_words(rows, "x" * 64)),
    "a word of reasons": (Query(words="judge"), lambda rows: has_words(rows, "judge")),
    "no such word": (Query(words="zebra"), lambda rows: lambda future: False),
    "several": (
        Query((2, 3), "task-1", "user_done", (-1, 1), {"right": (1, 1)}, "beta"),
        lambda rows: (
            lambda future: (
                (future["step"] >= 2 and "task-1" in future["task"] and future["ending"] == "user_done")
                and (
                    future["reward"] is not None and future["scores"]["right"] == 1 and has_words(rows, "beta")(future)
                )
            )
        ),
    ),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_selects_what_the_rows_say(run: Path, rows: Rows, name: str) -> None:
    query, matches = QUERIES[name]
    index = Index(run)
    assert len(index) == len(rows)
    selected, is_match = index.select(query), matches(rows)
    assert index.rows(selected) == [future for future in rows if is_match(future)]
    assert len(selected) or name.startswith("no ")


def test_futures_are_sorted_with_missing_values_last(run: Path, rows: Rows) -> None:
    index = Index(run)
    with pytest.raises(KeyError):
        index.sort(index.select(Query()), "score/none")
    for descending in (False, True):
        rewards = [future["reward"] for future in index.rows(index.sort(index.select(Query()), "reward", descending))]
        known = [future["reward"] for future in rows if future["reward"] is not None]
        expected = sorted(known, reverse=descending)
        assert rewards == expected + [None] * (len(rows) - len(known)) and len(known) < len(rows)
        futures = index.sort(index.select(Query()), "reward", descending)
        for count in (0, 1, 50, len(known), len(known) + 1, len(rows), len(rows) + 1):
            first = index.sort(index.select(Query()), "reward", descending, count)
            assert [*first] == [*futures[:count]], "equal ones in the same order"
    by_step = index.rows(index.sort(index.select(Query()), "step", descending=True))
    assert [future["step"] for future in by_step] == sorted((future["step"] for future in rows), reverse=True)
    for column, last in (("task", "t"), ("ending", "\U0010ffff")):
        texts = [future[column] for future in index.rows(index.sort(index.select(Query()), column))]
        assert texts == sorted(texts, key=lambda text: text or last)


@pytest.mark.seconds
def test_futures_are_sorted_by_the_advantage_of_their_rollout(run: Path) -> None:
    """Its reward less the mean over the rollouts of its group that have one."""
    index = Index(run)
    expected, alone = list[float](), 0
    for step, position in sorted({(place.step, place.position) for place in map(index.place, range(len(index)))}):
        group = index.group_rows(step, position)
        rollouts = {future["rollout"]: future for future in reversed(group)}  # the first future of each
        rewards = {number: future["reward"] for number, future in rollouts.items()}
        known = [reward for reward in rewards.values() if reward is not None]
        for future in group:
            if len(rewards) > 1 and (reward := rewards[future["rollout"]]) is not None:
                expected.append(reward - sum(known) / len(known))
            else:
                alone += 1
    futures = index.sort(index.select(Query()), "advantage", descending=True)
    advantages = index._advantages()[futures]
    assert advantages[: len(expected)] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert alone and np.isnan(advantages[len(expected) :]).all() and len(advantages) == len(expected) + alone


def test_a_group_is_opened_by_its_place(run: Path, rows: Rows) -> None:
    index = Index(run)
    groups = [[*transcripts.by_group(future for future in rows if future["step"] == step)] for step in range(4)]
    for step, position in ((0, 0), (1, 0), (2, 39), (3, 0), (3, 63), (3, 64), (3, 299)):
        assert index.group_rows(step, position) == groups[step][position]
    with pytest.raises(LookupError):
        index.group_rows(3, 300)
    for number in (0, 7, len(rows) - 1):
        place = index.place(number)
        assert index.number(place) == number
        assert (place.step, place.rollout, place.future) == tuple(
            rows[number][key] for key in ("step", "rollout", "future")
        )
    assert index.number(FuturePlace(3, 0, 99, 0)) is None and index.number(FuturePlace(9, 0, 0, 0)) is None


def test_new_steps_are_added_and_repeated_ones_replaced(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    index = Index(folder)
    assert not index.refresh()
    before = len(index)
    transcripts.write_step(folder, 4, [group("new", text="zebra", scores={"fresh": 3.0}, ending="deadline")])
    assert index.refresh() and len(index) == before + 6
    assert [*index.select(Query(words="zebra"))] == [*range(before, before + 6)]
    assert [*index.select(Query(scores={"fresh": (3, 3)}, ending="deadline"))] == [*range(before, before + 6)]
    assert len(index.select(Query(words="alpha"))) > 0 and index.group_rows(4, 0)[0]["task"] == "new"
    transcripts.forget(folder, 3)
    transcripts.write_step(folder, 3, [group("again")])
    assert index.refresh() and {future["task"] for future in index.rows(index.select(Query(steps=(3, 9))))} == {"again"}
    assert not len(index.select(Query(words="zebra"))) and len(index) == len([*transcripts.run_rows(folder)]) - 1


def test_an_empty_run_has_no_futures(tmp_path: Path) -> None:
    index = Index(tmp_path)
    assert len(index) == 0 and not len(index.select(Query((0, 1), "t", "length", (0, 1), {"x": (0, 1)}, "word")))
    transcripts.write_step(tmp_path, 0, [[row(ODD, text=ODD, ending=None, reward=None, scores={})]])
    assert index.refresh() and len(index) == 1
    assert (
        [*index.sort(index.select(Query(words="ünï")), "ending")] == [0] == [*index.sort(index.select(Query()), "task")]
    )


def test_after_a_damaged_file_is_restored_no_future_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript_index, "_FILES", 1)
    index = Index(tmp_path)
    for step in (0, 1):
        transcripts.write_step(tmp_path, step, [group()])
    content = transcripts.step_file(tmp_path, 1).read_bytes()
    transcripts.step_file(tmp_path, 1).write_bytes(content[:-20])
    with pytest.raises(ConfigError):
        index.refresh()
    transcripts.step_file(tmp_path, 1).write_bytes(content)
    assert index.refresh() and len(index) == 12


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    transcripts.write_step(tmp_path, 0, [group()])
    file = transcripts.step_file(tmp_path, 0)
    index, content = Index(tmp_path), file.read_bytes()
    file.write_bytes(content[:-20])
    for read in (lambda: Index(tmp_path), lambda: index.group_rows(0, 0)):
        with pytest.raises(ConfigError, match=r"step_000000\.parquet: cannot be read"):
            read()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        index.rows([0])
    assert index.refresh() and len(index) == 0


@pytest.mark.parametrize("is_old", [False, True])
def test_an_evaluation_is_indexed_by_itself(run: Path, tmp_path: Path, is_old: bool) -> None:
    """Its rows have no step: they get that of its record. Earlier versions wrote them as lines."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    groups = [random_group(f"task-{number}", random.Random(number)) for number in range(70)]
    file, old_file = evaluations.files_of(folder, "math/step_20")
    if is_old:
        old_file.write_text("".join(json.dumps(future) + "\n" for rows in groups for future in rows) + '{"torn')
    else:
        transcripts.write(file, groups)
    index = Index(folder, ("math/step_20", 20))
    assert len(index) == sum(map(len, groups)) and {*index.step} == {20}
    assert index.group_rows(20, 66) == groups[66] and index.place(0) == FuturePlace(20, 0, 0, 0)
    assert index.rows(index.select(Query(words="alphabet"))) == [
        future
        for rows in groups
        if any("alphabet" in future["messages"][0]["content"] for future in rows)
        for future in rows
    ]
    transcripts.write(file, groups[:1])
    old_file.unlink(missing_ok=True)
    assert index.refresh() and len(index) == len(groups[0])


def test_a_judge_is_compared_with_the_facts(tmp_path: Path) -> None:
    """Both scores are standardized over the run, and again as it grows; a missing one gives none."""
    scores: list[dict[str, Any]] = [
        {"judged": 0.9, "right": 0.0}, {"judged": 0.5, "right": 1.0}, {"judged": 0.1, "right": 2.0}, {"judged": 0.5},
        {"judged": {"missing": "down"}, "right": 1.0},
    ]  # fmt: skip
    pairs = [("judged", "right"), ("judged", "none")]
    for step in (0, 1):
        transcripts.write_step(tmp_path, step, [[row(future=at, scores=of) for at, of in enumerate(scores)]])
    index = Index(tmp_path, pairs=pairs)
    name = "score/judged above right"
    assert [column for column in index.values if "above" in column] == [name]
    judged = (0.9 - 0.5) / np.std([0.9, 0.5, 0.1, 0.5])
    right = (0.0 - 1.0) / np.std([0, 1, 2, 1])
    assert index.values[name][:3] == pytest.approx([judged - right, 0, right - judged], abs=1e-6)
    assert [*np.isnan(index.values[name][:5])] == [False, False, False, True, True]
    assert [*index.sort(index.select(Query()), name, True)[:4]] == [0, 5, 1, 6]
    assert [*index.select(Query(scores={"judged above right": (1, 9)}))] == [0, 5]
    transcripts.write_step(tmp_path, 2, [[row(scores={"judged": 0.1, "right": 0.0})] * 4])
    assert index.refresh() and len(index.values[name]) == 14
    judged = (0.9 - np.mean(of := [0.9, 0.5, 0.1, 0.5, 0.1, 0.1])) / np.std(of)
    right = (0.0 - np.mean(of := [0, 1, 2, 1, 0, 0])) / np.std(of)
    assert index.values[name][0] == pytest.approx(judged - right, abs=1e-6)


def test_surprise_is_a_column_if_a_run_recorded_it(run: Path, tmp_path: Path) -> None:
    assert "surprise" not in Index(run).values
    transcripts.write_step(tmp_path, 0, [[row(surprise=0.5), row(future=1)], [row(surprise=2.0)]])
    index = Index(tmp_path)
    assert [*index.sort(index.select(Query()), "surprise", True)] == [2, 0, 1]
    assert [*index.select(Query(terms={"surprise": (0, 1)}))] == [0]
    assert not len(Index(run).select(Query(terms={"surprise": (0, 1)})))
