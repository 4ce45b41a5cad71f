"""Users from a log: a model describes the user of a conversation, and the description becomes a task.

Countable properties are counted here: the user's messages and their length. The model gives the others: the goal,
whether it was reached, who the user is and how they write; and the remaining personal data in the conversation, which
is then replaced in all output.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from megatron_collab.config import UsersFromLogsConfig
from megatron_collab.data.transcript import render
from megatron_collab.inference.served import ModelServers
from megatron_collab.launch import server_specs
from megatron_collab.llm.answer import AnswerTooLong, Field, LlmError, how_to_answer
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.caller import ask_as
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.endpoint import SERVED, token_budget
from megatron_collab.llm.limiter import local_limiter
from megatron_collab.llm.price import Prices, tokens_at_most
from megatron_collab.llm.tape import open_tape
from megatron_collab.runtime import network
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.screen import progress
from megatron_collab.settings import EndpointConfig, Prompt
from megatron_collab.types import Message, Task
from megatron_collab.user_logs.logs import LoggedConversation

logger = logging.getLogger(__name__)

DETAIL = "DETAIL"  # placeholder kind
FIELDS = (
    Field("goal", str, help='what the user wants, with every fact that they give, to the user: "You want …"'),
    Field("reached", str, choices=("yes", "partly", "no"), help="whether the user got what they wanted"),
    Field("gave_up", bool, help="whether the user left, or turned to something else, without what they wanted"),
    Field("persona", str, help='who the user is, in one or two sentences, to the user: "You are …"'),
    Field("style", str, help='how the user writes, in one sentence, to the user: "You write …"'),
    Field(
        "names",
        str,
        help="names of people in the conversation, each as it is written there, separated by |; empty if none",
    ),
    Field(
        "details",
        str,
        help="addresses, and numbers of accounts, customers and documents, as they are written there, separated by |; "
        "empty if none",
    ),
)
_SEPARATOR = re.compile(r"[|\n]")
# Answers of a model that has nothing to tell.
_NOTHING = re.compile(
    r"\W*(?:you (?:are|want|write) )?(?:(?:there (?:are|is) )?"
    r"(?:none|nothing|nobody|not|no (?:names?|details?|information))?(?: (?:is|are|were))?"
    r"(?: ?(?:given|known|mentioned|provided|found|stated|specified|available|applicable))?"
    r"|n\W?a|no|null|nil|empty|unknown|unclear|unspecified|unnamed|anonymous|undefined|keine?|unbekannt|нет|неизвестно"
    r"|无|没有|未知|なし|不明|없음)\W*",
    re.IGNORECASE,
)
_FREE = ("goal", "persona", "style", "names", "details")
# Errors caused by the conversation, which would recur on another attempt.
_FINAL = (
    "AnswerTooLong",
    "MalformedAnswer",
    "BadRequestError",
    "ContextWindowExceededError",
    "ContentPolicyViolationError",
)


class NoDescription(LlmError):
    """The model cannot describe a conversation, and another attempt would fail too."""


def question_about(prompt: Prompt, logged: LoggedConversation) -> str:
    """The prompt about a conversation. Raises PromptError."""
    return f"{prompt.render(conversation=render(logged.messages))}\n\n{how_to_answer(FIELDS)}"


async def describe_user(
    client: LlmClient, endpoint: EndpointConfig, question: str, logged: LoggedConversation, opens: bool = False
) -> Task:
    """The task that the conversation was about; `opens`: the simulated user opens it with a generated message.

    Raises NoDescription, LlmError if another attempt may succeed, BudgetSpent, NotRecorded.
    """
    try:
        answer = await client.ask(endpoint, [{"role": "user", "content": question}], FIELDS, sample="0")
    except LlmError as error:
        # The kind of the last error is in the text, since a recording keeps only that.
        kind = str(error).removeprefix(f"{endpoint.model}: ").partition(":")[0]
        kind = AnswerTooLong.__name__ if isinstance(error, AnswerTooLong) else kind
        if kind not in _FINAL:
            raise
        raise NoDescription(kind) from error
    places = logged.placeholders
    answer |= {name: _stated(answer[name]) for name in _FREE}
    for field, placeholder in (("names", "PERSON"), ("details", DETAIL)):
        for text in _SEPARATOR.split(answer[field]):
            places.add(_stated(text), placeholder)
    clean = {name: places.replaced(value) for name, value in answer.items() if isinstance(value, str)}
    if not clean["goal"].strip():
        raise NoDescription("an empty goal")
    opening = () if opens else (Message("user", places.replaced("\n".join(logged.opening))),)
    return Task(logged.name, opening, clean["goal"], "", "", _metadata(logged, {**answer, **clean}))


def _stated(answer: str) -> str:
    """An answer of the model; empty if it says that there is nothing to tell."""
    return "" if _NOTHING.fullmatch(answer) else answer


def _metadata(logged: LoggedConversation, answer: Mapping[str, Any]) -> dict[str, Any]:
    messages = len(logged.user_texts)
    words = round(median(len(text.split()) for text in logged.user_texts))
    count = f"{messages} message{'s' if messages > 1 else ''}"
    patience = f"give up after {count}" if answer["gave_up"] else f"keep trying for {count} or more"
    length_hint = f"A message of yours has about {words} words. If you do not get what you want, you {patience}."
    persona = " ".join(filter(None, [*(answer[name].strip() for name in ("persona", "style")), length_hint]))
    outcome = {name: answer[name] for name in ("reached", "gave_up")}
    return {"persona": persona, **outcome, "messages": messages, "words": words}


def cost(config: UsersFromLogsConfig, questions: Sequence[str]) -> str:
    """A line with the number of calls for `questions` and their maximum cost."""
    model, llm = str(config.reward.judge.model), config.llm
    if llm.offline:
        return f"{len(questions)} descriptions by {model}, replayed from {llm.replay}; no calls are made"
    prompt, answer = tokens_at_most(*questions), len(questions) * token_budget(config.reward.judge)
    usd = Prices(llm.prices).at_most(model, prompt, answer)
    price = _price({"usd": usd or 0.0, "unpriced": usd is None})
    return f"{len(questions)} calls of {model}: at most {prompt} tokens of prompts and {answer} of answers, {price}"


def _price(totals: Mapping[str, float]) -> str:
    return "at an unknown price" if totals["unpriced"] else f"{totals['usd']:.4g} USD"


async def describe_all(
    config: UsersFromLogsConfig,
    out: Path,
    cache: Path,
    logged: Mapping[str, LoggedConversation],
    questions: Mapping[str, str],
    opens: bool,
    dropped: Counter[str],
) -> list[Task]:
    """A task for each conversation of `logged` (by name) that the model describes; `dropped` counts the failures.

    `out`: the folder of the tasks. Answers are cached in the folder `cache`, so that another start only asks for the
    rest. Raises RunStopped if another attempt may describe some of them, BudgetSpent, NotRecorded.
    """
    unanswered = list[str]()

    async def describe(name: str, conversation: LoggedConversation) -> Task | None:
        ask_as(name)
        try:
            return await describe_user(client, config.reward.judge, questions[name], conversation, opens)
        except NoDescription as error:
            reason = f"that the model does not describe ({error})"
            if not dropped[reason]:
                logger.info(f"not described: {conversation.placeholders.replaced(str(error.__cause__ or error))}")
            dropped[reason] += 1
        except LlmError as error:
            unanswered.append(conversation.placeholders.replaced(str(error)))
        finally:
            bar.update(1)
        return None

    with (
        _client(config, out, cache) as client,
        closing(progress("describing users", len(logged), "conversation")) as bar,
    ):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(describe(name, conversation)) for name, conversation in logged.items()]
        except ExceptionGroup as errors:  # the first error cancels the other tasks
            raise errors.exceptions[0] from None
        finally:
            logger.info(f"used in this start: {client.totals['tokens']:.0f} tokens, {_price(client.totals)}")
    if unanswered:
        hint = "rerun the command to retry only these"
        raise RunStopped(f"{len(unanswered)} conversations were not described; the first: {unanswered[0]}; {hint}")
    return [description for task in tasks if (description := task.result())]


@contextmanager
def _client(config: UsersFromLogsConfig, out: Path, cache: Path) -> Iterator[LlmClient]:
    """A client for reward.judge.model; if that is one of `servers`, it is served within the context."""
    model, served = str(config.reward.judge.model), {}
    answers = Cache(cache)
    with ExitStack() as stack:
        if model.startswith(SERVED) and not config.llm.offline:
            name = model.removeprefix(SERVED)
            servers = stack.enter_context(ModelServers(server_specs.served_alone(config, name, cache)))
            servers.pool.begin()
            while not servers.ready(config.launch.timeout):
                pass
            served[name] = servers.model
            os.environ |= network.without_proxy(url for url, _ in servers.model.addresses)
        limiter = local_limiter(config.llm, cache / "spend.json")
        stack.callback(limiter.write)
        yield LlmClient(limiter, answers, served=served, prices=config.llm.prices, tape=open_tape(config.llm, out))
