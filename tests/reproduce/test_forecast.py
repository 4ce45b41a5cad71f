"""What a study is going to take, by what a pilot has measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_collab import patches

patches.apply("megatron")
from megatron_collab.launch.spec import run_spec  # noqa: E402
from megatron_collab.models import hf_config  # noqa: E402 (Megatron is imported with planning)
from megatron_collab.planning import llm_cost  # noqa: E402
from megatron_collab.planning.duration import Gpu  # noqa: E402
from megatron_collab.planning.llm_cost import Means  # noqa: E402
from megatron_collab.planning.memory import model_config_file  # noqa: E402
from megatron_collab.reproduce import forecast  # noqa: E402
from megatron_collab.reproduce.forecast import Pilot  # noqa: E402
from megatron_collab.reproduce.plan import StudyOptions, stages  # noqa: E402
from megatron_collab.reproduce.study import read  # noqa: E402

GPU = Gpu(989e12, 3.35e12)


def pilot_of(planned: list) -> Pilot:
    """Of 4 conversations, in which a user said 16 messages at a cent, and the judge scored each twice for two cents."""
    config = next(stage.config for stage in planned if stage.name == "pilot")
    spec = run_spec(config)
    assert spec.play
    might = llm_cost.evaluation_calls(spec.play, spec.data.eval_sets[0], 4)
    means = {"user": Means(16, 900, 60, 1.5, 0.01, 0.001), "judge": Means(8, 2000, 80, 3.0, 0.02, 0.0)}
    return Pilot(means, might, 4.0, 300.0)


def test_a_study_costs_what_its_pilot_did_by_the_calls_of_each_program() -> None:
    study = read("collabllm")
    options = StudyOptions(Path("out"), ["math"], ["base", "sft", "grpo"], study.model, settings=("train.steps=10",))
    planned = stages(study, options)
    pilots = {"math": pilot_of(planned)}
    shape = hf_config.read(model_config_file(study.model))
    forecasts = {program.title: program for program in forecast.program_forecasts(planned, pilots, shape, GPU)}
    assert [*forecasts] == [f"math/{name}" for name in ("base_eval", "sft", "sft_eval", "grpo", "grpo_eval")]
    # 3 x 200 conversations, where the pilot had 4, of as many calls each.
    assert forecasts["math/base_eval"].cost.usd == pytest.approx(150 * (16 * 0.01 + 8 * 0.02))
    assert forecasts["math/base_eval"].cost.error == pytest.approx(150 * 16 * 0.001)
    assert forecasts["math/sft"].cost.usd == 0 and forecasts["math/sft"].hours and forecasts["math/sft"].hours > 0
    assert forecasts["math/grpo"].cost.usd > forecasts["math/base_eval"].cost.usd, "10 steps of 384 futures"
    more = forecast.total(list(forecasts.values()))
    assert more.cost.usd == pytest.approx(sum(program.cost.usd for program in forecasts.values()))
    assert more.hours == pytest.approx(sum(program.hours or 0 for program in forecasts.values()))
    twice = Gpu(2 * GPU.flops, 2 * GPU.memory)
    faster = {program.title: program for program in forecast.program_forecasts(planned, pilots, shape, twice)}
    assert faster["math/sft"].hours == pytest.approx((forecasts["math/sft"].hours or 0) / 2)
    slow = replace(pilots["math"], means={"user": replace(pilots["math"].means["user"], seconds=15.0)})
    waits = {
        program.title: program.hours for program in forecast.program_forecasts(planned, {"math": slow}, shape, GPU)
    }
    assert (waits["math/base_eval"] or 0) > (forecasts["math/base_eval"].hours or 0)


def test_data_that_are_built_cost_what_their_assistant_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "apply", lambda *_: None)
    study = read("collabllm")
    prices = "llm.prices={openai/gpt-4o: [2.5, 10], openai/gpt-4o-mini: [0.15, 0.6]}"
    options = StudyOptions(Path("out"), ["math"], ["sft"], study.model, build=True, settings=(prices,))
    planned = stages(study, options)
    forecasts = {
        program.title: program
        for program in forecast.program_forecasts(
            planned, {"math": pilot_of(planned)}, hf_config.read(model_config_file(study.model)), GPU
        )
    }
    build = next(stage for stage in planned if stage.name == "build")
    users = forecast._calls(build, run_spec(build.config), 0).user.calls
    # An opening, then 2 candidates with 3 futures at 7 turns: of 2 messages, but 1 and 0 where the 14 are reached.
    assert users == 500 * (1 + 2 * 3 * (5 * 2 + 1))
    assert forecasts["math/build"].cost.usd > 100 and forecasts["math/sft"].hours
