"""Metrics of complete conversations, registered by their names in reward.weights, and the judge that some of them use.

Custom metrics are set as package.module:Class in reward.metrics.NAME.metric, or directly as a name in reward.weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_collab.data.transcript import quoted, render
from megatron_collab.llm.answer import Field, LlmError, how_to_answer
from megatron_collab.llm.endpoint import SERVED
from megatron_collab.reward.explanations import explain, gather_in_order
from megatron_collab.settings import (
    EndpointConfig,
    Extension,
    Prompt,
    PromptError,
    Resolved,
    ServedConfig,
    build,
    lookup,
    read_prompt,
    require,
)
from megatron_collab.types import Conversation, Missing, Score, Task

if TYPE_CHECKING:  # LiteLLM takes a second to import, and checking the settings needs none of it
    from megatron_collab.llm.client import LlmClient
    from megatron_collab.llm.tape import Tape

METRICS = {
    "accuracy": f"{__name__}.accuracy:Accuracy",
    "asks": f"{__name__}.counting:Asks",
    "bleu": f"{__name__}.bleu:Bleu",
    "generative": f"{__name__}.judged:Generative",
    "information_gain": f"{__name__}.information_gain:InformationGain",
    "interactivity": f"{__name__}.judged:Interactivity",
    "pass_rate": f"{__name__}.pass_rate:PassRate",
    "reward_model": f"{__name__}.reward_model:RewardModel",
    "rubric": f"{__name__}.rubric:Rubric",
    "token_amount": f"{__name__}.counting:TokenAmount",
    "turn_rewards": f"{__name__}.counting:TurnRewards",
    "verl": f"{__name__}.verl:VerlMetric",
}
PLACEHOLDERS = ("conversation", "goal", "answer", "question")
VARIABLES = (*PLACEHOLDERS, "task_desc", "metadata")  # of the judges' prompts
THOUGHT = Field("thought", str, help="why, in a few sentences")
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")  # does not match the braces of a JSON object


class Metric(Extension):
    """Base of the metrics of ended conversations. `Options`: a frozen dataclass, set as reward.metrics.NAME.SETTING.

    `ground_truth`: facts decide the score, such as the task's answer or tests; `learned`: a reward model does. If both
    kinds are scored, sentinels of reward hacking compare them.
    """

    ground_truth: ClassVar[bool] = False
    learned: ClassVar[bool] = False

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
    def questions(cls, options: Any) -> int:
        """The most questions to a judge for a score; of a metric that scores turns, for a turn's."""
        return 1

    @classmethod
    def reads_tokens(cls, options: Any) -> bool:
        """Whether it reads token ids, which transcripts lack; if so, it cannot rescore recorded conversations."""
        return False

    @classmethod
    def answer_lead(cls, options: Any) -> str | None:
        """The text before the task's answer in the reply whose log-probs it reads; None if it reads none.

        The policy's servers compute them once the conversation has ended, as `answer_log_probs` of the conversation.
        """
        return None

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

    @classmethod
    def unscorable(cls, options: Any, tasks: Sequence[Task]) -> Mapping[int, str]:
        """By place in `tasks`, why no conversation of the task would get a score, with the remedy.

        Called before a run starts with a sample of each source's tasks; the run is refused if it is all of them.
        """
        return {}

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        """The score of the complete conversation, including the policy's last reply; its first turn is the trained one.

        None: the metric does not apply to this task. Missing(why): it applies, but no score is available. If the metric
        scores turns, it is the sum of their scores.
        """
        scores = await self.score_turns(task, conversation)
        return scores if scores is None or isinstance(scores, Missing) else float(sum(scores))

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float] | Missing | None:
        """Instead of `score`: a number for each of conversation.turns; None and Missing as in `score`.

        With rollout.futures=0 reward.turn_credit takes them as rewards of their turns, else their sum is the score.
        """
        raise NotImplementedError

    @classmethod
    def scores_turns(cls, options: Any) -> bool:
        """Whether the metric scores turns with these options; by default, if it defines `score_turns`."""
        return cls.score_turns is not Metric.score_turns

    async def ask_judge(
        self,
        rubric: Prompt | str,
        task: Task,
        conversation: Conversation,
        fields: Sequence[Field],
        variables: Mapping[str, Any] = {},
    ) -> dict[str, Any] | Missing:
        """The judge's values of `fields`; see `prompt` for the variables of `rubric`, to which `variables` are added.

        If the options have a `panel`, its models are asked too: a number or truth value is their mean, and Missing if
        one of them gives none. Each judge's answer, and its value of the field `thought` as the reason, with its model
        if there are several, are recorded with the score.
        """
        try:
            question = prompt(rubric, task, conversation, fields, variables)
        except PromptError as error:
            return Missing(str(error))
        models = [getattr(self.options, "model", None), *panel(self.options)]
        named = len(models) > 1
        calls = [self.judge.ask(question, fields, model=model, named=named) for model in models]
        answers = await gather_in_order(calls)
        usable = list[dict[str, Any]]()
        for answer in answers:
            if isinstance(answer, Missing):
                return answer
            usable.append(answer)
        return self._consensus(usable, fields) if len(usable) > 1 else usable[0]

    def _consensus(self, answers: Sequence[Mapping[str, Any]], fields: Sequence[Field]) -> dict[str, Any]:
        """The means over a panel's `answers`; counts those in which judges differ by half the range of a field."""
        values, disputed = dict(answers[0]), False
        for field_ in fields:
            if field_.kind is not str:
                numbers = [float(answer[field_.name]) for answer in answers]
                values[field_.name] = sum(numbers) / len(numbers)
                disputed |= max(numbers) - min(numbers) >= field_.range / 2
        self.counters["panel_answers"] += 1
        self.counters["panel_disputed"] += disputed
        return values

    def explain(self, reason: str) -> None:
        """Record `reason` with the score that `score` is about to return; several reasons are joined."""
        explain(reason)


