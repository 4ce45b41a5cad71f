"""Conversations (the policy's turns, and the answers of users and tools, until an ending) and groups of them.

A trained turn is sampled once and played on several times; each future is an asyncio task of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_collab.config import Config, SamplingConfig, read_prompt
from megatron_collab.data.assistants import Dealt, dealt
from megatron_collab.inference.assistant import Assistant, Renderer
from megatron_collab.inference.client import EngineError
from megatron_collab.llm.caller import ask_as
from megatron_collab.reward.multiturn import malformed_last, reward_function
from megatron_collab.reward.workers import RewardClient
from megatron_collab.rollout import thinking
from megatron_collab.rollout.tools import ToolFailure
from megatron_collab.rollout.tools.toolbox import ConversationTools, Toolbox
from megatron_collab.rollout.users import FINISH_SECONDS, User, UserError, UserReply, Users, failing
from megatron_collab.rollout.users.named import user_of
from megatron_collab.types import Conversation, Ending, Failed, Finish, Future, Group, Message, Reward, Rollout, Task


@dataclass(frozen=True)
class RolloutPlace:
    """The place of a conversation in the run, from which all its random draws follow.

    `stream` names step and task; all conversations of a stream share their first tokens.
    """

    stream: str
    rollout: int
    future: int = 0

    @property
    def name(self) -> str:
        return f"{self.stream}/{self.rollout}/{self.future}"


class Player:
    """Plays groups: trained turns, their futures, and the reward of each turn, under the budgets of config.rollout.

    Failures of users, tools and the engine are in the group, as conversations with an error and Missing scores.
    """

    def __init__(
        self, policy: Assistant, renderer: Renderer, users: Users, rewards: RewardClient, config: Config
    ) -> None:
        self.policy, self.renderer, self.users, self.rewards = policy, renderer, users, rewards
        self.config, self.rollout = config, config.rollout
        self.tools = Toolbox(config.rollout, policy)
        self.reward = reward_function(config.reward)
        self.counters: Counter[str] = Counter()  # reward_failed, of reward.mode
        self.strict = config.reward.malformed is not None
        asks = read_prompt("build.prompt", config.build.prompt, "collaborator", ()) if config.build.proactive else None
        self.proactive = asks.render().strip() if asks else ""
        self.cast: Mapping[str, Player] = {}  # by name of the assistant, where others than the policy play candidates

    async def play(self, task: Task, stream: str) -> Group:
        """train.rollouts_per_prompt rollouts of `task`, all at once, as reward.mode and rollout.futures say.

        Where the user opens the conversation, it does so once: what is compared begins with the same message.
        """
        ask_as(f"{stream}/opening")
        task, why = await self._opened(task, stream)
        places = [RolloutPlace(stream, i) for i in range(self.config.train.rollouts_per_prompt)]
        if why:
            failed = Conversation(task.messages, ()).end(*why)
            rollouts = [self._rollout(failed, [Future(failed, await self.rewards.score(task, failed))]) for _ in places]
        else:
            rollouts = await asyncio.gather(*map(partial(self._candidate, task), places, dealt(self.config)))
        return Group(task, malformed_last(rollouts) if self.config.reward.malformed_worst else tuple(rollouts))

    async def _candidate(self, task: Task, place: RolloutPlace, candidate: Dealt) -> Rollout:
        task = task.under(self.proactive) if candidate.proactive else task
        return await self.cast.get(candidate.assistant, self)._play(task, place)

    async def _opened(self, task: Task, stream: str) -> tuple[Task, tuple[Ending, str] | None]:
        """The task with its user's first message, unless it has one; or why it has none."""
        if not task.unopened:
            return task, None
        try:
            async with asyncio.timeout(self.rollout.deadline):
                with failing(task, self.users):
                    said = await self.users.make(task, f"{stream}/opening").open()
                    if not isinstance(said, str) or not said.strip():
                        raise UserError(f"user {user_of(task, self.config)}: opens the conversation with {said!r}")
        except UserError as error:
            return task, (Ending.ERROR, str(error))
        except TimeoutError:
            return task, (Ending.DEADLINE, self._late())
        return task.play_on(Message("user", said)), None

    async def _play(self, task: Task, place: RolloutPlace) -> Rollout:
        """A trained turn and its futures; without futures a whole conversation, every turn of the policy trained.

        A turn after which nothing can follow is scored as it is, with reward.mode=single_turn every turn.
        """
        ask_as(place.name)
        async with self.tools.open(task) as tools:
            start = await self.trained_turn(task, place, tools)
            if self.strict:
                start = self.refuse_malformed(start)
            if not start.ending and self.config.reward.mode == "single_turn":
                start = start.end(Ending.TURN_LIMIT)
            elif not start.ending and self.rollout.futures == 0:
                start = await self.play_on(start, task, place, self.rollout.turn, self.strict, tools)
            if start.ending:
                return self._rollout(start, [await self._future(start, task, place, tools)])
            futures = (self._future(start, task, replace(place, future=i), tools) for i in range(self.rollout.futures))
            return self._rollout(start, await asyncio.gather(*futures))

    async def _future(self, start: Conversation, task: Task, place: RolloutPlace, tools: ConversationTools) -> Future:
        """A future of `start`, which is `start` itself where that has ended, scored as soon as it ends.

        Its tools go on from the state in which the trained turn has left `tools`.
        """
        ask_as(place.name)
        if not start.ending:
            async with tools.fork() as own:
                start = await self.play_on(start, task, place, self.rollout.future, tools=own)
        if start.ending is Ending.MALFORMED:  # its reward is reward.malformed, whatever the metrics
            return Future(start, {})
        return Future(start, await self.rewards.score(task, start))

    def _rollout(self, start: Conversation, futures: Sequence[Future]) -> Rollout:
        penalty = self.config.reward.malformed
        found = Rollout(start, tuple(futures), Reward(penalty or 0.0))
        if penalty is not None and found.malformed:
            return found
        reward = self.reward(futures)
        if isinstance(reward.value, Failed):
            self.counters["reward_failed"] += 1
        return replace(found, reward=reward)

    async def trained_turn(
        self, task: Task, place: RolloutPlace, tools: ConversationTools | None = None
    ) -> Conversation:
        """The task's conversation with one turn of the policy; it has ended only where no more can follow.

        `tools`: those of the conversation; the policy calls none without them.
        """
        try:
            prompt = self.renderer.first(task.messages, self.rollout.turn.enable_thinking)
            conversation = Conversation(task.messages, prompt)
        except Exception as error:  # of the chat template, which may refuse these messages alone
            why = f"the chat template refuses the task's messages: {type(error).__name__}: {error}"
            return Conversation(task.messages, ()).end(Ending.ERROR, why)
        try:
            async with asyncio.timeout(self.rollout.deadline):
                return await self._turn(conversation, place, self.rollout.turn, tools)
        except TimeoutError:
            return conversation.end(Ending.DEADLINE, self._late())

    async def play_on(
        self,
        conversation: Conversation,
        task: Task,
        place: RolloutPlace,
        sampling: SamplingConfig,
        strict: bool = False,
        tools: ConversationTools | None = None,
    ) -> Conversation:
        """Go on from the policy's last reply to an ending, which is a malformed turn too where it is `strict`."""
        user: User | None = None
        deadline = asyncio.get_running_loop().time() + self.rollout.deadline
        try:
            async with asyncio.timeout_at(deadline):
                with failing(task, self.users):
                    user = self.users.make(task, place.name)
                    await user.start(conversation)
                for _ in range(min(self.rollout.max_user_turns, self.rollout.max_assistant_turns - 1)):
                    if self.rollout.max_messages and conversation.said + 2 > self.rollout.max_messages:
                        break
                    if not conversation.ending:
                        with failing(task, self.users):
                            conversation = self._heard(conversation, await user.reply(conversation), sampling)
                    if not conversation.ending:
                        conversation = await self._turn(conversation, place, sampling, tools)
                    if strict:
                        conversation = self.refuse_malformed(conversation)
        except UserError as error:
            conversation = conversation.end(Ending.ERROR, str(error))
        except TimeoutError:
            conversation = conversation.end(Ending.DEADLINE, self._late())
        finally:
            if user:
                conversation = await self._finished(conversation, task, user, deadline)
        conversation = conversation if conversation.ending else conversation.end(Ending.TURN_LIMIT)
        self.users.ended(task, conversation)
        return conversation

    def _heard(self, conversation: Conversation, reply: UserReply, sampling: SamplingConfig) -> Conversation:
        """The conversation with what the user says, and the rewards for the turns."""
        conversation = credited(conversation.add_reward(reply.reward), reply.credits)
        if reply.done:  # the policy's last turn is the end of the token stream
            return conversation.add_messages([reply.message], ()).end(Ending.USER_DONE)
        return self._append(conversation, [reply.message], sampling)

    async def _finished(self, conversation: Conversation, task: Task, user: User, deadline: float) -> Conversation:
        """The conversation with the user's last rewards; where it gives none, it ends with an error, if not before."""
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + FINISH_SECONDS)):
                with failing(task, self.users):
                    reward = await user.finish(conversation)
                    return credited(conversation, reward if isinstance(reward, Mapping) else {-1: reward})
        except UserError as error:
            failed = conversation.end(Ending.ERROR, str(error))
        except TimeoutError:
            failed = conversation.end(Ending.DEADLINE, self._late())
        return conversation if conversation.ending in (Ending.ERROR, Ending.DEADLINE) else failed

    def refuse_malformed(self, conversation: Conversation) -> Conversation:
        """The conversation, ended where the policy's last turn is one that no user should see."""
        if not conversation.turns or conversation.ending in (Ending.ERROR, Ending.DEADLINE, Ending.USER_DONE):
            return conversation
        turn = conversation.turns[-1]
        fault = turn.fault()
        if turn.finish is Finish.LENGTH:
            fault = "cut by its token budget"
        return conversation.end(Ending.MALFORMED, fault) if fault else conversation

    async def _turn(
        self,
        conversation: Conversation,
        place: RolloutPlace,
        sampling: SamplingConfig,
        tools: ConversationTools | None,
    ) -> Conversation:
        """Generations of the policy until one calls no tool, or may call none any more: that is the reply."""
        for _ in range(self.rollout.max_tool_calls if tools and self.tools.schemas else 0):
            conversation = await self._generate(conversation, place, sampling)
            if conversation.ending:
                return conversation
            assert tools
            try:
                answers, reward = await tools.answer(conversation.messages[-1].content)  # not what it only thought of
            except (EngineError, ToolFailure) as error:  # it is the engine that reads the calls
                return conversation.end(Ending.ERROR, str(error))
            if not answers:
                return conversation
            heard = self._append(conversation.add_reward(reward), answers, sampling)
            if heard.ending:  # no room for the answers: the conversation ends with the call
                return conversation.end(heard.ending)
            conversation = heard
        return await self._generate(conversation, place, sampling)

    async def _generate(
        self, conversation: Conversation, place: RolloutPlace, sampling: SamplingConfig
    ) -> Conversation:
        room = self.rollout.context_length - len(conversation.token_ids)
        if room < 1:
            why = f"the task's messages alone fill rollout.context_length={self.rollout.context_length}"
            return conversation.end(Ending.ERROR, why)
        ask = partial(
            self.policy.generate,
            messages=conversation.messages,
            sampling=sampling,
            seed=seed_of(self.config.run.seed, place, len(conversation.turns)),
            affinity=place.stream,
        )
        try:
            routing_from = self._routing_from(conversation, sampling)
            turn = await thinking.sampled(ask, self.renderer, conversation.token_ids, sampling, room, routing_from)
        except EngineError as error:
            return conversation.end(Ending.ERROR, str(error))
        if turn.finish is Finish.ABORT:
            return conversation.end(Ending.ERROR, "the engine aborted the turn")
        conversation = conversation.add_turn(turn)
        full = turn.finish is Finish.LENGTH and len(turn.token_ids) == room
        return conversation.end(Ending.LENGTH) if full else conversation

    def _routing_from(self, conversation: Conversation, sampling: SamplingConfig) -> int | None:
        """The first position of which the next turn is to have the experts: the first that no turn before it has.

        None where the turn is not trained: in futures, unless rollout.train_turns=all.
        """
        if not self.rollout.routing_replay or (sampling is self.rollout.future and self.rollout.train_turns != "all"):
            return None
        known = conversation.turns[-1].stream if conversation.turns else ()
        return len(known) - 1 if known and conversation.token_ids[: len(known)] == known else 0

    def _append(
        self, conversation: Conversation, messages: Sequence[Message], sampling: SamplingConfig
    ) -> Conversation:
        """Append messages of users or tools; the conversation ends where there is no room for a reply.

        A user's message begins a turn, which may see earlier ones without their thoughts; a tool's answer does not.
        """
        turns, thinks = conversation.turns, sampling.enable_thinking
        if self.rollout.strip_thoughts and messages[-1].role == "user":
            prompt = self.renderer.again([*conversation.messages, *messages], turns, thinks)
        else:
            prompt = conversation.token_ids + self.renderer.next(messages, turns[-1].token_ids, thinks)
        if len(prompt) >= self.rollout.context_length:
            return conversation.add_messages(messages, ()).end(Ending.LENGTH)
        return conversation.begin_anew(messages, prompt)

    def _late(self) -> str:
        return f"not ended after rollout.deadline={self.rollout.deadline:g} s"


def credited(conversation: Conversation, rewards: Mapping[int, float]) -> Conversation:
    """The conversation with further rewards of its turns, by their numbers."""
    for turn, value in rewards.items():
        conversation = conversation.add_reward(value, turn)
    return conversation


def seed_of(run_seed: int, place: RolloutPlace, turn: int) -> int:
    """The engine's seed (31 bits) of one turn: the same whenever and wherever that turn is sampled."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{place.name}/{turn}".encode(), digest_size=4).digest()) >> 1
