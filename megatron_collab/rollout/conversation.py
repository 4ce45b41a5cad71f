"""The policy's turns and what follows from them: users and tools answer until the conversation ends.

A trained turn is sampled once and played on several times; each future is an asyncio task of its own, so all
conversations of a worker wait at the same time and none waits for another.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_collab.config import Config, SamplingConfig
from megatron_collab.inference.client import EngineError
from megatron_collab.rollout.tools import Toolbox, ToolParser
from megatron_collab.rollout.users import User, UserError, Users
from megatron_collab.types import Conversation, Ending, Finish, Message, Task, Turn


class TurnSampler(ToolParser, Protocol):
    """What samples the policy's turns, and finds the calls of tools in them."""

    async def generate(
        self, prompt_ids: tuple[int, ...], *, max_new_tokens: int, sampling: SamplingConfig, seed: int, affinity: str
    ) -> Turn:
        """One turn after `prompt_ids`; raises EngineError where none can be had.

        Calls of the same `affinity` share a prefix, and are best served by the same server.
        """


class Renderer(Protocol):
    """A chat template as token ids."""

    opens_thought: bool
    """Whether the prompt ends with `<think>`."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: all messages, and what opens the policy's turn."""

    def next(self, messages: Sequence[Message], turn: Sequence[int]) -> tuple[int, ...]:
        """What follows a sampled turn: its end where it lacks one, the messages, the opening of the next turn."""


@dataclass(frozen=True)
class RolloutPlace:
    """Where in the run a conversation stands; what is drawn there depends on nothing else.

    `stream` names step and task; all conversations of a stream share their first tokens.
    """

    stream: str
    rollout: int
    future: int = 0

    @property
    def name(self) -> str:
        return f"{self.stream}/{self.rollout}/{self.future}"


class Sampler:
    """Samples trained turns and plays them on, under the budgets of `config.rollout`."""

    def __init__(self, policy: TurnSampler, renderer: Renderer, users: Users, config: Config) -> None:
        self.policy = policy
        self.renderer = renderer
        self.users = users
        self.tools = Toolbox(config.rollout, policy)
        self.config = config.rollout
        self.seed = config.run.seed

    async def trained_turn(self, task: Task, place: RolloutPlace) -> Conversation:
        """The task's conversation with one turn of the policy; it has ended only where no more can follow."""
        conversation = Conversation(task.messages, self.renderer.first(task.messages))
        try:
            async with asyncio.timeout(self.config.deadline):
                return await self._turn(conversation, task, place, self.config.turn)
        except TimeoutError:
            return self._late(conversation)

    async def play_on(
        self,
        conversation: Conversation,
        task: Task,
        place: RolloutPlace,
        sampling: SamplingConfig,
        *,
        strict: bool = False,
    ) -> Conversation:
        """Go on from the policy's last reply to an ending, within max_user_turns and max_assistant_turns.

        With `strict` a malformed turn of the policy ends the conversation.
        """
        user = self.users.make(task, place.name)
        try:
            async with asyncio.timeout(self.config.deadline):
                await user.start(conversation)
                for _ in range(min(self.config.max_user_turns, self.config.max_assistant_turns - 1)):
                    if not conversation.ending:
                        conversation = await self._user_turn(conversation, user)
                    if not conversation.ending:
                        conversation = await self._turn(conversation, task, place, sampling)
                    if strict:
                        conversation = self.refuse_malformed(conversation)
        except UserError as error:
            conversation = conversation.end(Ending.ERROR, str(error))
        except TimeoutError:
            conversation = self._late(conversation)
        finally:
            reward = await user.finish(conversation)
        return _ended(conversation.add_reward(reward))

    def refuse_malformed(self, conversation: Conversation) -> Conversation:
        """The conversation, ended where the policy's last turn is one that no user should see."""
        if not conversation.turns or conversation.ending in (Ending.ERROR, Ending.DEADLINE, Ending.USER_DONE):
            return conversation
        turn = conversation.turns[-1]
        fault = turn.fault(opened=self.renderer.opens_thought)
        if turn.finish is Finish.LENGTH:
            fault = "cut by its token budget"
        return conversation.end(Ending.MALFORMED, fault) if fault else conversation

    async def _turn(
        self, conversation: Conversation, task: Task, place: RolloutPlace, sampling: SamplingConfig
    ) -> Conversation:
        """One turn of the policy: generations until one calls no tool, or may call none any more; that is the reply."""
        for _ in range(self.config.max_tool_calls if self.config.tools else 0):
            conversation = await self._generate(conversation, place, sampling)
            if conversation.ending:
                return conversation
            try:
                answers, reward = await self.tools.answer(conversation.turns[-1].text, task)
            except EngineError as error:  # it is the engine that reads the calls
                return conversation.end(Ending.ERROR, str(error))
            if not answers:
                return conversation
            heard = self._hear(conversation.add_reward(reward), answers)
            if heard.ending:  # no room for the answers: the call is the last word
                return conversation.end(heard.ending)
            conversation = heard
        return await self._generate(conversation, place, sampling)

    async def _generate(
        self, conversation: Conversation, place: RolloutPlace, sampling: SamplingConfig
    ) -> Conversation:
        length = self.config.context_length
        room = length - len(conversation.token_ids)
        if room < 1:
            why = f"the task's messages alone fill rollout.context_length={length}"
            return conversation.end(Ending.ERROR, why)
        try:
            turn = await self.policy.generate(
                conversation.token_ids,
                max_new_tokens=min(sampling.max_new_tokens, room),
                sampling=sampling,
                seed=seed_of(self.seed, place, len(conversation.turns)),
                affinity=place.stream,
            )
        except EngineError as error:
            return conversation.end(Ending.ERROR, str(error))
        if turn.finish is Finish.ABORT:
            return conversation.end(Ending.ERROR, "the engine aborted the turn")
        conversation = conversation.add_turn(turn)
        full = turn.finish is Finish.LENGTH and len(turn.token_ids) == room
        return conversation.end(Ending.LENGTH) if full else conversation

    async def _user_turn(self, conversation: Conversation, user: User) -> Conversation:
        reply = await user.reply(conversation)
        conversation = conversation.add_reward(reply.reward)
        if reply.done:  # nothing is sampled after it, so the token stream ends with the policy's last turn
            return conversation.add_messages([reply.message], ()).end(Ending.USER_DONE)
        return self._hear(conversation, [reply.message])

    def _hear(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """Append what was said to the policy; the conversation ends where there is no room for a reply."""
        token_ids = self.renderer.next(messages, conversation.turns[-1].token_ids)
        if len(conversation.token_ids) + len(token_ids) >= self.config.context_length:
            return conversation.add_messages(messages, ()).end(Ending.LENGTH)
        return conversation.add_messages(messages, token_ids)

    def _late(self, conversation: Conversation) -> Conversation:
        return conversation.end(Ending.DEADLINE, f"not ended after rollout.deadline={self.config.deadline:g} s")


def _ended(conversation: Conversation) -> Conversation:
    return conversation if conversation.ending else conversation.end(Ending.TURN_LIMIT)


def seed_of(run_seed: int, place: RolloutPlace, turn: int) -> int:
    """The engine's seed (31 bits) of one turn: the same whenever and wherever that turn is sampled."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{place.name}/{turn}".encode(), digest_size=4).digest()) >> 1