def panel(options: Any, setting: str = "panel") -> tuple[str, ...]:
    """The models that judge beside the first one, if a judged metric's options have a panel. Raises ConfigError."""
    models = getattr(options, "panel", None)
    if models is None:
        return ()
    is_list = isinstance(models, list | tuple) and all(isinstance(model, str) for model in models)
    remedy = "give a list of LiteLLM models; an option of a metric of yours that is something else needs another name"
    require(is_list, f"{setting}={models}: is no panel of judges; {remedy}")
    return tuple(models)


def find_metric(name: str, setting: str = "metric") -> type[Metric]:
    """The class of the metric `name`, from METRICS or package.module:Class. Raises ConfigError naming `setting`."""
    return lookup(name, setting, METRICS, Metric)


@dataclass(frozen=True)
class ScoredMetric(Resolved):
    """A metric of reward.weights, with the bound of its part in reward.clamp and its `settings` in reward.metrics.

    If the settings have `metric`, it names the class instead of `name`, so that the same metric can be used twice with
    different settings.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 0.0
    clamp: float | None = None

    @cached_property
    def kind(self) -> type[Metric]:
        renamed = self.settings.get("metric")
        return find_metric(renamed or self.name, f"reward.metrics.{self.name}.metric" if renamed else "reward.weights")

    @cached_property
    def options(self) -> Any:
        settings = {name: value for name, value in self.settings.items() if name != "metric"}
        return build(self.kind.Options, settings, f"reward.metrics.{self.name}.")

    @property
    def judged(self) -> bool:
        return self.kind.judged(self.options)

    @property
    def judge_model(self) -> str | None:
        """The model that judges instead of reward.judge.model."""
        return getattr(self.options, "model", None) if self.judged else None

    @property
    def panel(self) -> tuple[str, ...]:
        """The models that judge beside it."""
        return panel(self.options, f"reward.metrics.{self.name}.panel") if self.judged else ()

    @property
    def judge_calls(self) -> int:
        """The most calls of judges for a score."""
        return self.kind.questions(self.options) * (1 + len(self.panel)) if self.judged else 0

    @property
    def reads_tokens(self) -> bool:
        return self.kind.reads_tokens(self.options)

    @property
    def answer_lead(self) -> str | None:
        return self.kind.answer_lead(self.options)

    @property
    def served(self) -> ServedConfig | None:
        return self.kind.served(self.options)

    @property
    def scorer(self) -> str | None:
        """The name of the served model that scores for it: an entry of `servers`, or the metric's if it has its own."""
        model = self.served.model if self.served else None
        return model and (model.removeprefix(SERVED) if model.startswith(SERVED) else self.name)

    @property
    def scores_turns(self) -> bool:
        return self.kind.scores_turns(self.options)

    @property
    def selective(self) -> bool:
        """Whether there may be tasks to which it does not apply."""
        return self._defines("lacks")

    @property
    def tries_tasks(self) -> bool:
        """Whether it may find tasks that it cannot score."""
        return self._defines("unscorable")

    def lacks(self, task: Task) -> str | None:
        return self.kind.lacks(self.options, task)

    def check_task(self, task: Task) -> None:
        self.kind.check_task(self.options, task)

    def unscorable(self, tasks: Sequence[Task]) -> Mapping[int, str]:
        return self.kind.unscorable(self.options, tasks)

    def _defines(self, class_method: str) -> bool:
        """Whether the metric replaces a class method of Metric."""
        metric, base = (getattr(kind, class_method).__func__ for kind in (self.kind, Metric))
        return metric is not base

    def same_as(self, other: ScoredMetric) -> bool:
        """Whether both give the same scores."""
        return (self.kind, self.options) == (other.kind, other.options)

    def make(self, judge: Any, tape: Tape | None = None) -> Metric:
        metric = self.kind(self.options, judge)
        metric.name, metric.tape = self.name, tape
        return metric


