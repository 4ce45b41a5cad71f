"""Metrics of whole conversations, by the names that reward.weights gives them.

Others are given as package.module:Class in reward.metrics.NAME.metric, or directly as the name in reward.weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_collab.config import build, lookup
from megatron_collab.config.extension import NoOptions
from megatron_collab.llm.answer import Field
from megatron_collab.reward.judge import Judge, prompt
from megatron_collab.types import Conversation, Missing, Score, Task

METRICS = {
    "accuracy": f"{__name__}.accuracy:Accuracy",
    "asks": f"{__name__}.counting:Asks",
    "bleu": f"{__name__}.bleu:Bleu",
    "generative": f"{__name__}.judged:Generative",
    "interactivity": f"{__name__}.judged:Interactivity",
    "pass_rate": f"{__name__}.pass_rate:PassRate",
    "reward_model": f"{__name__}.reward_model:RewardModel",
    "token_amount": f"{__name__}.counting:TokenAmount",
    "turn_rewards": f"{__name__}.counting:TurnRewards",
}


class Metric:
    """Base of the metrics: scores conversations that have ended.

    `Options` is a frozen dataclass of the metric's own settings, set as reward.metrics.NAME.SETTING.
    """

    Options: ClassVar[type] = NoOptions

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

    async def ask_judge(
        self, rubric: str, task: Task, conversation: Conversation, fields: Sequence[Field]
    ) -> dict[str, Any] | Missing:
        """The judge's values of `fields`; see `judge.prompt` for the placeholders of `rubric`."""
        asked = prompt(rubric, task, conversation, fields)
        return await self.judge.ask(asked, fields, model=getattr(self.options, "model", None))


def find_metric(name: str, setting: str = "metric") -> type[Metric]:
    """The metric called `name` in METRICS, or given as package.module:Class. Raises ConfigError naming `setting`."""
    return lookup(name, setting, METRICS, Metric)


def split(name: str, settings: Mapping[str, Any]) -> tuple[type[Metric], Any]:
    """The metric called `name` in reward.weights, and its options.

    `settings` are those of reward.metrics.`name`; `metric` among them says which metric it is where that is not
    `name`, so that one metric can stand twice with different settings. Raises ConfigError, naming the setting, for an
    unknown metric and for options that are refused.
    """
    settings = dict(settings)
    renamed = settings.pop("metric", None)
    kind = find_metric(renamed or name, f"reward.metrics.{name}.metric" if renamed else "reward.weights")
    return kind, build(kind.Options, settings, f"reward.metrics.{name}.")
