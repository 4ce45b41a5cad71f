"""Groups: the rollouts of one task, played on, scored and rewarded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_collab.config import Config
from megatron_collab.reward.dispatch import RewardClient
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.rollout.conversation import RolloutPlace, Sampler
from megatron_collab.rollout.users import Users
from megatron_collab.types import Conversation, Ending, Future, Group, Reward, Rollout, Task

if TYPE_CHECKING:
    from megatron_collab.data.chat_template import ChatRenderer
    from megatron_collab.inference.router import Router


class Player:
    """Plays groups: trained turns, their futures, and the reward of each turn.

    Failures of users and of the engine are in the group: conversations that ended with an error, scores and rewards
    that are Missing.
    """

    def __init__(
        self, policy: Router, renderer: ChatRenderer, users: Users, rewards: RewardClient, config: Config
    ) -> None:
        self.sampler = Sampler(policy, renderer, users, config)
        self.rewards = rewards
        self.config = config
        self.reward = reward_function(config.reward)
        self.strict = config.reward.malformed is not None

    async def play(self, task: Task, stream: str) -> Group:
        """train.rollouts_per_prompt rollouts of `task`, all at once, as reward.mode and rollout.futures say.

        `stream` names the place in the run (step and task) that the sampling seeds follow from.
        """
        places = [RolloutPlace(stream, i) for i in range(self.config.train.rollouts_per_prompt)]
        return Group(task, tuple(await asyncio.gather(*(self._play(task, place) for place in places))))

    async def evaluate(self, task: Task, stream: str) -> Group:
        """One rollout with one future, played as a user would see it: a malformed turn is answered as well."""
        place = RolloutPlace(stream, 0)
        start = await self.sampler.trained_turn(task, place)
        return Group(task, (self._rollout(start, [await self._future(start, task, place)]),))

    async def _play(self, task: Task, place: RolloutPlace) -> Rollout:
        """A trained turn and its futures; without futures a whole conversation, every turn of the policy trained.

        A turn after which nothing can follow is scored as it is, with reward.mode=single_turn every turn.
        """
        options = self.config.rollout
        start = await self.sampler.trained_turn(task, place)
        if self.strict:
            start = self.sampler.refuse_malformed(start)
        if not start.ending and self.config.reward.mode == "single_turn":
            start = start.end(Ending.TURN_LIMIT)
        elif not start.ending and options.futures == 0:
            start = await self.sampler.play_on(start, task, place, options.turn, strict=self.strict)
        if start.ending:
            return self._rollout(start, [await self._scored(task, start)])
        futures = (self._future(start, task, replace(place, future=i)) for i in range(options.futures))
        return self._rollout(start, await asyncio.gather(*futures))

    async def _future(self, start: Conversation, task: Task, place: RolloutPlace) -> Future:
        """A future of `start`, scored as soon as it ends."""
        if not start.ending:
            start = await self.sampler.play_on(start, task, place, self.config.rollout.future)
        return await self._scored(task, start)

    async def _scored(self, task: Task, conversation: Conversation) -> Future:
        if conversation.ending is Ending.MALFORMED:  # its reward is reward.malformed, whatever the metrics
            return Future(conversation, {})
        return Future(conversation, await self.rewards.score(task, conversation))

    def _rollout(self, start: Conversation, futures: Sequence[Future]) -> Rollout:
        penalty = self.config.reward.malformed
        malformed = any(future.conversation.ending is Ending.MALFORMED for future in futures)
        reward = self.reward(futures) if penalty is None or not malformed else Reward(penalty)
        return Rollout(start, tuple(futures), reward)
