"""What it costs to build conversations, on the console: at most before the first call, then as it is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from tqdm import tqdm

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.llm.endpoint import of_run
from megatron_collab.rollout import asked_models, cost
from megatron_collab.rollout.users.named import user_of
from megatron_collab.types import Task

SAY_EVERY = 60.0  # seconds


class Meter:
    """Of conversations about `tasks` that are built all at once."""

    def __init__(
        self, config: Config, tasks: Sequence[Task], title: str, spend: Callable[[], Mapping[str, float]]
    ) -> None:
        """`spend`: the totals of the run's limiter, those of earlier starts and of other sets among them."""
        self._title, self._spend = f"{len(tasks)} {title}", spend
        self._turns, self._ended = [0] * len(tasks), [False] * len(tasks)
        self._before, self._said = spend(), time.monotonic()
        turns, size = cost.of_turns(config), cost.task_tokens(tasks)
        models = _models(config, tasks)
        in_usd = [cost.at_most(turn, models, config, size).usd for turn in turns]
        self._weights = in_usd if all(in_usd) else [1.0] * len(turns)  # in relation to each other
        self._played = 0.0  # of these, in this start
        self._say_before(config, models, size)

    def turn(self, number: int, ended: bool, played: bool) -> None:
        """A turn of the conversation `number` is built; `played`: not by an earlier start."""
        self._played += self._weights[self._turns[number]] * played
        self._turns[number] += 1
        self._ended[number] = ended
        if any(self._ended) and time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            tqdm.write(self.line())

    def line(self) -> str:
        """What is spent, and once a conversation has ended what is still to come."""
        now = self._spend()
        spent, calls, unpriced = (now[name] - self._before[name] for name in ("usd", "calls", "unpriced"))
        said = f"{self._title}: {sum(self._ended)} have ended"
        if not calls:
            return said
        said += f"; {calls:.0f} calls, {spent:.4g} USD"
        if unpriced:
            return f"{said}, and {unpriced:.0f} calls whose price is not known"
        playing = [turns for turns, over in zip(self._turns, self._ended, strict=True) if not over]
        if not (spent and playing and any(self._ended)):
            return said
        ended = [turns for turns, over in zip(self._turns, self._ended, strict=True) if over]
        played = self._played + sum(self._weights[turns] for turns in playing) / 2
        more = spent * cost.still_to_play(ended, playing, self._weights) / played
        return f"{said}, about {more:.2g} USD to come"

    def _say_before(self, config: Config, models: cost.Models, size: float) -> None:
        said = f"{self._title}: {cost.of_building(config, len(self._turns))}"
        budget = config.llm.budget_usd
        if not any(models.values()):
            tqdm.write(said)
            return
        most = cost.at_most(cost.of_building(config, len(self._turns)), models, config, size)
        tqdm.write(f"{said}; at most {most}, where every message is as long as it may be")
        left = None if budget is None else budget - self._before["usd"]
        if left is not None and left < most.usd:
            out = "once it is spent the program ends, and the same command with a larger one goes on"
            tqdm.write(f"llm.budget_usd={budget:g}: {left:.4g} USD of it are left, which may not be enough; {out}")


def _models(config: Config, tasks: Sequence[Task]) -> cost.Models:
    """Those that are paid for, by role."""
    if config.llm.offline:
        return {}
    names = {user_of(task, config) for task in tasks}
    asked = {
        "assistant": asked_models.of_assistant(config),
        "user": asked_models.of_users(config, sorted(names)),
        "judge": asked_models.of_judges(config),
    }
    found = {role: [one.endpoint for one in some if not of_run(one.endpoint.model)] for role, some in asked.items()}
    if any(found.values()):
        patches.apply("litellm")  # which knows prices
    return found
