"""Forecast of a study's cost in USD, from prices and the measurements of a pilot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_collab.config import PlayConfig
from megatron_collab.launch.spec import RunSpec
from megatron_collab.llm.endpoint import served_by_run
from megatron_collab.llm.recording import SUFFIX, Recording
from megatron_collab.planning import llm_cost
from megatron_collab.planning.llm_cost import Calls, Cost, Means
from megatron_collab.reproduce.plan import BUILD, TRAIN, Stage


@dataclass(frozen=True)
class Pilot:
    """Measurements of a task's pilot, by role. `calls`: upper bound of the calls that it could make."""

    means: Mapping[str, Means]
    calls: Calls


def read(stage: Stage) -> Pilot:
    """The measurements of a pilot, which must be done."""
    means, calls = {}, stage.calls
    if calls and any(calls.glob(f"*{SUFFIX}")):
        recording = Recording(calls)
        means = llm_cost.role_means(recording.stored(number).call() for number in range(len(recording)))
    return Pilot(means, _calls(stage, stage.spec, 0))


def program_costs(stages: Sequence[Stage], pilots: Mapping[str, Pilot]) -> dict[str, Cost]:
    """The costs, by title, of the programs still to run that call models or train; `pilots`: by task."""
    built = {stage.chain.task: _built(stage.config) for stage in stages if stage.module == BUILD}
    return {
        stage.title: _program_cost(stage, _steps(stage, built.get(stage.chain.task)), pilots[stage.chain.task])
        for stage in stages
        if not (stage.prepares or stage.first or stage.done)
    }


def total(costs: Iterable[Cost]) -> Cost:
    costs = list(costs)
    unpriced = dict.fromkeys(name for cost in costs for name in cost.unpriced)
    return Cost(sum(cost.usd for cost in costs), tuple(unpriced))


def _program_cost(stage: Stage, steps: int, pilot: Pilot) -> Cost:
    config, spec = stage.config, stage.spec
    calls = _calls(stage, spec, steps)
    cost = llm_cost.forecast(calls, pilot.means, pilot.calls)
    paid = [assistant.endpoint for assistant in spec.assistants if not served_by_run(assistant.endpoint.model)]
    if paid and stage.module != TRAIN:  # in the pilot the policy played this role
        prompt_tokens = pilot.means["user"].prompt_tokens if "user" in pilot.means else 0.0
        upper_bound = llm_cost.cost_bound(Calls(assistant=calls.assistant), {"assistant": paid}, config, prompt_tokens)
        cost = total([cost, upper_bound])
    return cost


def _calls(stage: Stage, spec: RunSpec, steps: int) -> Calls:
    config, play = stage.config, spec.play
    if stage.module == TRAIN:
        return llm_cost.training_calls(config, play, steps)
    assert play
    if stage.module == BUILD:
        return llm_cost.building_calls(play, config.train.eval_tasks)
    calls = (llm_cost.evaluation_calls(play, eval_set, eval_set.tasks or 0) for eval_set in spec.data.eval_sets)
    return sum(calls, Calls())


def _steps(stage: Stage, built: int | None) -> int:
    if stage.module != TRAIN:
        return 0
    rows = None if stage.rows is None or stage.rows.is_file() else built
    return stage.steps(rows)


def _built(config: PlayConfig) -> int:
    """Upper bound of the turns of built conversations; each turn is a training row."""
    return config.train.eval_tasks * ((config.rollout.max_messages or 0) // 2)
