"""Prints the cost of building conversations: an upper bound before the first call, then what is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tqdm import tqdm

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.launch.spec import RunSpec
from megatron_collab.llm.endpoint import served_by_run
from megatron_collab.planning import llm_cost
from megatron_collab.types import Task

SAY_EVERY = 60.0  # seconds


class Meter:
    """The cost meter of conversations about `tasks`, which are built concurrently."""

    def __init__(
        self,
        config: Config,
        spec: RunSpec,
        tasks: Sequence[Task],
        title: str,
        spend: Callable[[], Mapping[str, float]],
    ) -> None:
        """`spend`: the totals of the run's limiter, including earlier starts and other sets."""
        assert spec.play
        self._title, self._spend = f"{len(tasks)} {title}", spend
        self._turns, self._ended = [0] * len(tasks), [False] * len(tasks)
        self._before, self._reported = spend(), time.monotonic()
        turns, size = llm_cost.turn_calls(spec.play), llm_cost.task_tokens(tasks)
        models = _models(config, spec, tasks)
        in_usd = [llm_cost.cost_bound(turn, models, config, size).usd for turn in turns]
        self._weights = in_usd if all(in_usd) else [1.0] * len(turns)  # relative to each other
        self._played = 0.0  # weight of the turns played in this start
        self._print_bound(config, llm_cost.building_calls(spec.play, len(tasks)), models, size)

    def turn(self, number: int, ended: bool, played: bool) -> None:
        """Record a built turn of conversation `number`; `played` is False if an earlier start played it."""
        self._played += self._weights[self._turns[number]] * played
        self._turns[number] += 1
        self._ended[number] = ended
        if any(self._ended) and time.monotonic() - self._reported >= SAY_EVERY:
            self._reported = time.monotonic()
            tqdm.write(self.line())

    def line(self) -> str:
        """What is spent, and the expected remaining cost once a conversation has ended."""
        totals = self._spend()
        spent, calls, unpriced = (totals[name] - self._before[name] for name in ("usd", "calls", "unpriced"))
        line = f"{self._title}: {sum(self._ended)} done"
        if not calls:
            return line
        line += f"; {calls:.0f} calls, {spent:.4g} USD"
        if unpriced:
            return f"{line}, plus {unpriced:.0f} calls of unknown price"
        playing = [turns for turns, has_ended in zip(self._turns, self._ended, strict=True) if not has_ended]
        if not (spent and playing and any(self._ended)):
            return line
        ended = [turns for turns, has_ended in zip(self._turns, self._ended, strict=True) if has_ended]
        played = self._played + sum(self._weights[turns] for turns in playing) / 2
        remaining_usd = spent * llm_cost.remaining_weight(ended, playing, self._weights) / played
        return f"{line}, about {remaining_usd:.2g} USD to go"

    def _print_bound(self, config: Config, calls: llm_cost.Calls, models: llm_cost.Models, size: float) -> None:
        line = f"{self._title}: {calls}"
        budget = config.llm.budget_usd
        if not any(models.values()):
            tqdm.write(line)
            return
        bound = llm_cost.cost_bound(calls, models, config, size)
        tqdm.write(f"{line}; at most {bound} if every message has its maximum length")
        unspent = None if budget is None else budget - self._before["usd"]
        if unspent is not None and unspent < bound.usd:
            hint = "the program ends when it is used up; rerun with a larger one to continue"
            tqdm.write(f"llm.budget_usd={budget:g}: the remaining {unspent:.4g} USD may not be enough; {hint}")


def _models(config: Config, spec: RunSpec, tasks: Sequence[Task]) -> llm_cost.Models:
    """The paid models, by role."""
    if config.llm.offline:
        return {}
    assert spec.play
    names = {spec.play.users.name_of(task) for task in tasks}
    by_role = {
        "assistant": spec.assistants,
        "user": spec.endpoints_of(sorted(names)),
        "judge": spec.judges,
    }
    paid = {
        role: [model.endpoint for model in models if not served_by_run(model.endpoint.model)]
        for role, models in by_role.items()
    }
    if any(paid.values()):
        patches.apply("litellm")  # LiteLLM has the prices
    return paid
