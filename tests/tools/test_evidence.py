"""The bench of the evidence: its page has what the kept results say, and results of a study's folder are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_collab.reproduce.plan import StudyOptions, chains
from megatron_collab.reproduce.results import ArmResult
from megatron_collab.reproduce.study import Column, Study, read
from megatron_collab.statistics import Estimate, difference, mean
from tools import demo
from tools.bench import evidence
from tools.bench.evidence import Trainings

PREDICTED = {
    policy: {f"goals/{key}": value for key in ("desk_utility", *evidence.PREDICTED)}
    for policy, value in {"optimal": 0.9, "single turn, best bonus": 0.8, "answers now": 0.5}.items()
}


def arm(utility: Mapping[str, float]) -> dict[str, Any]:
    keys = ("desk_utility", *evidence.PREDICTED, *evidence.MEASURED)
    means = {f"goals/{key}": sum(utility.values()) / len(utility) for key in keys}
    return {"means": means, "utility": dict(utility), "optimizer_steps": 60.0, "sampled_tokens": 1000.0}


@pytest.fixture
def trainings() -> Trainings:
    bonus, window_3 = {"a": 0.5, "b": 0.7, "c": 0.9}, {"a": 0.7, "b": 0.8, "c": 0.9}
    arms = {"sft": arm({"a": 0.1, "b": 0.2, "c": 1.0}), "bonus": arm(bonus), "window_3": arm(window_3)}
    return Trainings({"seed1": {"predicted": PREDICTED, "arms": arms}})


def test_the_committed_pages_and_figure_have_the_committed_results(tmp_path: Path) -> None:
    tasks = evidence.read()
    for file, lines in ((evidence.PAGE, evidence.page_lines(tasks)), (evidence.README, evidence.summary(tasks))):
        text = file.read_text()
        assert evidence.with_tables(text, lines) == text
    evidence.draw(tasks, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == evidence.PICTURE.read_text()


def test_the_primary_difference_is_paired_by_problem(trainings: Trainings) -> None:
    values = evidence.values({"cost_0.10": trainings})
    tasks = [
        {task: [score] for task, score in trainings.seeds["seed1"]["arms"][name]["utility"].items()}
        for name in ("bonus", "window_3")
    ]
    expected = difference(*tasks)
    assert values["mr_minus_best_single_turn"] == pytest.approx(0.1) == expected.value
    assert values["interval_low"] == expected.low
    assert values["regret_over_myopic"] == pytest.approx(0.1 / 0.2)


def test_the_rival_is_the_better_reward_of_the_turn_alone(trainings: Trainings) -> None:
    trainings.seeds["seed1"]["arms"]["single_turn"] = arm({"a": 0.7, "b": 0.8, "c": 0.8})
    assert evidence.values({"cost_0.10": trainings})["mr_minus_best_single_turn"] == pytest.approx(0.1 / 3)
    trainings.seeds["seed1"]["arms"]["priced_bonus"] = arm({"a": 0.7, "b": 0.8, "c": 1.0})
    measured = evidence.values({"cost_0.10": trainings})
    assert measured["mr_minus_best_single_turn"] == pytest.approx(-0.1 / 3)
    trainings.seeds["seed1"]["arms"]["open_bonus"] = arm({"a": 1.0, "b": 1.0, "c": 1.0})
    assert evidence.values({"cost_0.10": trainings}) == measured, "it is told which slots are open"
    [row] = [line for line in evidence.aims(measured) if "lower end" in line]
    assert row == f"| lower end of its interval | > 0 | {measured['interval_low']:.3g} |"


def test_regrets_are_of_the_trainings_that_have_both_arms(trainings: Trainings) -> None:
    better = {**PREDICTED, "optimal": {key: 1.0 for key in PREDICTED["optimal"]}}
    second = {"predicted": better, "arms": {"window_3": arm({"a": 0.1})}}
    both = Trainings({**trainings.seeds, "seed2": second})
    assert evidence.values({"cost_0.10": both}) == evidence.values({"cost_0.10": trainings})


def test_arms_are_compared_in_the_trainings_that_have_both(trainings: Trainings) -> None:
    second = {"predicted": PREDICTED, "arms": {"bonus": arm({"a": 0.9, "b": 0.9, "c": 1.0})}}
    both = Trainings({**trainings.seeds, "seed2": second})
    assert both.gain("window_3", "bonus") == trainings.gain("window_3", "bonus")
    assert both.utility("bonus").value > trainings.utility("bonus").value
    assert (both.number("bonus"), both.number("window_3")) == (2, 1)


def test_the_table_has_predictions_and_results_side_by_side(trainings: Trainings) -> None:
    lines = [*evidence.tables({"cost_0.10": trainings, "cost_0.20": Trainings({})})]
    assert lines[1] == "### A question costs 0.10" and not any("costs 0.20" in line for line in lines)
    rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert {len(row) for row in rows} == {len(evidence.HEADS) + 1}
    assert rows[1][:3] == ["| optimal, predicted", "0.900", "0.000"]
    assert [row[0] for row in rows[4:]] == ["| SFT (1)", "| Single turn, best bonus (1)", "| GRPO-MR, window 3 (1)"]
    assert rows[6][1] == mean([[0.7], [0.8], [0.9]]).text() and rows[6][3].startswith("+0.100 [")
    trainings.seeds["seed1"]["arms"]["bonus"]["sampled_tokens"] = 1500.0
    assert trainings.with_arms("bonus").equality().endswith("to 1,500 (Single turn, best bonus).")
    assert not Trainings({}).equality()


def test_the_summary_says_how_many_trainings_an_arm_has(trainings: Trainings) -> None:
    second = {"predicted": PREDICTED, "arms": {"sft": arm({"a": 0.9}), "conversations": arm({"a": 0.6})}}
    both = Trainings({**trainings.seeds, "seed2": second})
    lines = [*evidence.summary({"cost_0.10": both, "cost_0.20": trainings})]
    rows = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in lines if line.startswith("| "))}
    assert rows["optimal, predicted"] == ["0.900", "0.900"]
    assert rows["SFT"] == ["0.667 (2)", "0.433 (1)"] and rows["MR, 3 futures"] == ["0.800 (1)"] * 2
    assert rows["whole conversations"] == ["0.600 (1)"], "nothing in the second column"
    assert rows["MR over the best turn-alone reward [95%]"][0].startswith("+0.100 [")
    assert rows["whole conversations over MR [95%]"] == [Estimate(math.nan).text()] * 2
    assert not [*evidence.summary({"cost_0.10": Trainings({})})]


def test_regret_is_of_the_trainings_of_both_arms(trainings: Trainings) -> None:
    """Neither a training without the compared arms nor one with another reward of the turn alone changes it."""
    easier = {**PREDICTED, "optimal": {key: 1.0 for key in PREDICTED["optimal"]}}
    sft = arm({"a": 0.9})
    part = {"predicted": easier, "arms": {"sft": sft, "window_1": arm({"a": 0.6})}}
    other = {"predicted": easier, "arms": {"sft": sft, "single_turn": arm({"a": 0.2}), "window_3": arm({"a": 0.3})}}
    both = Trainings({**trainings.seeds, "seed2": part, "seed3": other})
    assert evidence.values({"cost_0.10": both}) == evidence.values({"cost_0.10": trainings})
    rows = [line.split(" | ") for line in evidence.tables({"cost_0.10": both}) if line.startswith("| ")]
    regrets = {row[0].removeprefix("| "): (row[2], row[3]) for row in rows}
    assert regrets["GRPO-MR, window 1 (1)"] == ("0.400", ""), "from its own optimum; no training has it and the bonus"
    assert regrets["Single turn, best bonus (1)"] == ("0.200", "")


@pytest.mark.parametrize("name", ["desk", "credit_desk", "desk_costs"])
def test_predictions_are_of_the_tasks_that_are_played(name: str, tmp_path: Path) -> None:
    """So that a regret compares like with like."""
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(demo.small_study(demo.SMOKE)))
    for study in (read(name), read(str(small))):
        assert {f"data.world_options.evaluated={task.eval_tasks}" for task in study.tasks.values()} <= {*study.settings}


def test_trainings_of_any_seed_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of seeds that the study would not train by itself."""
    for name in ("seed2", "seed11", "seed_notes"):
        (tmp_path / "cost_0.10" / name / "world").mkdir(parents=True)
        (tmp_path / "cost_0.10" / name / "world" / "predictions_0.10.json").write_text(json.dumps(PREDICTED))

    def utility(study: Study, options: StudyOptions, task: str, arm: str) -> list[ArmResult | None] | None:
        (chain,) = chains(study, options, task)
        column = Column("desk_utility", "utility", set="goals")
        result = ArmResult(column, mean([[0.5]]), (0.5,), {chain.title: {"a": [0.5]}}, 0)
        return [result, None] if arm == "sft" else [None] if arm == "bonus" else None

    monkeypatch.setattr(evidence, "results_of", utility)
    read = {chain.title: [*content["arms"]] for chain, content in evidence.results(tmp_path)}
    assert read == {"cost_0.10/seed2": ["sft"], "cost_0.10/seed11": ["sft"]}


