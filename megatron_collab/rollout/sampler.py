"""The policy's turns and the futures that follow from them.

A trained turn is sampled once and played on several times; each future is an asyncio task of its own, so all
conversations of a worker wait at the same time and none waits for another.
"""

from __future__ import annotations

import hashlib

from megatron_collab.config import Config
from megatron_collab.rollout.policy import Policy, Renderer
from megatron_collab.rollout.sglang import EngineError
from megatron_collab.rollout.users import User, UserError
from megatron_collab.types import Conversation, Ending, Finish, Task


class Sampler:
    """Samples trained turns and plays them on, under the budgets of `config.rollout`."""

    def __init__(self, policy: Policy, renderer: Renderer, config: Config) -> None:
        self.policy = policy
        self.renderer = renderer
        self.config = config

    async def trained_turn(self, task: Task, stream: str, rollout: int) -> Conversation:
        """The task's conversation with one turn of the policy; it has ended only where no more can follow."""
        conversation = Conversation(task.messages, self.renderer.first(task.messages))
        seed = seed_of(self.config.run.seed, stream, rollout, 0, 0)
        return await self._turn(conversation, self.config.rollout.max_new_tokens, seed)

    async def future(
        self, conversation: Conversation, task: Task, stream: str, rollout: int, future: int
    ) -> Conversation:
        """Play on for at most `rollout.max_user_turns` user turns, each answered by the policy, to an ending."""
        user = User(self.config.user, task)
        for turn in range(1, self.config.rollout.max_user_turns + 1):
            if conversation.ending:
                return conversation
            conversation = await self._user_turn(conversation, user)
            if not conversation.ending:
                seed = seed_of(self.config.run.seed, stream, rollout, future, turn)
                conversation = await self._turn(conversation, self.config.rollout.future_max_new_tokens, seed)
        return conversation if conversation.ending else conversation.end(Ending.TURN_LIMIT)

    async def _turn(self, conversation: Conversation, max_new_tokens: int, seed: int) -> Conversation:
        length = self.config.rollout.context_length
        room = length - len(conversation.token_ids)
        if room < 1:
            why = f"the task's messages alone fill rollout.context_length={length}"
            return conversation.end(Ending.ERROR, why)
        try:
            turn = await self.policy.generate(
                conversation.token_ids,
                max_new_tokens=min(max_new_tokens, room),
                temperature=self.config.rollout.temperature,
                seed=seed,
            )
        except EngineError as error:
            return conversation.end(Ending.ERROR, str(error))
        if turn.finish is Finish.ABORT:
            return conversation.end(Ending.ERROR, "the engine aborted the turn")
        conversation = conversation.add_turn(turn)
        full = turn.finish is Finish.LENGTH and len(turn.token_ids) == room
        return conversation.end(Ending.LENGTH) if full else conversation

    async def _user_turn(self, conversation: Conversation, user: User) -> Conversation:
        try:
            reply = await user.reply(conversation)
        except UserError as error:
            return conversation.end(Ending.ERROR, str(error))
        if reply.done:  # nothing is sampled after it, so the token stream ends with the policy's last turn
            return conversation.add_user(reply.message, ()).end(Ending.USER_DONE)
        token_ids = self.renderer.next(reply.message, conversation.turns[-1])
        if len(conversation.token_ids) + len(token_ids) >= self.config.rollout.context_length:
            return conversation.add_user(reply.message, ()).end(Ending.LENGTH)
        return conversation.add_user(reply.message, token_ids)


def seed_of(run_seed: int, stream: str, rollout: int, future: int, turn: int) -> int:
    """The engine's seed (31 bits) of one turn: the same whenever and wherever that turn is sampled."""
    name = f"{run_seed}/{stream}/{rollout}/{future}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1
