"""Users that are verl's interactions: classes with start_interaction and generate_response, which need no edit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_collab.rollout.users import User, UserError, UserReply, Users, options_of
from megatron_collab.runtime import verl
from megatron_collab.runtime.side_loop import SideLoop
from megatron_collab.settings import UserConfig, option
from megatron_collab.types import Conversation, Ending, Message, Task

_METHODS = ("start_interaction", "generate_response", "finalize_interaction")


class VerlUser(User):
    """verl's interaction `interaction`, without an edit: its messages, and its score of each turn as the turn's reward.

    Each conversation has an object of its own, which it starts with and finalizes at its end. It gets what the task's
    metadata has in interaction_kwargs; query, ground_truth and single_turn_prompt are otherwise those of the task.
    """

    @dataclass(frozen=True)
    class Options:
        interaction: str = option("", "class of the interaction: package.module:Class or ./file.py:Class")
        config: dict[str, Any] = option({}, "its config")
        final_score: bool = option(False, "calculate_score at the end is a reward of the last turn")

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self._id = sample
        self._loop: SideLoop | None = None
        self._interaction: Any = None  # until it has started
        self._arguments = {
            "query": task.messages[-1].content if task.messages else "",
            "ground_truth": task.answer,
            "single_turn_prompt": task.goal,
            **verl.without_nulls(task.metadata.get("interaction_kwargs")),
        }

    @classmethod
    def unavailable(cls, argument: str, settings: UserConfig) -> str | None:
        options = options_of(cls, settings)
        label = f"options.interaction={options.interaction}: cannot be constructed with options.config"
        verl.attempt(label, _kind(options), _config(options))
        return super().unavailable(argument, settings)

    async def start(self, conversation: Conversation) -> None:
        self._loop = SideLoop.acquire()
        interaction = await self._loop.run(_kind(self.options), _config(self.options))
        started = await verl.call(self._loop, interaction.start_interaction, self._id, **self._arguments)
        self._id = started if isinstance(started, str) else self._id
        self._interaction = interaction

    async def reply(self, conversation: Conversation) -> UserReply:
        self.users.counters["user_replies"] += 1
        messages = [message.as_dict() for message in conversation.messages]
        response = await self._call("generate_response", self._id, messages, **self._arguments)
        if not isinstance(response, tuple | list) or len(response) < 3:
            returned = type(response).__name__
            raise UserError(f"user verl: generate_response returned {returned}, not (done, text, score, data)")
        done, text, score = response[:3]
        if not isinstance(text, str) or not (done or text.strip()):
            raise UserError(f"user verl: generate_response returned {text!r} as the user's message")
        return UserReply(Message("user", text), bool(done), float(score or 0.0))

    async def finish(self, conversation: Conversation) -> float:
        try:
            if self._interaction is None:
                return 0.0
            failed = conversation.ending in (Ending.ERROR, Ending.DEADLINE)
            scores = self.options.final_score and not failed
            score = await self._call("calculate_score", self._id) if scores else 0.0
            await self._call("finalize_interaction", self._id)
            return float(score)
        finally:
            if self._loop:
                self._loop.release()

    async def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        assert self._loop
        return await verl.call(self._loop, getattr(self._interaction, method), *args, **keywords)


def _kind(options: Any) -> Any:
    return verl.load(options.interaction, "options.interaction", _METHODS)


def _config(options: Any) -> dict[str, Any]:
    """The config with the interaction's name, which verl adds."""
    name = options.interaction.rpartition(":")[2].removesuffix("Interaction").lower()
    return {"name": name, **options.config}
