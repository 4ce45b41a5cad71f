"""A language model as the user: any of LiteLLM's, or the model that is trained (user.model=policy).

It is asked with a system prompt (role, goal, persona, how to end the chat, answer format) and one message that shows
the conversation; it answers with a JSON object {current_answer, thought, response}. It never sees the task's answer.
What rollout/users/guardrails.py refuses is asked for again, with what is wrong, up to user.attempts times.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_collab.config import Config, EndpointConfig
from megatron_collab.data.transcript import render
from megatron_collab.llm.answer import Field, MalformedAnswer
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.rollout.users.guardrails import Refusal, refusal
from megatron_collab.types import Conversation, Task

POLICY = "policy"  # the name of the trained model among LiteLLM's
FIELDS = (
    Field("current_answer", str, help="the assistant's answer to your goal so far; empty if there is none"),
    Field("thought", str, help="what is still lacking, and what you say next"),
    Field("response", str, help="your next message"),
)

_SYSTEM = """You play the user in a conversation with an AI assistant. Stay in that role: never act as the assistant.

What you want, and all that you know:
```json
{goal}
```
{persona}
How to behave:
- Write the user's next message, short and natural, as a person would type it.
- Reveal what you know only as far as the conversation calls for it, in your own words; answer what the assistant asks.
- Do not invent facts that are not given above, and leave the solution to the assistant.
- When your goal is reached, or the assistant cannot help any further, put {stop} into your message: it ends the chat.

Answer with one JSON object and nothing else:
{answer}
All three values are strings."""


class LlmUser(User):
    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        config = users.config
        self.model = argument or config.user.model
        self.system = system_prompt(
            task.goal, config.user.stop, draw_persona(config.user.personas, f"{config.run.seed}/{task.id}")
        )

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        if not (argument or config.user.model):
            return "user.model is not set; set it to a model of LiteLLM's or to policy, or choose a user in user.name"
        if config.user.personas and not read_personas(config.user.personas):
            return f"user.personas={config.user.personas}: has no lines; write a persona a line, or remove it"
        return None

    async def reply(self, conversation: Conversation) -> UserReply:
        """Each time it is asked, the endpoint has its tries and its deadline for an answer in the right format."""
        request = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": render(conversation.messages)},
        ]
        again: list[dict[str, str]] = []
        why = ""
        for _ in range(self.users.config.user.attempts):
            answer = await self._ask([*request, *again])
            self.users.counters["user_replies"] += 1
            refused = self._refusal(answer["response"], conversation)
            if refused is None:
                return self.says(answer["response"])
            self.users.counters[refused.counter] += 1
            said = {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)}
            again = [said, {"role": "user", "content": refused.complaint}]
            why = f"{refused.counter}: {answer['response'][:200]!r}"
        raise UserError(f"user {self.model}: {why}")

    def _refusal(self, text: str, conversation: Conversation) -> Refusal | None:
        instructions = system_prompt("", self.users.config.user.stop)
        return refusal(text, self.task, instructions, conversation.messages)

    async def _ask(self, request: list[dict[str, str]]) -> dict[str, Any]:
        from megatron_collab.llm.client import LlmError  # imported here: checking a name needs no LiteLLM

        failure: LlmError | None = None
        for endpoint in self._endpoints():
            try:
                return await self.users.client.ask(endpoint, request, FIELDS, others=self.model == POLICY)
            except LlmError as error:
                failure = error
                if isinstance(error.__cause__, MalformedAnswer):
                    break
        assert failure is not None
        malformed = isinstance(failure.__cause__, MalformedAnswer)
        self.users.counters["user_malformed" if malformed else "user_failed"] += 1
        raise UserError(f"user {failure}") from failure

    def _endpoints(self) -> list[EndpointConfig]:
        """Who may be asked, in this order: of the servers that sample now the next one where one fails."""
        config = self.users.config.user
        if self.model != POLICY:
            return [replace(config, model=self.model)]
        from megatron_collab.inference import litellm_provider

        # All conversations about a task begin alike: one server holds their prefix, as long as it is there.
        engine = sorted(self.users.engine, key=lambda server: random.Random(f"{server[0]} {self.task.id}").random())
        return [
            replace(config, model=f"policy/{self.sample}", api_base=litellm_provider.POLICY.add(url, key))
            for url, key in engine
        ]


def system_prompt(goal: str, stop: str, persona: str | None = None) -> str:
    """The user's instructions; the goal stands in them as JSON on one line."""
    return _SYSTEM.format(
        goal=json.dumps({"goal": goal}, ensure_ascii=False),
        persona=f"\nWho you are: {persona}\n" if persona else "",
        stop=stop,
        answer="{" + ", ".join(f'"{field.name}": {field.help}' for field in FIELDS) + "}",
    )


@cache
def read_personas(path: str) -> tuple[str, ...]:
    """The lines of a file of personas, without blank ones."""
    return tuple(line.strip() for line in Path(path).read_text().splitlines() if line.strip())


def draw_persona(path: str | None, seed: str) -> str | None:
    """The persona that belongs to `seed`, the same in every process."""
    return random.Random(seed).choice(read_personas(path)) if path else None
