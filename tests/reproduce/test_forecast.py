"""What a study is going to cost, by what a pilot has measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.planning import llm_cost
from megatron_collab.planning.llm_cost import Cost, Means
from megatron_collab.reproduce import forecast
from megatron_collab.reproduce.forecast import Pilot
from megatron_collab.reproduce.plan import StudyOptions, stages
from megatron_collab.reproduce.study import read


def pilot_of(planned: list) -> Pilot:
    """Of 4 conversations, in which a user said 16 messages at a cent, and the judge scored each twice for two cents."""
    spec = next(stage.spec for stage in planned if stage.name == "pilot")
    assert spec.play
    might = llm_cost.evaluation_calls(spec.play, spec.data.eval_sets[0], 4)
    return Pilot({"user": Means(16, 900, 0.01), "judge": Means(8, 2000, 0.02)}, might)


@pytest.mark.processes
def test_a_study_costs_what_its_pilot_did_by_the_calls_of_each_program() -> None:
    study = read("collabllm")
    options = StudyOptions(Path("out"), ["math"], ["base", "sft", "grpo"], study.model, settings=("train.steps=10",))
    planned = stages(study, options)
    pilots = {"math": pilot_of(planned)}
    costs = forecast.program_costs(planned, pilots)
    assert [*costs] == [f"math/{name}" for name in ("base_eval", "sft", "sft_eval", "grpo", "grpo_eval")]
    # 3 x 200 conversations, where the pilot had 4, of as many calls each.
    assert costs["math/base_eval"].usd == pytest.approx(150 * (16 * 0.01 + 8 * 0.02))
    assert costs["math/sft"].usd == 0
    assert costs["math/grpo"].usd > costs["math/base_eval"].usd, "10 steps of 384 futures"
    assert forecast.total(costs.values()).usd == pytest.approx(sum(cost.usd for cost in costs.values()))
    unknown = forecast.total([Cost(1.0, ("a", "b")), Cost(2.0, ("b",))])
    assert unknown == Cost(3.0, ("a", "b"))


@pytest.mark.seconds
def test_data_that_are_built_cost_what_their_assistant_may_take() -> None:
    study = read("collabllm")
    prices = "llm.prices={openai/gpt-4o: [2.5, 10], openai/gpt-4o-mini: [0.15, 0.6]}"
    options = StudyOptions(Path("out"), ["math"], ["sft"], study.model, build=True, settings=(prices,))
    planned = stages(study, options)
    costs = forecast.program_costs(planned, {"math": pilot_of(planned)})
    build = next(stage for stage in planned if stage.name == "build")
    users = forecast._calls(build, build.spec, 0).user.calls
    # An opening, then 2 candidates with 3 futures at 7 turns: of 2 messages, but 1 and 0 where the 14 are reached.
    assert users == 500 * (1 + 2 * 3 * (5 * 2 + 1))
    assert costs["math/build"].usd > 100 and costs["math/sft"].usd == 0
