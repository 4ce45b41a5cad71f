"""What a study is going to take, in USD and hours: by prices, what a pilot measured, and the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_collab.config import Config
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.llm.endpoint import of_run
from megatron_collab.llm.recording import SUFFIX, Recording
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.observability import evaluations
from megatron_collab.planning.duration import Gpu, sampling_seconds, training_seconds
from megatron_collab.reproduce.plan import BUILD, TRAIN, Stage, seed_names
from megatron_collab.rollout import asked_models, cost, recorded
from megatron_collab.rollout.cost import Calls, Cost, Means
from megatron_collab.runtime import device


@dataclass(frozen=True)
class Pilot:
    """What the pilot of a task measured, by role; `calls`: that it might have made at most.

    `replies`: the policy's in a conversation; `reply`: tokens of one.
    """

    means: Mapping[str, Means]
    calls: Calls
    replies: float
    reply: float

    def seconds(self, role: str) -> float:
        return self.means[role].seconds if role in self.means else 0.0


@dataclass(frozen=True)
class Expected:
    """Of a program. `hours` is None where there is no estimate: on a CPU."""

    title: str
    cost: Cost
    hours: float | None


def read(stage: Stage) -> Pilot:
    """What the pilot `stage` has measured; it is done."""
    calls, (seed,) = stage.calls, seed_names(1)
    means = {}
    if calls and any(calls.glob(f"*{SUFFIX}")):
        recording = Recording(calls)
        means = cost.measured(recording.stored(number).call() for number in range(len(recording)))
    name = evaluations.name_of(seed, evaluations.MODEL)
    rows = recorded.rows_of_evaluation(stage.folder, name)
    replies = [sum(message["role"] == "assistant" for message in row["messages"]) for row in rows]
    tokens = float(evaluations.read(stage.folder)[name].get("turn_tokens", 0.0))
    return Pilot(means, _calls(stage.config, stage, 0), sum(replies) / max(1, len(replies)), tokens)


def expected(stages: Sequence[Stage], pilots: Mapping[str, Pilot], shape: ModelShape, gpu: Gpu) -> list[Expected]:
    """Of each program that asks models or trains; those of a task whose pilot is in `pilots`."""
    built = {stage.task: _built(stage.config) for stage in stages if stage.module == BUILD}
    found = []
    for stage in stages:
        if not (stage.prepares or stage.first or stage.done):
            steps = _steps(stage, built.get(stage.task))
            found.append(_expected(stage, stage.config, steps, pilots[stage.task], shape, gpu))
    return found


def total(found: Sequence[Expected]) -> Expected:
    unpriced = dict.fromkeys(name for one in found for name in one.cost.unpriced)
    error = math.sqrt(sum(one.cost.error**2 for one in found))
    hours = [one.hours for one in found]
    summed = None if None in hours else sum(hour or 0.0 for hour in hours)
    return Expected("all", Cost(sum(one.cost.usd for one in found), tuple(unpriced), error), summed)


def _expected(stage: Stage, config: Config, steps: int, pilot: Pilot, shape: ModelShape, gpu: Gpu) -> Expected:
    calls = _calls(config, stage, steps)
    usd = cost.forecast(calls, pilot.means, pilot.calls)
    paid = [one.endpoint for one in asked_models.of_assistant(config) if not of_run(one.endpoint.model)]
    if paid and stage.module != TRAIN:  # the policy has played the pilot
        read = pilot.means["user"].prompt_tokens if "user" in pilot.means else 0.0
        most = cost.at_most(Calls(assistant=calls.assistant), {"assistant": paid}, config, read)
        usd = Cost(usd.usd + most.usd, usd.unpriced + most.unpriced, usd.error)
    if config.launch.device != device.GPU:
        return Expected(stage.title, usd, None)
    served = not (paid and stage.module != TRAIN)
    seconds = _training(config, steps, pilot, shape, gpu) if stage.module == TRAIN else 0.0
    conversations, turns, times = _sampled(config, stage, steps, pilot)
    if times:
        wait = pilot.seconds("user") + pilot.seconds("judge") / max(1.0, turns)
        reply = pilot.reply if served else 0.0
        seconds += times * sampling_seconds(config, shape, gpu, conversations, turns, reply, wait)
    return Expected(stage.title, usd, seconds / 3600)


def _calls(config: Config, stage: Stage, steps: int) -> Calls:
    if stage.module == TRAIN:
        return cost.of_training(config, steps)
    if stage.module == BUILD:
        return cost.of_building(_building(config), config.train.eval_tasks)
    each = (cost.of_evaluation(config, one, one.tasks or 0) for one in evaluation_sets(config))
    return sum(each, Calls())


def _sampled(config: Config, stage: Stage, steps: int, pilot: Pilot) -> tuple[int, float, int]:
    """Conversations that are begun together, replies one after the other in each, and how often that happens."""
    rollout, train = config.rollout, config.train
    later = 1.0 + min(rollout.max_user_turns, rollout.max_assistant_turns - 1)
    if stage.module == TRAIN:
        played = train.prompts_per_step * train.rollouts_per_prompt * max(1, rollout.futures)
        return played, later, steps if train.stage == "rl" else 0
    if stage.module == BUILD:
        played = train.eval_tasks * config.build.candidates * max(1, rollout.futures)
        return played, later * (rollout.max_messages or 0) / 2, 1
    sets = evaluation_sets(config)
    return max(one.tasks or 0 for one in sets), pilot.replies, len(sets)


def _training(config: Config, steps: int, pilot: Pilot, shape: ModelShape, gpu: Gpu) -> float:
    """Seconds; a conversation has as many tokens of the user as of the policy, a prompt half of one."""
    train, whole = config.train, 2 * pilot.replies * pilot.reply
    sequence = {"sft": whole, "dpo": whole / 2 + 2 * pilot.reply, "rl": whole / 2 + pilot.reply}[train.stage]
    sequences = train.prompts_per_step * (train.rollouts_per_prompt if train.stage == "rl" else 1)
    return training_seconds(config, shape, gpu, steps * sequences * sequence)


def _steps(stage: Stage, built: int | None) -> int:
    if stage.module != TRAIN:
        return 0
    rows = None if stage.rows is None or stage.rows.is_file() else built
    return stage.steps(rows) or stage.config.train.steps


def _built(config: Config) -> int:
    """Turns of conversations that are built, at most: as many rows are trained on."""
    return config.train.eval_tasks * ((config.rollout.max_messages or 0) // 2)


def _building(config: Config) -> Config:
    return replace(config, train=replace(config.train, rollouts_per_prompt=config.build.candidates))
