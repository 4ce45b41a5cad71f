"""Metrics of complete conversations, registered by their names in reward.weights, and the judge that some of them use.

Custom metrics are set as package.module:Class in reward.metrics.NAME.metric, or directly as a name in reward.weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_collab.config import (
    Config,
    EndpointConfig,
    Extension,
    Prompt,
    PromptError,
    RewardConfig,
    ServedConfig,
    build,
    lookup,
    read_prompt,
    require,
)
from megatron_collab.data.transcript import render
from megatron_collab.inference import served as served_by_run
from megatron_collab.llm.answer import Field, LlmError, how_to_answer
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.types import Conversation, Missing, Score, Task

if TYPE_CHECKING:  # LiteLLM takes a second to import, and checking the settings needs none of it
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.llm.tape import Tape

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
PLACEHOLDERS = ("conversation", "goal", "answer", "question")
VARIABLES = (*PLACEHOLDERS, "task_desc", "metadata")  # of the judges' prompts
THOUGHT = Field("thought", str, help="why, in a few sentences")
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")  # does not match the braces of a JSON object


class Metric(Extension):
    """Base of the metrics of ended conversations. `Options`: a frozen dataclass, set as reward.metrics.NAME.SETTING."""

    def __init__(self, options: Any, judge: Judge) -> None:
        super().__init__(options)
        self.judge = judge
        self.name = ""  # in reward.weights
        self.tape: Tape | None = None  # records or replays its requests to models other than the judge
        self.servers: Sequence[tuple[str, str]] = ()  # address and key of each server that the run started for `served`
        self.counters: Counter[str] = Counter()  # shown as count/METRIC_NAME

    @classmethod
    def unavailable(cls, options: Any) -> str | None:
        """Why these options cannot work on this machine, with the remedy; called before a run starts."""
        return None

    @classmethod
    def judged(cls, options: Any) -> bool:
        """Whether these options need a judge: reward.judge.model, or the metric's setting `model`."""
        return False

    @classmethod
    def reads_tokens(cls, options: Any) -> bool:
        """Whether it reads token ids, which transcripts lack; if so, it cannot rescore recorded conversations."""
        return False

    @classmethod
    def served(cls, options: Any) -> ServedConfig | None:
        """The model that the run serves for these options, if their `model` names one, or an entry of `servers`."""
        return None

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        """What the metric needs and the task lacks, as "an answer"; None if it applies. Called before a run starts."""
        return None

    @classmethod
    def check_task(cls, options: Any, task: Task) -> None:
        """Raises ValueError, with the remedy, if the metric cannot read the task; called before a run starts."""

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        """The score of the complete conversation, including the policy's last reply; its first turn is the trained one.

        None: the metric does not apply to this task. Missing(why): it applies, but no score is available.
        """
        raise NotImplementedError

    async def ask_judge(
        self, rubric: Prompt | str, task: Task, conversation: Conversation, fields: Sequence[Field]
    ) -> dict[str, Any] | Missing:
        """The judge's values of `fields`; see `prompt` for the variables of `rubric`."""
        try:
            question = prompt(rubric, task, conversation, fields)
        except PromptError as error:
            return Missing(str(error))
        return await self.judge.ask(question, fields, model=getattr(self.options, "model", None))


def find_metric(name: str, setting: str = "metric") -> type[Metric]:
    """The class of the metric `name`, from METRICS or package.module:Class. Raises ConfigError naming `setting`."""
    return lookup(name, setting, METRICS, Metric)


def split(name: str, settings: Mapping[str, Any]) -> tuple[type[Metric], Any]:
    """Class and options of the metric `name` of reward.weights. Raises ConfigError naming the setting that is refused.

    `settings` are those of reward.metrics.`name`. If they have `metric`, it names the metric instead of `name`, so that
    the same metric can be used twice with different settings.
    """
    settings = dict(settings)
    renamed = settings.pop("metric", None)
    kind = find_metric(renamed or name, f"reward.metrics.{name}.metric" if renamed else "reward.weights")
    return kind, build(kind.Options, settings, f"reward.metrics.{name}.")


