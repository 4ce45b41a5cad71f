"""Forecast of a study in USD and hours, from prices, the measurements of a pilot, and the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_collab.config import Config
from megatron_collab.launch.spec import RunSpec, run_spec
from megatron_collab.llm.endpoint import served_by_run
from megatron_collab.llm.recording import SUFFIX, Recording
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.observability import evaluations
from megatron_collab.planning import llm_cost
from megatron_collab.planning.duration import Gpu, sampling_seconds, training_seconds
from megatron_collab.planning.llm_cost import Calls, Cost, Means
from megatron_collab.reproduce.plan import BUILD, TRAIN, Stage, seed_names
from megatron_collab.rollout import recorded
from megatron_collab.runtime import device


@dataclass(frozen=True)
class Pilot:
    """Measurements of a task's pilot, by role. `calls`: upper bound of the calls that it could make.

    `replies`: policy replies per conversation; `reply`: tokens per reply.
    """

    means: Mapping[str, Means]
    calls: Calls
    replies: float
    reply: float

    def seconds(self, role: str) -> float:
        return self.means[role].seconds if role in self.means else 0.0


@dataclass(frozen=True)
class Forecast:
    """Forecast of a program. `hours` is None if there is no estimate, as on a CPU."""

    title: str
    cost: Cost
    hours: float | None


def read(stage: Stage) -> Pilot:
    """What the pilot `stage`, which is done, has measured."""
    calls, (seed,) = stage.calls, seed_names(1)
    means = {}
    if calls and any(calls.glob(f"*{SUFFIX}")):
        recording = Recording(calls)
        means = llm_cost.role_means(recording.stored(number).call() for number in range(len(recording)))
    name = evaluations.name_of(seed, evaluations.MODEL)
    rows = recorded.rows_of_evaluation(stage.folder, name)
    replies = [sum(message["role"] == "assistant" for message in row["messages"]) for row in rows]
    tokens = float(evaluations.read(stage.folder)[name].get("turn_tokens", 0.0))
    return Pilot(means, _calls(stage, run_spec(stage.config), 0), sum(replies) / max(1, len(replies)), tokens)


def program_forecasts(
    stages: Sequence[Stage], pilots: Mapping[str, Pilot], shape: ModelShape, gpu: Gpu
) -> list[Forecast]:
    """Forecasts of the programs still to run that call models or train; `pilots`: by task."""
    built = {stage.task: _built(stage.config) for stage in stages if stage.module == BUILD}
    forecasts = []
    for stage in stages:
        if not (stage.prepares or stage.first or stage.done):
            steps = _steps(stage, built.get(stage.task))
            forecasts.append(_program_forecast(stage, run_spec(stage.config), steps, pilots[stage.task], shape, gpu))
    return forecasts


def total(forecasts: Sequence[Forecast]) -> Forecast:
    unpriced = dict.fromkeys(name for forecast in forecasts for name in forecast.cost.unpriced)
    error = math.sqrt(sum(forecast.cost.error**2 for forecast in forecasts))
    hours = [forecast.hours for forecast in forecasts]
    summed = None if None in hours else sum(hour or 0.0 for hour in hours)
    return Forecast("all", Cost(sum(forecast.cost.usd for forecast in forecasts), tuple(unpriced), error), summed)


def _program_forecast(stage: Stage, spec: RunSpec, steps: int, pilot: Pilot, shape: ModelShape, gpu: Gpu) -> Forecast:
    config = stage.config
    calls = _calls(stage, spec, steps)
    usd = llm_cost.forecast(calls, pilot.means, pilot.calls)
    paid = [assistant.endpoint for assistant in spec.assistants if not served_by_run(assistant.endpoint.model)]
    if paid and stage.module != TRAIN:  # in the pilot the policy played this role
        prompt_tokens = pilot.means["user"].prompt_tokens if "user" in pilot.means else 0.0
        upper_bound = llm_cost.cost_bound(Calls(assistant=calls.assistant), {"assistant": paid}, config, prompt_tokens)
        usd = Cost(usd.usd + upper_bound.usd, usd.unpriced + upper_bound.unpriced, usd.error)
    if config.launch.device != device.GPU:
        return Forecast(stage.title, usd, None)
    served = not (paid and stage.module != TRAIN)
    seconds = _training(config, steps, pilot, shape, gpu) if stage.module == TRAIN else 0.0
    conversations, turns, times = _sampling_load(stage, spec, steps, pilot)
    if times:
        wait = pilot.seconds("user") + pilot.seconds("judge") / max(1.0, turns)
        reply = pilot.reply if served else 0.0
        seconds += times * sampling_seconds(config, shape, gpu, conversations, turns, reply, wait)
    return Forecast(stage.title, usd, seconds / 3600)


def _calls(stage: Stage, spec: RunSpec, steps: int) -> Calls:
    config, play = stage.config, spec.play
    if stage.module == TRAIN:
        return llm_cost.training_calls(config, play, steps)
    assert play
    if stage.module == BUILD:
        building = replace(play, rollouts=config.build.candidates)
        return llm_cost.building_calls(building, config.train.eval_tasks)
    calls = (llm_cost.evaluation_calls(play, eval_set, eval_set.tasks or 0) for eval_set in spec.data.eval_sets)
    return sum(calls, Calls())


def _sampling_load(stage: Stage, spec: RunSpec, steps: int, pilot: Pilot) -> tuple[int, float, int]:
    """(conversations that start together, sequential replies in each, how often that is repeated)."""
    config, sets = stage.config, spec.data.eval_sets
    rollout, train = config.rollout, config.train
    later = 1.0 + min(rollout.max_user_turns, rollout.max_assistant_turns - 1)
    if stage.module == TRAIN:
        conversations = train.prompts_per_step * train.rollouts_per_prompt * max(1, rollout.futures)
        return conversations, later, steps if train.stage == "rl" else 0
    if stage.module == BUILD:
        conversations = train.eval_tasks * config.build.candidates * max(1, rollout.futures)
        return conversations, later * (rollout.max_messages or 0) / 2, 1
    return max(eval_set.tasks or 0 for eval_set in sets), pilot.replies, len(sets)


def _training(config: Config, steps: int, pilot: Pilot, shape: ModelShape, gpu: Gpu) -> float:
    """Training seconds, if user and policy have equally many tokens and a prompt is half a conversation."""
    train, conversation = config.train, 2 * pilot.replies * pilot.reply
    sequence = {"sft": conversation, "dpo": conversation / 2 + 2 * pilot.reply, "rl": conversation / 2 + pilot.reply}[
        train.stage
    ]
    sequences = train.prompts_per_step * (train.rollouts_per_prompt if train.stage == "rl" else 1)
    return training_seconds(config, shape, gpu, steps * sequences * sequence)


def _steps(stage: Stage, built: int | None) -> int:
    if stage.module != TRAIN:
        return 0
    rows = None if stage.rows is None or stage.rows.is_file() else built
    return stage.steps(rows) or stage.config.train.steps


def _built(config: Config) -> int:
    """Upper bound of the turns of built conversations; each turn is a training row."""
    return config.train.eval_tasks * ((config.rollout.max_messages or 0) // 2)
