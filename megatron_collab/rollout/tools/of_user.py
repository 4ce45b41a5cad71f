"""The tools that a simulated user may call: functions with the state of the conversation's tools."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_collab.rollout.tools import ToolFailure, ToolResult
from megatron_collab.types import Message, ToolCall

NOTE = "calls"  # the private note of a message that has the calls before it, as JSON
FINAL_NOTE = "final_calls"  # the same of the calls after the conversation's last message, in User.finish
_LONGEST_RESULT = 2000  # characters of one call's result that the user sees
_LONGEST_NOTE = 18_000  # characters; a longer note would be cut, and the calls in it could not be read


@dataclass(frozen=True)
class UserCall:
    """A call of a user, and its result as the user saw it."""

    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass
class UserTools:
    """The tools of one user in one conversation. The policy sees neither the calls nor their results.

    `schemas`: the functions in OpenAI's format. `most`: rounds of calls before one message.
    """

    schemas: Sequence[Mapping[str, Any]]
    answer: Callable[[ToolCall], Awaitable[ToolResult]]
    most: int
    calls: list[UserCall] = field(default_factory=list)  # since the last message
    rounds: int = 0  # of these calls, as a language model makes them
    reward: float = 0.0  # of these calls

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call; `error: …` if it is rejected or times out. Raises ToolFailure if the tool is broken."""
        result = await self.answer(ToolCall(name, arguments))
        content, length = result.content[:_LONGEST_RESULT], len(result.content)
        if length > _LONGEST_RESULT:
            content += f"\n[cut: {_LONGEST_RESULT} of {length} characters]"
        self.calls.append(UserCall(name, arguments, content))
        self.reward += result.reward
        if len(self._note()) > _LONGEST_NOTE:
            raise ToolFailure(f"the user's calls before one message have more than {_LONGEST_NOTE} characters")
        return content

    def take_calls(self, name: str = NOTE) -> tuple[dict[str, str], float]:
        """The calls since the last message, as a private note with that name, and their rewards."""
        note, reward = {name: self._note()} if self.calls else {}, self.reward
        self.calls, self.rounds, self.reward = [], 0, 0.0
        return note, reward

    def _note(self) -> str:
        return json.dumps([asdict(call) for call in self.calls], ensure_ascii=False)


def noted_calls(message: Message) -> list[UserCall]:
    """The user's calls before its message."""
    return [UserCall(**call) for call in json.loads(message.private.get(NOTE, "[]"))]