def served_models(config: Config) -> dict[str, tuple[str, ServedConfig]]:
    """The models, other than the policy, that the run serves: by name, the group of its settings and the model.

    These are the entries of `servers` and the models of metrics, by metric name. Empty if llm.offline: recorded calls
    answer everything. Raises ConfigError as `split` does.
    """
    models = {name: (f"servers.{name}", model) for name, model in served_by_run.server_entries(config).items()}
    if config.llm.offline:
        return {}
    for name, (kind, options) in _kinds(config.reward).items():
        if (model := kind.served(options)) and not model.model.startswith(SERVED):
            message = f"servers.{name}: the servers of metric {name} have this name; choose another name"
            require(name not in models, message)
            models[name] = f"reward.metrics.{name}", model
    return models


def scorers(reward: RewardConfig) -> dict[str, str]:
    """Per metric of reward.weights, the name of the served model that scores for it. Raises as `split` does."""
    models = {name: kind.served(options) for name, (kind, options) in _kinds(reward).items()}
    return {
        name: model.model.removeprefix(SERVED) if model.model.startswith(SERVED) else name
        for name, model in models.items()
        if model
    }


def _kinds(reward: RewardConfig) -> dict[str, tuple[type[Metric], Any]]:
    return {name: split(name, reward.metrics.get(name, {})) for name in reward.weights}


def lacks(reward: RewardConfig) -> dict[str, Callable[[Task], str | None]]:
    """`Metric.lacks` by metric of reward.weights, for metrics that override it. Raises ConfigError."""
    kinds = _kinds(reward)
    base = Metric.lacks.__func__  # type: ignore[attr-defined]  # function of a class method
    limited = {n: kind for n, kind in kinds.items() if kind[0].lacks.__func__ is not base}  # type: ignore[attr-defined]
    return {name: partial(kind.lacks, options) for name, (kind, options) in limited.items()}


def task_checks(reward: RewardConfig) -> dict[str, Callable[[Task], None]]:
    """`Metric.check_task` by metric of reward.weights. Raises ConfigError."""
    return {name: partial(kind.check_task, options) for name, (kind, options) in _kinds(reward).items()}


class Judge:
    """Client for the model of `reward.judge`, or another model at the same endpoint."""

    def __init__(self, client: LlmClient, endpoint: EndpointConfig) -> None:
        self.client, self.endpoint = client, endpoint

    async def ask(self, prompt: str, fields: Sequence[Field], *, model: str | None = None) -> dict[str, Any] | Missing:
        """The judge's values of `fields` for `prompt`; Missing if it gives no usable answer.

        Each prompt is sent once and its answer cached. `model` replaces the endpoint's model. Raises BudgetSpent.
        """
        endpoint = replace(self.endpoint, model=model or self.endpoint.model)
        try:
            return await self.client.ask(endpoint, [{"role": "user", "content": prompt}], fields, sample="0")
        except LlmError as error:
            return Missing(str(error))


def judges_prompt(file: str | None, default: str = "") -> Prompt:
    """The template of a metric's setting `prompt`, or the built-in template `default`. Raises ConfigError."""
    rubric = read_prompt("prompt", file, default, VARIABLES)
    require("conversation" in rubric.used, f"{rubric.label}: lacks {{{{ conversation }}}}; add it")
    return rubric


def prompt(rubric: Prompt | str, task: Task, conversation: Conversation, fields: Sequence[Field]) -> str:
    """The filled `rubric` (a template with VARIABLES, or text with {PLACEHOLDERS}) and how to answer with `fields`.

    `conversation` is the complete conversation with tools, `goal` what the user wants, `answer` the task's answer,
    `question` the task's last message, `task_desc` its description (from the metadata, else empty). Placeholders inside
    the values are not filled. Raises PromptError.
    """
    values = {
        "conversation": render(conversation.messages, tools=True),
        "goal": task.goal,
        "answer": task.answer,
        "question": task.messages[-1].content if task.messages else "",  # empty if the user opens the task
    }
    if isinstance(rubric, Prompt):
        description = str(task.metadata.get("task_desc") or "")
        filled = rubric.render(**values, task_desc=description, metadata=task.metadata)
    else:
        filled = PLACEHOLDER.sub(lambda match: values[match[1]], rubric)
    return f"{filled}\n\n{how_to_answer(fields)}"
