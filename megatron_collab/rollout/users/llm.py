"""A language model as the user: any LiteLLM model, or the policy that is trained (user.model=policy).

It gets a system prompt (role, goal, persona, how to end the chat, answer format) and one message with the conversation,
and answers with a JSON object {current_answer, thought, response}. It never sees the task's answer. If
rollout/users/guardrails.py rejects a message, the model is asked again with the complaint, up to user.attempts times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_collab.config import ConfigError, EndpointConfig, Prompt, PromptError, UserConfig, read_prompt
from megatron_collab.data.transcript import quoted, render
from megatron_collab.llm.answer import Field, LlmError, MalformedAnswer
from megatron_collab.llm.endpoint import POLICY, SERVED
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.rollout.users.guardrails import COMPLAINTS, refusal
from megatron_collab.runtime import files
from megatron_collab.types import Conversation, Message, Task

FIELDS = (
    Field("current_answer", str, help="the assistant's answer to your goal so far; empty if there is none"),
    Field("thought", str, help="what is still lacking, and what you say next"),
    Field("response", str, help="your next message"),
)

OPEN = "There is no message yet. You begin the conversation: write your first message."

VARIABLES = ("goal", "task_desc", "persona", "stop", "metadata")  # of user.prompt


class LlmUser(User):
    opens = True

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
        config, complaint, reason = self.users.settings, list[dict[str, str]](), ""
        try:
            system = system_prompt(config, self.task, self.persona)
            goalless_task = replace(self.task, goal="", metadata={**self.task.metadata, "task_desc": ""})
            instructions = system_prompt(config, goalless_task)
        except PromptError as error:
            raise UserError(f"user {self.model}: {error}") from error
        request = [{"role": "system", "content": system}, {"role": "user", "content": render(messages) or OPEN}]
        for _ in range(config.attempts):
            answer = await self._ask([*request, *complaint])
            self.users.counters["user_replies"] += 1
            refused = refusal(answer["response"], self.task, instructions, messages)
            if refused is None:
                is_noted = any("persona" in message.private for message in messages)
                notes = {} if is_noted else {"persona": self.persona}
                notes |= {name: answer[name] for name in ("thought", "current_answer")}
                return Message("user", str(answer["response"]), private=notes)
            self.users.counters[refused] += 1
            refused_answer = {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)}
            complaint = [refused_answer, {"role": "user", "content": COMPLAINTS[refused]}]
            reason = f"{refused}: {answer['response'][:200]!r}"
        raise UserError(f"user {self.model}: {reason}")

    async def _ask(self, request: list[dict[str, str]]) -> dict[str, Any]:
        failure: LlmError | None = None
        malformed = False
        for endpoint in self._endpoints():
            try:
                return await self.users.client.ask(endpoint, request, FIELDS, has_fallback=self.model == POLICY)
            except LlmError as error:
                failure, malformed = error, isinstance(error.__cause__, MalformedAnswer)
                if malformed:
                    break
        self.users.counters["user_malformed" if malformed else "user_failed"] += 1
        raise UserError(f"user {failure}") from failure

    def _endpoints(self) -> list[EndpointConfig]:
        """The endpoints to try in order; for user.model=policy the servers in use, the next if one fails."""
        config = self.users.settings
        if self.model != POLICY:
            served_by_run = str(self.model).startswith(SERVED)
            return [replace(config, model=f"{self.model}/{self.sample}" if served_by_run else self.model)]

        def rank(api_base: str) -> float:
            """Rank servers by task: its conversations share a prefix, which one server then caches for all of them."""
            return random.Random(f"{api_base.removesuffix('/v1')} {self.task.id}").random()

        engine = sorted(self.users.engine, key=rank)
        arguments, adapter = self.users.directory.template_args, self.users.adapter
        engine_arguments: dict[str, Any] = {"chat_template_kwargs": arguments} if arguments else {}
        engine_arguments |= {"lora_path": adapter} if adapter else {}
        config = replace(config, extra={**engine_arguments, **config.extra})
        return [replace(config, model=f"policy/{self.sample}", api_base=api_base) for api_base in engine]


def users_prompt(config: UserConfig, setting: str = "prompt") -> Prompt:
    """The prompt template in `config.prompt`, or the built-in one. Raises ConfigError naming `setting`."""
    return read_prompt(setting, config.prompt, "user", VARIABLES)


def system_prompt(config: UserConfig, task: Task, persona: str = "") -> str:
    """The user's instructions: the rendered prompt and the answer format. Raises PromptError."""
    task_description = str(task.metadata.get("task_desc") or "")
    values = {"goal": task.goal, "task_desc": task_description, "persona": persona, "metadata": task.metadata}
    instructions = users_prompt(config).render(**quoted(values), stop=config.stop)
    answer = "{" + ", ".join(f'"{field.name}": {field.help}' for field in FIELDS) + "}"
    return f"{instructions}\n\nAnswer with one JSON object and nothing else:\n{answer}\nAll three values are strings."


@cache
def read_personas(path: str) -> tuple[str, ...]:
    """The non-blank lines of a personas file."""
    return tuple(line.strip() for line in files.read_text(Path(path)).split("\n") if line.strip())
