"""Tokens of trained turns: what the server sampled and what the trainer knows of each, by place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.algo.credit import CreditSpec, samples_of
from megatron_collab.observability import tokens, transcripts
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.settings import AlgoConfig, ConfigError, TrainingRewardConfig, TrainingRolloutConfig
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Sample,
    Score,
    ScoredBatch,
    Task,
    Turn,
)

KEY = "sk-proj-0123456789abcdef0123456789"
Row = dict[str, object]


def played(value: Score, *texts: str, forced: tuple[int, int] = (0, 0)) -> Rollout:
    """A conversation with a turn for each text, a token for each letter, at log-probs of -0.5, -1, -1.5, …"""
    conversation = Conversation((Message("user", "hi"),), (1, 2))
    for text in texts:
        letters = tuple(map(ord, text))
        log_probs = tuple(-0.5 * (1 + at) for at in range(len(text)))
        turn = Turn(conversation.token_ids, letters, log_probs, (7,) * len(text), Finish.STOP, text, forced)
        conversation = conversation.add_turn(turn).add_messages([Message("user", "go on")], (3,))
    conversation = conversation.end(Ending.USER_DONE)
    return Rollout(conversation, (Future(conversation, {"right": value}),), Reward(value))


def recorded(rollouts: list[Rollout], **reward: str) -> dict[tuple[int, int], Row]:
    """The rows of two groups, of which only the second is trained; its policy's log-probs rose by 0.25."""
    spec = CreditSpec(AlgoConfig(advantage="dr_grpo"), TrainingRewardConfig(**reward), TrainingRolloutConfig(futures=0))
    groups = [Group(Task("t", (), "", "", ""), tuple(part)) for part in ([played(1.0, "not")], rollouts)]
    formula = reward_function("mr", {}, {"right": 1.0}, {})
    samples = [sample for number, group in enumerate(groups) for sample in samples_of(group, spec, number, formula)]
    batch = with_advantages(ScoredBatch(tuple(samples)), spec.algo)
    after = [sample.log_probs + 0.25 for sample in samples]
    rows = [*tokens.rows_of(groups, batch, after, chr)]
    assert [row["position"] for row in rows][:1] == [0] and "trained" not in rows[0]
    return {(row["rollout"], row["turn"]): dict(row) for row in rows if row["position"] == 1}


def numbers(values: object) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 3) for value in np.asarray(values)]


def test_a_token_has_what_the_server_and_the_trainer_know() -> None:
    rollouts = [played(Missing("judge is down"), "abc"), played(1.0, "abcd", forced=(1, 3)), played(0.0, "x")]
    rows = recorded(rollouts)
    assert [*rows] == [(0, 0), (1, 0), (2, 0)]
    row = rows[1, 0]
    assert row["pieces"] == [*"abcd"] and row["version"] == (7,) * 4
    assert numbers(row["log_prob"]) == [-0.5, None, None, -2.0], "closing marks of a thought are not sampled"
    assert [*row["trained"]] == [True, False, False, True]
    assert numbers(row["log_ratio"]) == [0.25, None, None, 0.25]
    assert numbers(row["advantage"]) == [0.5, None, None, 0.5]
    assert numbers(rows[2, 0]["advantage"]) == [-0.5]
    assert not rows[0, 0].keys() & {"trained", "log_ratio", "advantage"}, "without a reward it is not trained"


@pytest.mark.parametrize("credit", ["last", "equal", "reward_to_go"])
def test_every_trained_turn_has_its_own_tokens(credit: str) -> None:
    rows = recorded([played(1.0, "ab", "c"), played(0.0, "d", "ef")], turn_credit=credit)
    trained = {place: len(row["trained"]) for place, row in rows.items() if "trained" in row}
    lengths = {(0, 0): 2, (0, 1): 1, (1, 0): 1, (1, 1): 2}
    assert {place: len(row["pieces"]) for place, row in rows.items()} == lengths
    assert trained == {place: length for place, length in lengths.items() if credit != "last" or place[1] == 1}
    assert numbers(rows[1, 1]["log_ratio"]) == [0.25, 0.25]


def test_a_key_is_in_no_token(tmp_path: Path) -> None:
    """Also if it is in several, none of which looks like one."""
    rows = recorded([played(1.0, f"my key is {KEY} ."), played(0.0, "x")])
    assert {*rows[0, 0]["pieces"]} == {"***"} and rows[1, 0]["pieces"] == ["x"]


