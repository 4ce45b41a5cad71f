"""Batches of the collector: without staleness they are the same as before sampling could run ahead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.rollout.collector import spending
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import ScoredBatch
from tests.rollout.simulated import DIFFERENT, LOST, World

# Two steps of a run from before sampling could run ahead: streams with their tasks as they were played, the groups of
# the batch in order (the peers of their first samples), and metrics.
PLAYED = {
    4: [("4", [34, 27, 13, 8, 9, 18]), ("4.1", [13, 18, 34]), ("4.2", [0, 32]), ("4.3", [27, 18]), ("4.4", [32]),
        ("4.5", [14]), ("4.6", [7])],
    5: [("5", [6, 1, 26, 37, 16, 14]), ("5.1", [6, 10, 26, 31]), ("5.2", [22, 11, 18]), ("5.3", [11, 38]),
        ("5.4", [39])],
}  # fmt: skip
TRAINED = {
    4: ["1/27", "2/13", "4/9", "6/13", "11/27", "15/7"],
    5: ["1/1", "3/37", "9/31", "11/11", "13/11", "15/39"],
}
MEASURED = {
    4: {"reward": 0.85, "equal_rewards": 6 / 12, "dynamic/kept": 6.0, "dynamic/dropped": 10.0, "dynamic/refills": 6.0},
    5: {
        "reward": 0.8571428571428571,
        "equal_rewards": 7 / 13,
        "dynamic/kept": 6.0,
        "dynamic/dropped": 10.0,
        "dynamic/refills": 4.0,
    },
}
COMMON = {
    "reward_se": 0.0, "spread": 0.17677669529663687, "missing": 0.0, "futures": 1.0, "turn_tokens": 2.0,
    "sampled_tokens": 96.0, "ending/user_done": 1.0, "count/asked": 1.0, "llm/usd": 0.0,
}  # fmt: skip


def test_the_cost_of_a_step_is_unknown_if_a_call_has_no_price() -> None:
    """The call is not counted as free; the cost of later steps is known again."""
    before = {"calls": 2, "tokens": 10, "usd": 0.5, "unpriced": 1}
    known = spending(before, {"calls": 3, "tokens": 30, "usd": 0.75, "unpriced": 1})
    assert known == {"llm/calls": 1, "llm/tokens": 20, "llm/usd": 0.25, "llm/unpriced": 0}
    unknown = spending(before, {"calls": 4, "tokens": 30, "usd": 0.75, "unpriced": 2})
    assert unknown == {"llm/calls": 2, "llm/tokens": 20, "llm/unpriced": 1}


def test_without_staleness_steps_are_those_of_a_recorded_run(world: Callable[..., World]) -> None:
    """The same tasks, streams, order and numbers, to the last bit."""
    run = world(lambda task: DIFFERENT if task % 2 else (LOST if task % 3 == 0 else [1.0] * 3), 8)
    for step in (4, 5):
        run.played.clear()
        batch = run.next(step)
        expected = [(f"train-{name}-{i}", task) for name, row in PLAYED[step] for i, task in enumerate(row)]
        assert list(run.played.items()) == expected
        assert [sample.credits[0].peers for sample in batch.samples][::3] == TRAINED[step]
        assert [sample.credits[0].value for sample in batch.samples] == DIFFERENT * 6
        measured = MEASURED[step]
        assert without_sentinels(batch.metrics) == {**COMMON, **measured, "score/right": measured["reward"]}
    assert run.manager.state().keys() == {"weights", "sentinels"}


def without_sentinels(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("sentinel/")}


def ask_from(run: World, first: int, steps: range) -> None:
    """Play the steps; the policy's replies are questions from step `first` on."""
    for step in steps:
        run.reply = "what ? why ? when ?" if step >= first else "yes ."
        run.next(step)


@pytest.mark.seconds
def test_a_resumed_run_has_the_same_alarm_as_one_that_was_not_killed(world: Callable[..., World]) -> None:
    run = world(lambda task: DIFFERENT)
    ask_from(run, 15, range(24))
    (alarm,) = run.alarms
    assert (alarm.sentinel, alarm.baseline) == ("questions", 0.0) and len(alarm.conversations) == 2
    killed = world(lambda task: DIFFERENT)
    ask_from(killed, 15, range(17))
    resumed = world(lambda task: DIFFERENT, state=json.loads(json.dumps(killed.manager.state())))
    ask_from(resumed, 15, range(17, 24))
    assert [*killed.alarms, *resumed.alarms] == [alarm]
    states = [json.loads(json.dumps(ended.manager.state()["sentinels"])) for ended in (run, resumed)]
    assert states[0] == states[1]


@pytest.mark.seconds
def test_an_alarm_stops_the_run_if_that_is_set(world: Callable[..., World]) -> None:
    """The state is that before the step, so a resume comes to the same alarm, and goes on if the option is off."""
    run = world(lambda task: DIFFERENT)
    run.config.train.stop_on_alarm = True
    with pytest.raises(
        RunStopped, match=r"^step \d+: sentinel questions: .*; to go on, set train.stop_on_alarm=false$"
    ):
        ask_from(run, 15, range(24))
    state = run.manager.state()
    assert not state["sentinels"]["questions"]["alarmed"]
    step = max(run.written_steps)
    resumed = world(lambda task: DIFFERENT, state=state)
    ask_from(resumed, 15, range(step, 24))
    assert resumed.alarms == run.alarms


def test_tokens_are_recorded_at_the_places_of_the_transcripts(world: Callable[..., World]) -> None:
    """Also of groups that are not trained, since their rewards are equal."""
    run = world(lambda task: DIFFERENT if task % 2 else [1.0] * 3, 2)
    run.config.train.record_tokens = True
    for step in (0, 1):
        scored = with_advantages(ScoredBatch(run.next(step).samples), run.config.algo)
        run.manager.record_tokens(scored, [sample.log_probs + 0.5 for sample in scored.samples])
        rows = run.tokens[step]
        assert [(row["position"], row["rollout"]) for row in rows] == [
            (position, number) for position in range(len(run.written_steps[step])) for number in range(3)
        ]
        trained = [row for row in rows if "trained" in row]
        assert {run.written_steps[step][row["position"]].task.id for row in trained} == {*map(str, run.trained(scored))}
        assert 0 < len(trained) < len(rows)
        expected = [1.0 if row["rollout"] != 1 else -1.0 for row in trained]
        assert [np.sign(row["advantage"][0]) for row in trained] == expected
        assert all(row["pieces"] == ["(", ")"] and [*row["log_ratio"]] == [0.5, 0.5] for row in trained)
