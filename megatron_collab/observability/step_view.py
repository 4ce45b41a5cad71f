"""What a terminal shows of a training run: step, reward, evaluation, speed, cost, health, the last conversation."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.screen import duration
from megatron_collab.runtime.text import printable

if TYPE_CHECKING:  # rich takes a tenth of a second to import, and is needed on terminals only
    from rich.console import Console, ConsoleOptions, RenderResult

_BLOCKS = "▁▂▃▄▅▆▇█"
_RECENT = 40  # steps of the small curve, and of the mean time of a step
_MESSAGES, _MESSAGE_LENGTH = 4, 300  # of the conversation: last messages, characters of each
# Metrics that are shown if they are not 0: each is a sign that something goes wrong.
_HEALTH = re.compile(r"missing|servers/.*lost|count/user_(?!replies$|tool_calls$).*|llm/unpriced.*")


class StepView:
    """The view of the run `name`, which has done `done` of `steps` steps; rich draws it."""

    def __init__(self, name: str, steps: int, done: int) -> None:
        self._name, self._steps, self._done = name, steps, done
        self._metrics: Mapping[str, float] = {}
        self._rewards = deque[float](maxlen=_RECENT)
        self._step_ends = deque([time.monotonic()], maxlen=_RECENT + 1)
        self._usd = 0.0
        self._evaluation = ""
        self._alarm = ""
        self._messages: Sequence[Mapping[str, Any]] = ()

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step, which is counted from 0."""
        self._done, self._metrics = step + 1, metrics
        self._step_ends.append(time.monotonic())
        self._usd += metrics.get("llm/usd", 0.0)
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])

    def evaluation(self, text: str) -> None:
        """Show the line of an evaluation until the next one."""
        self._evaluation = text

    def alarm(self, text: str) -> None:
        self._alarm = text

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Show the last messages of a conversation, which are dicts with `role` and `content`."""
        self._messages = [message for message in messages if message.get("role") != "system"][-_MESSAGES:]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._name, "bold"),
            Text(f"step {self._done}/{self._steps}"),
            ProgressBar(max(self._steps, 1), self._done, width=30),
            Text(self._pace(), "dim"),
        )
        yield Rule(style="dim")
        yield head
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for label, text in self._rows():
            table.add_row(label, Text(text))
        yield table

    def _pace(self) -> str:
        """Mean time of a recent step, and of all that remain."""
        steps = len(self._step_ends) - 1
        if not steps:
            return ""
        seconds = (self._step_ends[-1] - self._step_ends[0]) / steps
        return f"{duration(seconds)} a step, {duration(seconds * (self._steps - self._done))} left"

    def _rows(self) -> list[tuple[str, str]]:
        metrics = self._metrics
        rows = []
        if self._rewards:
            error = metrics.get("reward_se", 0.0)
            rows.append(("reward", f"{self._rewards[-1]:.3f} ± {error:.3f}  {small_curve([*self._rewards])}"))
        if values := _named(metrics, "score/"):
            rows.append(("scores", values))
        if update := "  ".join(f"{name} {metrics[name]:.3g}" for name in _OF_UPDATE if name in metrics):
            rows.append(("update", update))
        if self._evaluation:
            rows.append(("evaluation", self._evaluation))
        if times := self._times():
            rows.append(("time", times))
        if self._usd or "llm/calls" in metrics:
            rows.append(("cost", f"{self._usd:.4g} USD, {metrics.get('llm/calls', 0):.0f} calls in the last step"))
        faults = {name: value for name, value in metrics.items() if _HEALTH.fullmatch(name)}
        health = [f"{name} {value:.3g}" for name, value in faults.items() if value]
        if health or self._metrics:
            rows.append(("health", "  ".join(health) or "nothing missing"))
        if self._alarm:
            rows.append(("alarm", self._alarm))
        for message in self._messages:
            text = printable(redact(str(message.get("content") or "")).replace("\n", " "))
            cut = text if len(text) <= _MESSAGE_LENGTH else text[: _MESSAGE_LENGTH - 1] + "…"
            rows.append((str(message.get("role")), cut))
        return rows

    def _times(self) -> str:
        """Seconds by stage with their share of the step, the servers' idle share, and trained tokens by second."""
        laps = {name.removeprefix("seconds/"): s for name, s in self._metrics.items() if name.startswith("seconds/")}
        total = sum(laps.values())
        if not total:
            return ""
        parts = [f"{name} {seconds:.1f} s ({100 * seconds / total:.0f} %)" for name, seconds in laps.items()]
        if "idle/servers" in self._metrics:
            parts.append(f"servers idle {100 * self._metrics['idle/servers']:.0f} %")
        if tokens := self._metrics.get("tokens"):
            parts.append(f"{tokens / total:.0f} trained tokens a second")
        return "  ".join(parts)


_OF_UPDATE = ("loss", "kl", "grad_norm", "lr", "dpo/accuracy", "mismatch/k3")


def _named(metrics: Mapping[str, float], prefix: str) -> str:
    parts = [f"{name.removeprefix(prefix)} {value:.3f}" for name, value in metrics.items() if name.startswith(prefix)]
    return "  ".join(parts)


def small_curve(values: Sequence[float]) -> str:
    """The values as blocks from the lowest to the highest: "▁▄█"; those that are not finite as blanks."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if abs(v) < float("inf") else " " for v in values)
