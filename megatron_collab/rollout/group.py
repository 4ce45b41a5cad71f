"""Groups: the rollouts of one task, played on, scored and rewarded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from megatron_collab.config import Config
from megatron_collab.reward.dispatch import RewardClient
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.rollout.conversation import Renderer, RolloutPlace, Sampler, TurnSampler
from megatron_collab.rollout.users import Users
from megatron_collab.types import Conversation, Ending, Future, Group, Reward, Rollout, Task


class Player:
    """Plays groups: trained turns, their futures, and the reward of each turn.

    What a user or the engine could not give is in the group: conversations that ended with an error, scores and
    rewards that are Missing.
    """

    def __init__(
        self, policy: TurnSampler, renderer: Renderer, users: Users, rewards: RewardClient, config: Config
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
        if self.config.reward.mode == "single_turn":
            play = self._alone
        elif self.config.rollout.futures == 0:
            play = self._whole
        else:
            play = self._with_futures
        rollouts = await asyncio.gather(*(play(task, place) for place in places))
        return Group(task, tuple(rollouts))

    async def evaluate(self, task: Task, stream: str) -> Group:
        """One rollout with one future, played as a user would see it: a malformed turn is answered as well."""
        place = RolloutPlace(stream, 0)
        start = await self.sampler.trained_turn(task, place)
        future = await self._future(start, task, place)
        return Group(task, (self._rollout(start, [future]),))

    async def _alone(self, task: Task, place: RolloutPlace) -> Rollout:
        """The trained turn, scored as the end of its conversation."""
        start = await self._start(task, place)
        if not start.ending:
            start = start.end(Ending.TURN_LIMIT)
        return self._rollout(start, [await self._scored(task, start)])

    async def _whole(self, task: Task, place: RolloutPlace) -> Rollout:
        """One conversation to its end, every turn of the policy trained."""
        conversation = await self._start(task, place)
        if not conversation.ending:
            conversation = await self.sampler.play_on(
                conversation, task, place, self.config.rollout.turn, strict=self.strict
            )
        return self._rollout(conversation, [await self._scored(task, conversation)])

    async def _with_futures(self, task: Task, place: RolloutPlace) -> Rollout:
        """A trained turn and its futures; a turn after which nothing can follow is scored as it stands."""
        start = await self._start(task, place)
        if start.ending:
            return self._rollout(start, [await self._scored(task, start)])
        futures = (
            self._future(start, task, replace(place, future=number)) for number in range(self.config.rollout.futures)
        )
        return self._rollout(start, await asyncio.gather(*futures))

    async def _start(self, task: Task, place: RolloutPlace) -> Conversation:
        start = await self.sampler.trained_turn(task, place)
        return self.sampler.refuse_malformed(start) if self.strict else start

    async def _future(self, start: Conversation, task: Task, place: RolloutPlace) -> Future:
        """A future of `start`, scored the moment it ends."""
        if not start.ending:
            start = await self.sampler.play_on(start, task, place, self.config.rollout.future)
        return await self._scored(task, start)

    async def _scored(self, task: Task, conversation: Conversation) -> Future:
        if conversation.ending is Ending.MALFORMED:  # its reward is reward.malformed, whatever a metric would say
            return Future(conversation, {})
        return Future(conversation, await self.rewards.score(task, conversation))

    def _rollout(self, start: Conversation, futures: Sequence[Future]) -> Rollout:
        penalty = self.config.reward.malformed
        if penalty is not None and any(future.conversation.ending is Ending.MALFORMED for future in futures):
            return Rollout(start, tuple(futures), Reward(penalty))
        return Rollout(start, tuple(futures), self.reward(futures))
