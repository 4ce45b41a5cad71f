"""Metrics of whole conversations: a file each, named as in reward.weights. Adding one is adding a file.

The file NAME.py defines one class, NAME in CamelCase, that derives from `Metric`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.config import ConfigError, build, nearest
from megatron_collab.types import Conversation, Score, Task

if TYPE_CHECKING:  # LiteLLM takes a second to import, and checking the settings needs none of it
    from megatron_collab.reward.judge import Judge


@dataclass(frozen=True)
class NoOptions:
    """A metric without settings."""


class Metric:
    """What is asked of a conversation that has ended.

    `Options` is a frozen dataclass of the metric's own settings, set as reward.metrics.NAME.SETTING. `seconds` is
    about how long one score takes: it sizes the requests to the RewardWorkers.
    """

    Options: ClassVar[type] = NoOptions
    seconds: ClassVar[float] = 0.0

    def __init__(self, options: Any, judge: Judge) -> None:
        self.options = options
        self.judge = judge

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        """Why these options cannot work on this machine, with the way out; asked before a run starts."""
        return None

    @classmethod
    def judged(cls, options: Any) -> bool:
        """Whether these options need a judge: reward.judge.model, or the metric's own setting `model`."""
        return False

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        """The score of the whole conversation, the policy's last reply included; the trained turn is its first.

        None: the metric does not apply to this task. Missing(why): it does, but no score could be had.
        """
        raise NotImplementedError


def known() -> list[str]:
    """The names of all metrics, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> type[Metric]:
    """The metric of that name."""
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, "".join(word.capitalize() for word in name.split("_")))


def split(name: str, settings: Mapping[str, Any]) -> tuple[type[Metric], Any]:
    """The metric called `name` in reward.weights, and its options.

    `settings` are those of reward.metrics.`name`; `metric` among them names the file where it is not `name`, so that
    one metric can stand twice with different settings. Raises ConfigError, naming the setting, for an unknown one
    or one that is refused.
    """
    settings = dict(settings)
    kind = settings.pop("metric", name)
    if kind not in known():
        known_are = ", ".join(known())
        raise ConfigError(f"reward.weights.{name}: no such metric; known are {known_are}{nearest(kind, known())}")
    metric = find(kind)
    return metric, build(metric.Options, settings, f"reward.metrics.{name}.")