def learned(position: int, rollout: int, **more: object) -> Row:
    return {
        "position": position, "rollout": rollout, "turn": 0, "pieces": ["a \U0001f600", "\ufffd"], "version": [3, 4],
        "log_prob": np.array([-0.5, np.nan], np.float16), "trained": [True, False],
        "log_ratio": np.array([0.125, np.nan], np.float16), "advantage": np.array([-1, np.nan], np.float16), **more,
    }  # fmt: skip


def test_rows_come_back_by_their_place(tmp_path: Path) -> None:
    sampled = {name: learned(1, 1)[name] for name in ("position", "rollout", "turn", "pieces", "log_prob", "version")}
    tokens.write(tmp_path, 12, [learned(0, 0), learned(0, 1, turn=1), learned(1, 0), sampled])
    (row,) = tokens.read(tmp_path, 12, 1, 0)
    file = transcripts.step_file(tmp_path, 12, transcripts.TOKENS)
    pq.write_table(pq.read_table(file).drop_columns(["future"]), file)  # as an earlier version wrote it
    assert str(tokens.read(tmp_path, 12, 1, 0)) == str([row]) and row["future"] is None
    assert (row["pieces"], row["version"], row["trained"]) == (["a \U0001f600", "\ufffd"], [3, 4], [True, False])
    assert [numbers(row[name]) for name in ("log_prob", "log_ratio", "advantage")] == [
        [-0.5, None], [0.125, None], [-1.0, None],
    ]  # fmt: skip
    (untrained,) = tokens.read(tmp_path, 12, 1, 1)
    assert [untrained[name] for name in ("trained", "log_ratio", "advantage")] == [None] * 3
    assert [row["turn"] for row in tokens.read(tmp_path, 12, 0, 1)] == [1]
    assert tokens.read(tmp_path, 12, 7, 0) == tokens.read(tmp_path, 3, 0, 0) == []


def test_a_resume_forgets_the_tokens_of_repeated_steps(tmp_path: Path) -> None:
    for step in (0, 1, 2):
        tokens.write(tmp_path, step, [learned(0, 0)])
    transcripts.forget(tmp_path, 1)
    assert [*transcripts.step_files(tmp_path, transcripts.TOKENS)] == [0]


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    tokens.write(tmp_path, 0, [learned(0, 0)])
    file = transcripts.step_file(tmp_path, 0, transcripts.TOKENS)
    other = pq.read_table(file).drop_columns(["pieces"])
    damages: list[Callable[[], object]] = [
        lambda: pq.write_table(other, file),
        lambda: file.write_bytes(file.read_bytes()[:100]),
    ]
    for damage in damages:
        damage()
        with pytest.raises(ConfigError, match=r"^[^\n]*tokens/step_000000\.parquet: cannot be read \([^\n]*$"):
            tokens.read(tmp_path, 0, 0, 0)


def test_later_turns_have_the_place_of_their_future() -> None:
    """With rollout.train_turns=all, later turns are trained too; a future without one, or without a score, has none."""
    start = played(1.0, "ab").start
    start = replace(start, ending=None)
    longer = Turn(start.token_ids, (100,), (-1.0,), (7,), Finish.STOP, "d")
    ended, later = start.end(Ending.USER_DONE), start.add_turn(longer).end(Ending.USER_DONE)
    scores: list[tuple[Conversation, Score]] = [(ended, 1.0), (later, 1.0), (later, Missing("down")), (later, 0.0)]
    futures = [Future(conversation, {"right": score}) for conversation, score in scores]
    rollouts = tuple(Rollout(start, tuple(futures), Reward(value)) for value in (1.0, 0.0))
    spec = CreditSpec(AlgoConfig(), TrainingRewardConfig(), TrainingRolloutConfig(futures=4, train_turns="all"))
    group, formula = Group(Task("t", (), "", "", ""), rollouts), reward_function("mr", {}, {"right": 1.0}, {})
    samples: list[Sample] = samples_of(group, spec, 0, formula)
    assert [sample.origin for sample in samples] == [(0, 0), (0, 1), (0, 0, 1), (0, 0, 3), (0, 1, 1), (0, 1, 3)]
    batch = with_advantages(ScoredBatch(tuple(samples)), spec.algo)
    rows = [*tokens.rows_of([group], batch, [sample.log_probs + 0.25 for sample in samples], chr)]
    places = [(row["rollout"], row.get("future"), row["turn"], "".join(row["pieces"])) for row in rows]
    of_rollout = [(None, 0, "ab"), (1, 1, "d"), (3, 1, "d")]
    assert places == [(rollout, *place) for rollout in (0, 1) for place in of_rollout]
    assert [numbers(row["log_ratio"]) for row in rows[1:3]] == [[0.25]] * 2
    better, worse = ([float(value) for value in row["advantage"]] for row in rows[1:3])
    assert better[0] > 0 > worse[0]