def scorers(metrics: Mapping[str, ScoredMetric]) -> dict[str, str]:
    """By metric, the name of the served model that scores for it."""
    return {name: scorer for name, metric in metrics.items() if (scorer := metric.scorer)}


class Judge:
    """Client for the model of `reward.judge`, or another model at the same endpoint."""

    def __init__(self, client: LlmClient, endpoint: EndpointConfig) -> None:
        self.client, self.endpoint = client, endpoint

    async def ask(
        self, prompt: str, fields: Sequence[Field], *, model: str | None = None, named: bool = False
    ) -> dict[str, Any] | Missing:
        """The judge's values of `fields` for `prompt`; Missing if it gives no usable answer.

        Each prompt is sent once and its answer cached. `model` replaces the endpoint's model. The answer's text, also
        of an unusable answer, its `thought`, after the model if it is to be `named`, and the model's version explain
        the metric's score. Raises BudgetSpent.
        """
        endpoint = replace(self.endpoint, model=model or self.endpoint.model)
        try:
            answer = await self.client.answer(endpoint, [{"role": "user", "content": prompt}], fields, sample="0")
        except LlmError as error:
            explain("", error.answer)
            return Missing(str(error))
        thought = str(answer.values.get(THOUGHT.name, ""))
        explain(f"{endpoint.model}: {thought}" if named and thought else thought, answer.text, answer.version)
        return answer.values


def judges_prompt(file: str | None, default: str = "", variables: Sequence[str] = ()) -> Prompt:
    """The template of a metric's setting `prompt`, or the built-in template `default`. Raises ConfigError.

    It may use VARIABLES and `variables`.
    """
    rubric = read_prompt("prompt", file, default, (*VARIABLES, *variables))
    require("conversation" in rubric.used, f"{rubric.label}: lacks {{{{ conversation }}}}; add it")
    return rubric


def prompt(
    rubric: Prompt | str,
    task: Task,
    conversation: Conversation,
    fields: Sequence[Field],
    variables: Mapping[str, Any] = {},
) -> str:
    """The filled `rubric` (a template with VARIABLES, or text with {PLACEHOLDERS}) and how to answer with `fields`.

    `conversation` is the complete conversation with tools, `goal` what the user wants, `answer` the task's answer,
    `question` the task's last message, `task_desc` its description (from the metadata, else empty); `variables` are
    further ones. The texts are `quoted`, and placeholders inside them are not filled. Raises PromptError.
    """
    values: dict[str, Any] = {
        "goal": task.goal,
        "answer": task.answer,
        "question": task.messages[-1].content if task.messages else "",  # empty if the user opens the task
        "task_desc": str(task.metadata.get("task_desc") or ""),
        "metadata": task.metadata,
        **variables,
    }
    values = {"conversation": render(conversation.messages, tools=True), **quoted(values)}
    if isinstance(rubric, Prompt):
        filled = rubric.render(**values)
    else:
        filled = PLACEHOLDER.sub(lambda match: values[match[1]], rubric)
    return f"{filled}\n\n{how_to_answer(fields)}"
