"""A language model as the user: any LiteLLM model, or the policy that is trained (user.model=policy).

It gets a system prompt (role, goal, persona, how to end the chat) and never sees the task's answer. With user.form=json
it gets the conversation in one message, and answers with a JSON object {current_answer, thought, response}. Otherwise
it gets the conversation as a chat (forms.py), and its reply is the message. If rollout/users/guardrails.py rejects a
message, the model is asked again, up to user.attempts times: with the complaint if user.form=json, else for another
sample.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_collab.data.transcript import quoted, render
from megatron_collab.llm.answer import Field, LlmError, MalformedAnswer
from megatron_collab.llm.endpoint import POLICY, SERVED, served_by_run
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.rollout.users.forms import chat_request, read_arguments, split_thought
from megatron_collab.rollout.users.guardrails import COMPLAINTS, EMPTY, refusal
from megatron_collab.runtime import files
from megatron_collab.settings import ConfigError, EndpointConfig, Prompt, PromptError, UserConfig, read_prompt
from megatron_collab.settings.schema import CHAT, JSON, USER_MODEL
from megatron_collab.types import Conversation, Message, Task

if TYPE_CHECKING:
    from megatron_collab.llm.reply import Reply

FIELDS = (
    Field("current_answer", str, help="the assistant's answer to your goal so far; empty if there is none"),
    Field("thought", str, help="what is still lacking, and what you say next"),
    Field("response", str, help="your next message"),
)

OPEN = "There is no message yet. You begin the conversation: write your first message."

CUT = "user_cut"  # counter of messages that were cut by user.max_tokens
ENDLESS = "user_endless_calls"  # counter of users who only call tools
_LONGEST_PERSONA = 1 << 16  # characters

VARIABLES = ("goal", "task_desc", "persona", "stop", "metadata")  # of user.prompt


_Answer = TypeVar("_Answer")
_OUT = {  # what to do if a message is refused at every attempt, by form
    (CHAT, CUT): "; raise max_tokens",
    (USER_MODEL, CUT): "; raise max_tokens",
    (USER_MODEL, EMPTY): "; if that is how the model ends a chat, its server left out the token: see user.stop",
}


@dataclass(frozen=True)
class _Draft:
    """A message that the model wrote, before the guardrails; `answer`: all that it wrote, as JSON."""

    text: str
    notes: Mapping[str, str]
    is_cut: bool = False
    answer: str = ""


class LlmUser(User):
    opens = True
    calls_tools = True

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self.model = argument or users.settings.model
        pool = users.settings.personas
        draw = random.Random(f"{users.directory.seed}/{task.id}")  # the same in every process
        self.persona = draw.choice(read_personas(pool)) if pool else str(task.metadata.get("persona") or "")

    @classmethod
    def unavailable(cls, argument: str, settings: UserConfig) -> str | None:
        if not (argument or settings.model):
            return "user.model is not set; set it to a LiteLLM model or to policy, or choose a user in user.name"
        model = argument or settings.model
        if settings.tools and settings.form != CHAT:
            return f"form={settings.form}: such a user calls no tools; set form={CHAT}, or tools=[]"
        if settings.tools and served_by_run(model):
            return f"model={model}: the run's own servers read no tool calls of users; choose another, or set tools=[]"
        if settings.form == USER_MODEL and settings.stop == UserConfig().stop and not settings.prompt:
            return f"form={USER_MODEL}: such users never write {settings.stop}; set stop to the token that ends a chat"
        try:
            users_prompt(settings)
            if (file := settings.personas) and not (Path(file).is_file() and read_personas(file)):
                return f"personas={file}: no such file, or it has no lines; write one persona per line, or remove it"
        except ConfigError as error:
            return str(error)
        except (ValueError, OSError) as error:
            return f"personas={error}"
        return None

    @classmethod
    def asks(cls, argument: str, settings: UserConfig) -> EndpointConfig | None:
        return replace(settings, model=argument or settings.model)

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        if settings.prompt:  # the built-in prompt fits every task
            system_prompt(settings, task)

    async def open(self) -> Message:
        message = await self._say(())
        if self.users.settings.stop in message.content:
            raise UserError(f"user {self.model}: ended the conversation before it began: {message.content[:200]!r}")
        return message

    async def reply(self, conversation: Conversation) -> UserReply:
        message = await self._say(conversation.messages)
        return self.says(message.content, private=message.private)

    async def _say(self, messages: Sequence[Message]) -> Message:
        """The user's next message, with private notes. Each attempt has the endpoint's retries and deadline."""
        config, task, reason = self.users.settings, self.task, ""
        try:
            system = system_prompt(config, task, self.persona)
            goalless_task = replace(task, goal="", metadata={**task.metadata, "task_desc": ""})
            instructions = system_prompt(config, goalless_task)
        except PromptError as error:
            raise UserError(f"user {self.model}: {error}") from error
        complaint: list[dict[str, str]] = []
        for attempt in range(config.attempts):
            if config.form == JSON:
                draft = await self._object(system, messages, complaint)
            else:
                draft = await self._reply(system, messages, attempt)
            self.users.counters["user_replies"] += 1
            refused = CUT if draft.is_cut else refusal(draft.text, task, instructions, messages)
            if refused is None:
                is_noted = any("persona" in message.private for message in messages)
                notes = {} if is_noted else {"persona": self.persona}
                return Message("user", draft.text, private={**notes, **draft.notes})
            self.users.counters[refused] += 1
            if config.form == JSON:
                complaint = [
                    {"role": "assistant", "content": draft.answer},
                    {"role": "user", "content": COMPLAINTS[refused]},
                ]
            reason = f"{refused}: {draft.text[:200]!r}{_OUT.get((config.form, refused), '')}"
        raise UserError(f"user {self.model}: {reason}")

    async def _object(self, system: str, messages: Sequence[Message], complaint: list[dict[str, str]]) -> _Draft:
        """A draft as an object, to a request that ends with the `complaint` about the last one."""
        conversation = {"role": "user", "content": render(messages) or OPEN}
        request = [{"role": "system", "content": system}, conversation, *complaint]

        async def ask(endpoint: EndpointConfig) -> dict[str, Any]:
            return await self.users.client.ask(endpoint, request, FIELDS, has_fallback=self.model == POLICY)

        answer = await self._first(ask, self.sample)
        notes = {name: answer[name] for name in ("thought", "current_answer")}
        return _Draft(str(answer["response"]), notes, answer=json.dumps(answer, ensure_ascii=False))

    async def _reply(self, system: str, messages: Sequence[Message], attempt: int) -> _Draft:
        """A draft as a chat's reply, after the calls of tools that the model makes before it."""
        config, tools = self.users.settings, self.tools
        schemas = tools.schemas if tools else ()
        sample = f"{self.sample}/{attempt}" if attempt else self.sample  # served models draw by it
        while True:
            request = chat_request(config.form, system, messages, tools.calls if tools else ())

            async def ask(endpoint: EndpointConfig, request: list[dict[str, Any]] = request) -> Reply:
                is_policy = self.model == POLICY
                return await self.users.client.reply(endpoint, request, tools=schemas, has_fallback=is_policy)

            reply = await self._first(ask, sample)
            if not (tools and reply.calls):
                message, thought = split_thought(reply.text)
                return _Draft(message, {"thought": reply.thoughts or thought}, reply.finish == "length")
            if tools.rounds == tools.most:
                self.users.counters[ENDLESS] += 1
                reason = f"wrote nothing after {tools.most} rounds of calls (rollout.max_tool_calls)"
                raise UserError(f"user {self.model}: {reason}")
            tools.rounds += 1
            for name, arguments in reply.calls:
                await tools.call(name, read_arguments(arguments))

    async def _first(self, ask: Callable[[EndpointConfig], Awaitable[_Answer]], sample: str) -> _Answer:
        """The answer of the first endpoint that gives one. Raises UserError."""
        failure: LlmError | None = None
        malformed = False
        for endpoint in self._endpoints(sample):
            try:
                return await ask(endpoint)
            except LlmError as error:
                failure, malformed = error, isinstance(error.__cause__, MalformedAnswer)
                if malformed:
                    break
        self.users.counters["user_malformed" if malformed else "user_failed"] += 1
        raise UserError(f"user {failure}") from failure

    def _endpoints(self, sample: str) -> list[EndpointConfig]:
        """The endpoints to try in order; for user.model=policy the servers in use, the next if one fails."""
        config = self.users.settings
        if config.form == USER_MODEL:  # the token that ends the chat is a special one, which servers would leave out
            config = replace(config, extra={"skip_special_tokens": False, **config.extra})
        if self.model != POLICY:
            served_by_run = str(self.model).startswith(SERVED)
            return [replace(config, model=f"{self.model}/{sample}" if served_by_run else self.model)]

        def rank(api_base: str) -> float:
            """Rank servers by task: its conversations share a prefix, which one server then caches for all of them."""
            return random.Random(f"{api_base.removesuffix('/v1')} {self.task.id}").random()

        engine = sorted(self.users.engine, key=rank)
        arguments, adapter = self.users.directory.template_args, self.users.adapter
        engine_arguments: dict[str, Any] = {"chat_template_kwargs": arguments} if arguments else {}
        engine_arguments |= {"lora_path": adapter} if adapter else {}
        config = replace(config, extra={**engine_arguments, **config.extra})
        return [replace(config, model=f"policy/{sample}", api_base=api_base) for api_base in engine]


