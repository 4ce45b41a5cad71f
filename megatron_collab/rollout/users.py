"""Simulated users, all through LiteLLM: language models and the scripted users of the shipped worlds.

A user is asked with a system prompt (role, goal, how to end the chat, answer format) and one user message
that shows the conversation. It answers with a JSON object {current_answer, thought, response}. The scripted
users are a LiteLLM provider of their own: `scripted/NAME` is `megatron_collab.data.worlds.NAME.reply`. They
read goal and conversation from the request, as a language model does.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at LiteLLM's import, which would ask the network

import litellm
from openai import OpenAIError

from megatron_collab.config import UserConfig
from megatron_collab.types import Conversation, Message, Task

FIELDS = ("current_answer", "thought", "response")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_ROLE_MARK = re.compile(r"^(\\*)\*\*(User|Assistant)\*\*: ", re.MULTILINE)
_GOAL = re.compile(r"^```json\n(.*)\n```$", re.MULTILINE)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)

_SYSTEM = """You play the user in a conversation with an AI assistant. Stay in that role: never act as the assistant.

What you want, and all that you know:
```json
{goal}
```

How to behave:
- Write the user's next message, short and natural, as a person would type it.
- Reveal what you know only as far as the conversation calls for it; answer what the assistant asks.
- Do not invent facts that are not given above.
- When your goal is reached, or the assistant cannot help any further, put {stop} into your message: it ends the chat.

Answer with one JSON object and nothing else:
{{"current_answer": what the assistant's answer to your goal is so far, "thought": what is still lacking and what you
say next, "response": your next message}}
All three values are strings."""


class UserError(RuntimeError):
    """The simulated user gave no usable message; the reason is the text."""


@dataclass(frozen=True)
class UserReply:
    """The user's next message, and whether the user ended the conversation with it."""

    message: Message
    done: bool


class User:
    """The simulated user of one conversation about `task`."""

    def __init__(self, config: UserConfig, task: Task) -> None:
        self.config = config
        self.model = config.model or f"scripted/{task.user}"
        self.system = system_prompt(task.goal, config.stop)

    async def reply(self, conversation: Conversation) -> UserReply:
        """The next message of the user; a malformed answer and a transient error are tried again.

        Raises UserError after `user.attempts` tries, or at once where another try cannot help.
        """
        messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": render(conversation.messages)},
        ]
        failure: Exception | None = None
        for attempt in range(self.config.attempts):
            if isinstance(failure, OpenAIError | TimeoutError):
                await asyncio.sleep(random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)))
            try:
                text = parse(await self._ask(messages))
                return UserReply(Message("user", text), self.config.stop in text)
            except (OpenAIError, TimeoutError, MalformedAnswer) as error:
                failure = error
                if not _may_pass(error):
                    break
        raise UserError(f"user {self.model}: {type(failure).__name__}: {failure}") from failure

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        """The raw answer of the user's model."""
        async with asyncio.timeout(self.config.timeout):
            answer = await litellm.acompletion(
                model=self.model,
                messages=messages,
                api_base=self.config.api_base,
                temperature=self.config.temperature,
                max_tokens=self.config.max_tokens,
                max_retries=0,
            )
        return answer.choices[0].message.content or ""


class MalformedAnswer(ValueError):
    """The user's model did not answer in the format it was told."""


def parse(answer: str) -> str:
    """The `response` of a user's JSON answer, exactly as it is written there.

    Raises MalformedAnswer where the answer is not a JSON object of the three strings, or the response is blank.
    """
    fenced = _FENCE.match(answer.strip())
    try:
        fields = json.loads(fenced.group(1) if fenced else answer)
    except json.JSONDecodeError as error:
        raise MalformedAnswer(f"not JSON ({error}): {answer[:200]!r}") from error
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in FIELDS):
        raise MalformedAnswer(f"not an object with the strings {', '.join(FIELDS)}: {answer[:200]!r}")
    if not fields["response"].strip():
        raise MalformedAnswer("the response is blank")
    return fields["response"]


def system_prompt(goal: str, stop: str) -> str:
    """The user's instructions; the goal stands in them as JSON on one line."""
    return _SYSTEM.format(goal=json.dumps({"goal": goal}, ensure_ascii=False), stop=stop)


def render(messages: Sequence[Message]) -> str:
    """`**Role**: content` a message, without system messages and thoughts.

    A content that itself holds such a mark at the start of a line gets a backslash before it, so that no
    message can speak for the other side.
    """
    return "\n".join(
        f"**{message.role.capitalize()}**: " + _ROLE_MARK.sub(r"\\\g<0>", _THOUGHT.sub("", message.content))
        for message in messages
        if message.role != "system"
    )


def read_request(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Message]]:
    """Goal and conversation of a request made by `User`: the inverse of `system_prompt` and `render`."""
    system, shown = messages[0]["content"], messages[1]["content"]
    block = _GOAL.search(system)
    if block is None:
        raise ValueError("the system prompt holds no goal")
    marks = [mark for mark in _ROLE_MARK.finditer(shown) if not mark.group(1)]
    ends = [mark.start() - 1 for mark in marks[1:]] + [len(shown)]
    return json.loads(block.group(1))["goal"], [
        Message(mark.group(2).lower(), _ROLE_MARK.sub(lambda quoted: quoted.group(0)[1:], shown[mark.end() : end]))
        for mark, end in zip(marks, ends, strict=True)
    ]


def _may_pass(error: Exception) -> bool:
    """Whether asking again can help: malformed answers, timeouts, rate limits, faults of the server."""
    status = getattr(error, "status_code", None)
    return status is None or status in (408, 409, 429) or status >= 500


class ScriptedUsers(litellm.CustomLLM):
    """The LiteLLM provider `scripted`: answers at once, from the request alone."""

    async def acompletion(self, *, model: str, messages: list[dict[str, str]], **_: Any) -> litellm.ModelResponse:
        goal, shown = read_request(messages)
        try:
            world = importlib.import_module(f"megatron_collab.data.worlds.{model}")
        except ModuleNotFoundError as error:
            raise litellm.NotFoundError(f"no scripted user {model!r}", model=model, llm_provider="scripted") from error
        answer = {"current_answer": "", "thought": "", "response": world.reply(goal, shown)}
        response = litellm.ModelResponse(model=model)
        response.choices[0].message.content = json.dumps(answer)
        response.choices[0].finish_reason = "stop"
        response._hidden_params["response_cost"] = 0.0  # else LiteLLM looks for a price, half of the call's time
        return response


litellm.telemetry = False
litellm.suppress_debug_info = True
litellm.custom_provider_map = [{"provider": "scripted", "custom_handler": ScriptedUsers()}]
