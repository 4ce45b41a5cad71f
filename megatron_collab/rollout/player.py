"""Groups: the trained turns of one task, played on, scored and rewarded."""

from __future__ import annotations

import asyncio

from megatron_collab.config import Config
from megatron_collab.reward.loop import RewardClient
from megatron_collab.reward.mr import turn_reward
from megatron_collab.rollout.policy import Policy, Renderer
from megatron_collab.rollout.sampler import Sampler
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Rollout, Task, Turn


class Player:
    """Plays groups: trained turns, their futures, and the reward of each turn."""

    def __init__(self, policy: Policy, renderer: Renderer, rewards: RewardClient, config: Config) -> None:
        self.sampler = Sampler(policy, renderer, config)
        self.rewards = rewards
        self.weights = config.reward.weights

    async def play(self, task: Task, stream: str, rollouts: int, futures: int) -> Group:
        """`rollouts` trained turns of `task`, all at once, each with `futures` futures.

        With 0 futures a turn is scored alone, as the end of its conversation. `stream` names the place in the
        run (step and task) that the sampling seeds follow from. What a user or the engine could not give is in
        the group: conversations that ended with an error, scores and rewards that are Missing.
        """
        played = (self._rollout(task, stream, rollout, futures) for rollout in range(rollouts))
        return Group(task, tuple(await asyncio.gather(*played)))

    async def _rollout(self, task: Task, stream: str, rollout: int, futures: int) -> Rollout:
        start = await self.sampler.trained_turn(task, stream, rollout)
        turn = start.turns[0] if start.turns else _no_turn(start)
        if futures == 0 or start.ending:
            scored = [await self._scored(task, start if start.ending else start.end(Ending.TURN_LIMIT))]
        else:
            played = (self._future(start, task, stream, rollout, future) for future in range(futures))
            scored = await asyncio.gather(*played)
        return Rollout(turn, tuple(scored), turn_reward([future.scores for future in scored], self.weights))

    async def _future(self, start: Conversation, task: Task, stream: str, rollout: int, future: int) -> Future:
        return await self._scored(task, await self.sampler.future(start, task, stream, rollout, future))

    async def _scored(self, task: Task, conversation: Conversation) -> Future:
        return Future(conversation, await self.rewards.score(task, conversation))


def _no_turn(conversation: Conversation) -> Turn:
    """Stands where the engine gave no turn: nothing sampled, by no version; its rollout has no reward."""
    return Turn(conversation.token_ids, (), (), -1, Finish.ABORT, "")