def test_arms_can_be_added_later_if_their_start_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "seed1.json"
    sft, bonus, window_1 = ({"sft": arm({"a": 0.1})}, {"bonus": arm({"a": 0.2})}, {"window_1": arm({"a": 0.3})})
    evidence.update(file, {"predicted": PREDICTED, "arms": sft | bonus}, "earlier")
    assert set(json.loads(file.read_text())["arms"]["sft"]["versions"]) == set(evidence.PACKAGES)
    evidence.update(file, {"predicted": PREDICTED, "arms": sft | window_1}, "later")
    arms = json.loads(file.read_text())["arms"]
    assert {name: arm["commit"] for name, arm in arms.items()} == {
        "sft": "earlier", "bonus": "earlier", "window_1": "later",
    }  # fmt: skip
    other = {"sft": arm({"a": 0.4})}
    with pytest.raises(SystemExit, match="bonus started from another sft than the new arms; train bonus too, or"):
        evidence.update(file, {"predicted": PREDICTED, "arms": other | window_1}, "later")
    with pytest.raises(SystemExit, match="window_1 starts from sft, which is not evaluated; give --arms sft,window_1"):
        evidence.update(file, {"predicted": PREDICTED, "arms": window_1}, "later")
    evidence.update(file, {"predicted": PREDICTED, "arms": other | bonus | window_1}, "later")
    assert json.loads(file.read_text())["arms"]["sft"]["utility"] == {"a": 0.4}
    another = {policy: {key: 1.0 for key in row} for policy, row in PREDICTED.items()}
    with pytest.raises(SystemExit, match="bonus: trained in a world with other predictions; train them too, or"):
        evidence.update(file, {"predicted": another, "arms": other | window_1}, "later")
    assert json.loads(file.read_text())["predicted"] == PREDICTED
    evidence.update(file, {"predicted": another, "arms": other | bonus | window_1}, "later")
    assert json.loads(file.read_text())["predicted"] == another
