"""Prints the cost of building conversations: an upper bound before the first call, then what is spent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_collab import patches
from megatron_collab.config import PlayConfig
from megatron_collab.launch.spec import RunSpec
from megatron_collab.llm.endpoint import served_by_run
from megatron_collab.planning import llm_cost
from megatron_collab.types import Task

logger = logging.getLogger(__name__)

SAY_EVERY = 60.0  # seconds


class Meter:
    """The cost meter of conversations about `tasks`, which are built concurrently."""

    def __init__(
        self,
        config: PlayConfig,
        spec: RunSpec,
        tasks: Sequence[Task],
        title: str,
        spend: Callable[[], Mapping[str, float]],
    ) -> None:
        """`spend`: the totals of the run's limiter, including earlier starts and other sets."""
        self._title, self._spend = f"{len(tasks)} {title}", spend
        self._ended, self._before, self._reported = 0, spend(), time.monotonic()
        self._print_bound(config, spec, tasks)

    def turn(self, ended: bool) -> None:
        """Record a built turn, and whether its conversation has ended."""
        self._ended += ended
        if self._ended and time.monotonic() - self._reported >= SAY_EVERY:
            self._reported = time.monotonic()
            logger.info(self.line())

    def line(self) -> str:
        """The conversations that have ended, and what is spent in this start."""
        totals = self._spend()
        spent, calls, unpriced = (totals[name] - self._before[name] for name in ("usd", "calls", "unpriced"))
        line = f"{self._title}: {self._ended} done"
        if calls:
            line += f"; {calls:.0f} calls, {spent:.4g} USD"
        return f"{line}, plus {unpriced:.0f} calls of unknown price" if unpriced else line

    def _print_bound(self, config: PlayConfig, spec: RunSpec, tasks: Sequence[Task]) -> None:
        assert spec.play
        models, calls = _models(config, spec, tasks), llm_cost.building_calls(spec.play, len(tasks))
        line = f"{self._title}: {calls}"
        budget = config.llm.budget_usd
        if not any(models.values()):
            logger.info(line)
            return
        bound = llm_cost.cost_bound(calls, models, config, llm_cost.task_tokens(tasks))
        logger.info(f"{line}; at most {bound} if every message has its maximum length")
        unspent = None if budget is None else budget - self._before["usd"]
        if unspent is not None and unspent < bound.usd:
            hint = "the program ends when it is used up; rerun with a larger one to continue"
            logger.info(f"llm.budget_usd={budget:g}: the remaining {unspent:.4g} USD may not be enough; {hint}")


def _models(config: PlayConfig, spec: RunSpec, tasks: Sequence[Task]) -> llm_cost.Models:
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
