from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_collab.config import Config, run_record
from megatron_collab.observability import report
from megatron_collab.observability.run import Run
from megatron_collab.rollout.summary import evaluation_summary
from megatron_collab.statistics import Estimate
from tests.observability.hacks import evaluation, growth, mild_growth


def test_a_policy_that_learns_a_tell_of_the_users_of_training_is_noticed() -> None:
    assert all(growth(seed, planted=True).high < -0.2 for seed in range(5))


@pytest.mark.seconds
def test_a_tell_that_tempts_less_is_noticed_more_often_with_more_tasks() -> None:
    """In 28, 46 and 80 % of runs with 64, 128 and 256 tasks (tools/bench/sentinels.py)."""
    few, many = (sum(mild_growth(seed, tasks).high < 0 for seed in range(20)) for tasks in (64, 256))
    assert 2 <= few < many >= 12


@pytest.mark.seconds
def test_without_a_tell_the_gap_grows_no_more_often_than_by_chance() -> None:
    """Of 200 seeds, tools/bench/sentinels.py counts 9 whose interval of 95 % excludes 0."""
    intervals = [growth(seed, planted=False) for seed in range(20)]
    assert sum(not interval.low <= 0 <= interval.high for interval in intervals) <= 3


def evaluated(run: Run, step: int, planted: bool) -> None:
    """The evaluations of both sets that are due at `step`."""
    for name, against in (("goals", None), ("users", "goals")):
        if due := run.evaluation_due(name, step):
            groups = evaluation("0", against is not None, trained=step > 0, planted=planted, tasks=64)
            run.evaluation(due, name, step, evaluation_summary(groups, lambda task: ()), groups, against)


@pytest.mark.seconds
def test_the_gap_is_in_every_place_with_its_interval(tmp_path: Path) -> None:
    config = Config()
    config.run.dir, config.train.steps, config.train.eval_every = str(tmp_path), 4, 2
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        for step in (0, 2):
            evaluated(run, step, planted=True)
    (tmp_path / "metrics.jsonl").write_text("")
    with Run(run_record(config), config.train, 2, {}, {}) as run:  # resumed
        evaluated(run, 4, planted=True)
        run.finish()
    records = json.loads((tmp_path / "evaluations.json").read_text())
    assert not any(key.startswith("gap") for name in records if "goals" in name for key in records[name])
    assert "gap/right" in records["users/before"] and "gap_growth/right" not in records["users/before"]
    after = records["users/after"]
    assert after["gap_high/right"] < -0.3 and after["gap_growth_high/right"] < -0.3
    difference = after["score/right"] - records["goals/after"]["score/right"]
    before = records["users/before"]["score/right"] - records["goals/before"]["score/right"]
    assert abs(after["gap/right"] - difference) < 1e-9 and abs(after["gap_growth/right"] - difference + before) < 1e-9
    assert run.scalars()["eval/users/right_gap_growth_low"] == after["gap_growth_low/right"]
    page = (tmp_path / "report.html").read_text()
    assert Estimate(*(after[f"gap_growth{end}/right"] for end in ("", "_low", "_high"))).text("{:+.3f}".format) in page
    assert [title for title, *_ in report.curves([], records)][1] == "Gap to the compared set, with 95 % intervals"


def test_a_set_that_was_not_evaluated_at_this_step_gives_no_gap(tmp_path: Path) -> None:
    config = Config()
    config.run.dir, config.train.steps = str(tmp_path), 4
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        run.evaluation("users/before", "users", 0, {}, evaluation("0", True, False, False, tasks=4), "goals")
    assert not any(
        key.startswith("gap") for key in json.loads((tmp_path / "evaluations.json").read_text())["users/before"]
    )