def users_prompt(config: UserConfig, setting: str = "prompt") -> Prompt:
    """The prompt template in `config.prompt`, or the built-in one. Raises ConfigError naming `setting`."""
    return read_prompt(setting, config.prompt, "user_model" if config.form == USER_MODEL else "user", VARIABLES)


def system_prompt(config: UserConfig, task: Task, persona: str = "") -> str:
    """The user's instructions: the rendered prompt, and for user.form=json the answer format. Raises PromptError."""
    task_description = str(task.metadata.get("task_desc") or "")
    values = {"goal": task.goal, "task_desc": task_description, "persona": persona, "metadata": task.metadata}
    instructions = users_prompt(config).render(**quoted(values), stop=config.stop)
    if config.form != JSON:
        return instructions
    answer = "{" + ", ".join(f'"{field.name}": {field.help}' for field in FIELDS) + "}"
    return f"{instructions}\n\nAnswer with one JSON object and nothing else:\n{answer}\nAll three values are strings."


@cache
def read_personas(path: str) -> tuple[str, ...]:
    """The non-blank lines of a personas file. Raises ValueError, also for one that is too long for a prompt."""
    personas = tuple(line.strip() for line in files.read_text(Path(path)).split("\n") if line.strip())
    if any(len(persona) > _LONGEST_PERSONA for persona in personas):
        raise ValueError(f"{path}: a line has more than {_LONGEST_PERSONA} characters; write one persona per line")
    return personas
