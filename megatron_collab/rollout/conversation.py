"""Play conversations (turns of the policy, messages of users and tools, until an ending) and groups of them.

A trained turn is sampled once and continued several times; each future is its own asyncio task. This is the player of
rollout.player=futures; player.py has the interface.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_collab.data.assistants import CandidateAssistant
from megatron_collab.inference.client import EngineError
from megatron_collab.llm.caller import ask_as
from megatron_collab.reward.multiturn import malformed_last
from megatron_collab.rollout import thinking
from megatron_collab.rollout.answer_log_probs import with_answer_log_probs
from megatron_collab.rollout.player import Player, PlaySpec
from megatron_collab.rollout.tools import ToolFailure
from megatron_collab.rollout.tools.of_user import FINAL_NOTE, UserTools
from megatron_collab.rollout.tools.toolbox import ConversationTools
from megatron_collab.rollout.users import (
    FINISH_SECONDS,
    User,
    UserError,
    UserReply,
    Users,
    reply_with_calls,
    reporting_errors,
    with_excerpts,
)
from megatron_collab.runtime.time_limit import time_limit
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import (
    Conversation,
    Ending,
    Failed,
    Finish,
    Future,
    Group,
    Message,
    Reward,
    Rollout,
    Task,
    without_private,
)

if TYPE_CHECKING:  # settings are checked without LiteLLM and Ray, which take seconds
    from megatron_collab.inference.assistant import Assistant, Renderer
    from megatron_collab.reward.workers import RewardClient


@dataclass(frozen=True)
class RolloutPlace:
    """The place of a conversation in the run, which determines all its random draws.

    `stream` names step and task; all conversations of a stream share their first tokens.
    """

    stream: str
    rollout: int
    future: int = 0

    @property
    def name(self) -> str:
        return f"{self.stream}/{self.rollout}/{self.future}"


class FuturesPlayer(Player):
    """Plays groups: trained turns, their futures, and the reward of each turn, under the budgets of `spec`.

    If a user, a tool or the engine fails, the conversation gets an error and Missing scores and stays in the group. To
    train other turns, override `trained_turns`.
    """

    candidate_players: Mapping[str, FuturesPlayer]

    def __init__(
        self, policy: Assistant, renderer: Renderer, users: Users, rewards: RewardClient, spec: PlaySpec
    ) -> None:
        super().__init__(policy, renderer, users, rewards, spec)
        self.strict = spec.reward.malformed is not None  # a malformed trained turn ends the conversation

    async def play(self, task: Task, stream: str) -> Group:
        """Play train.rollouts_per_prompt rollouts of `task` concurrently, following reward.mode and rollout.futures.

        If the user opens the conversation, the message is sampled once, so that all rollouts begin with the same one.
        """
        ask_as(f"{stream}/opening")
        task, failure = await self._open(task, stream)
        places = [RolloutPlace(stream, i) for i in range(self.spec.rollouts)]
        if failure:
            failed = Conversation(task.messages, ()).end(*failure)
            rollouts = [self._rollout(failed, [await self.rewards.future(task, failed)]) for _ in places]
        else:
            rollouts = await asyncio.gather(*map(partial(self._candidate, task), places, self.spec.candidates))
        return Group(task, malformed_last(rollouts) if self.reward.malformed_worst else tuple(rollouts))

    async def _candidate(self, task: Task, place: RolloutPlace, candidate: CandidateAssistant) -> Rollout:
        task = task.with_system_prompt(self.spec.proactive_prompt) if candidate.proactive else task
        return await self.candidate_players.get(candidate.assistant, self)._play(task, place)

    async def _open(self, task: Task, stream: str) -> tuple[Task, tuple[Ending, str] | None]:
        """The task with the user's first message, if it had none; and the ending and reason if the user failed."""
        if not task.unopened:
            return task, None
        try:
            async with time_limit(self.rollout.deadline):
                with reporting_errors(task, self.users):
                    opening = await self.users.make(task, f"{stream}/opening").open()
                    message = opening if isinstance(opening, Message) else Message("user", opening)
                    if not isinstance(message.content, str) or not message.content.strip():
                        raise UserError(
                            f"user {self.spec.users.name_of(task)}: opens the conversation with {message.content!r}"
                        )
                    message = with_excerpts(message)
        except UserError as error:
            return task, (Ending.ERROR, str(error))
        except TimeoutError:
            return task, (Ending.DEADLINE, self._deadline_message())
        return task.play_on(message), None

    async def _play(self, task: Task, place: RolloutPlace) -> Rollout:
        """The trained turns and their futures; if the conversation ends with them, it is scored without futures."""
        ask_as(place.name)
        async with self.tools.open(replace(task, messages=without_private(task.messages))) as tools:
            start = await self.trained_turns(task, place, tools)
            if start.ending:
                return self._rollout(start, [await self._future(start, task, place, tools)])
            futures = (self._future(start, task, replace(place, future=i), tools) for i in range(self.rollout.futures))
            return self._rollout(start, await asyncio.gather(*futures))

    async def trained_turns(self, task: Task, place: RolloutPlace, tools: ConversationTools) -> Conversation:
        """The task's conversation up to the end of its trained turns; all of them get the rollout's reward.

        One turn; with rollout.futures=0 a whole conversation. It has an ending if no future is to follow, also with
        reward.mode=single_turn.
        """
        start = await self.trained_turn(task, place, tools)
        if self.strict:
            start = self.refuse_malformed(start)
        if not start.ending and self.reward.mode == "single_turn":
            return start.end(Ending.TURN_LIMIT)
        if not start.ending and self.rollout.futures == 0:
            return await self.play_on(start, task, place, self.rollout.turn, self.strict, tools)
        return start

    async def _future(self, start: Conversation, task: Task, place: RolloutPlace, tools: ConversationTools) -> Future:
        """Play and score a future of `start`; if `start` has ended, it is the future itself.

        The future's tools continue from the state of `tools` after the trained turn.
        """
        ask_as(place.name)
        if not start.ending:
            async with tools.fork() as future_tools:
                start = await self.play_on(start, task, place, self.rollout.future, tools=future_tools)
        if start.ending is Ending.MALFORMED:  # its reward is reward.malformed, whatever the metrics
            return Future(start, {})
        leads = {lead for metric in self.reward.metrics.values() if (lead := metric.answer_lead) is not None}
        if leads and task.answer and start.ending not in (Ending.ERROR, Ending.DEADLINE):
            log_probs = partial(self.policy.log_probs, affinity=place.stream)
            start = await with_answer_log_probs(start, task.answer, leads, log_probs, self.renderer)
        return await self.rewards.future(task, start)

    def _rollout(self, start: Conversation, futures: Sequence[Future]) -> Rollout:
        penalty = self.reward.malformed
        rollout = Rollout(start, tuple(futures), Reward(penalty or 0.0))
        if penalty is not None and rollout.malformed:
            return rollout
        reward = self.reward.formula(futures)
        if isinstance(reward.value, Failed):
            self.counters["reward_failed"] += 1
        return replace(rollout, reward=reward)

    async def trained_turn(
        self, task: Task, place: RolloutPlace, tools: ConversationTools | None = None
    ) -> Conversation:
        """The task's conversation after one turn of the policy; it has an ending only if nothing can follow.

        `tools`: the tools of the conversation; if None, the policy calls no tools.
        """
        try:
            prompt = self.renderer.first(task.messages, self.rollout.turn.enable_thinking)
            conversation = Conversation(task.messages, prompt)
        except (ValueError, TypeError) as error:  # the chat template or the tokenizer may refuse these messages
            return Conversation(task.messages, ()).end(Ending.ERROR, str(error))
        try:
            async with time_limit(self.rollout.deadline):
                return await self._turn(conversation, place, self.rollout.turn, tools)
        except TimeoutError:
            return conversation.end(Ending.DEADLINE, self._deadline_message())

    async def play_on(
        self,
        conversation: Conversation,
        task: Task,
        place: RolloutPlace,
        sampling: SamplingConfig,
        strict: bool = False,
        tools: ConversationTools | None = None,
        user_turns: int | None = None,
    ) -> Conversation:
        """Continue from the policy's last reply to an ending; if `strict`, a malformed turn is an ending too.

        After `user_turns` answers of the user, if given, it stops without an ending; by default at the run's limit.
        """
        user: User | None = None
        try:
            async with time_limit(self.rollout.deadline) as limit:
                with reporting_errors(task, self.users):
                    user = self.users.make(task, place.name)
                    user.tools = self._tools_of_user(task, tools)
                    await user.start(conversation)
                for _ in range(self._user_turns if user_turns is None else user_turns):
                    if self.rollout.max_messages and conversation.message_count + 2 > self.rollout.max_messages:
                        break
                    if not conversation.ending:
                        with reporting_errors(task, self.users):
                            reply = await user.reply(conversation)
                            conversation = self._apply_reply(conversation, reply_with_calls(reply, user), sampling)
                    if not conversation.ending:
                        conversation = await self._turn(conversation, place, sampling, tools)
                    conversation = self.refuse_malformed(conversation) if strict else conversation
        except UserError as error:
            conversation = conversation.end(Ending.ERROR, str(error))
        except TimeoutError:
            conversation = conversation.end(Ending.DEADLINE, self._deadline_message())
        finally:
            if user:
                conversation = await self._finish(conversation, task, user, limit)
        if not conversation.ending and user_turns is not None:
            return conversation
        return self._ended(task, conversation)

    def _tools_of_user(self, task: Task, tools: ConversationTools | None) -> UserTools | None:
        """The functions in user.tools for the user of a conversation with these tools; None if there are none."""
        if not (tools and self.tools.user_functions):
            return None
        names = self.spec.users.find(self.spec.users.name_of(task)).settings.tools
        return tools.for_user(names, self.rollout.max_tool_calls) if names else None

    def _ended(self, task: Task, conversation: Conversation) -> Conversation:
        """The conversation with an ending, which is counted."""
        conversation = conversation if conversation.ending else conversation.end(Ending.TURN_LIMIT)
        self.users.ended(task, conversation)
        return conversation

    @property
    def _user_turns(self) -> int:
        """Most user turns of a future."""
        return min(self.rollout.max_user_turns, self.rollout.max_assistant_turns - 1)

    def _apply_reply(self, conversation: Conversation, reply: UserReply, sampling: SamplingConfig) -> Conversation:
        """The conversation with the user's message and the user's rewards for turns."""
        conversation = add_rewards(conversation.add_reward(reply.reward), reply.credits)
        message = with_excerpts(reply.message)
        if reply.done:  # the policy's last turn is the end of the token stream
            return conversation.add_messages([message], ()).end(Ending.USER_DONE)
        return self._append(conversation, [message], sampling)

    async def _finish(self, conversation: Conversation, task: Task, user: User, limit: asyncio.Timeout) -> Conversation:
        """The conversation with the user's final rewards; if the user fails, it ends with an error.

        The user has the rest of `limit`, but at least FINISH_SECONDS.
        """
        try:
            async with asyncio.timeout_at(max(limit.when() or 0.0, asyncio.get_running_loop().time() + FINISH_SECONDS)):
                with reporting_errors(task, self.users):
                    reward = await user.finish(conversation)
                    conversation = add_rewards(conversation, reward if isinstance(reward, Mapping) else {-1: reward})
                    return add_final_calls(conversation, user.tools)
        except UserError as error:
            failed = conversation.end(Ending.ERROR, str(error))
        except TimeoutError:
            failed = conversation.end(Ending.DEADLINE, self._deadline_message())
        return conversation if conversation.ending in (Ending.ERROR, Ending.DEADLINE) else failed

    def refuse_malformed(self, conversation: Conversation) -> Conversation:
        """The conversation, ended as malformed if its last turn must not be shown to a user."""
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
        """Generate until the policy calls no tool or rollout.max_tool_calls is used up; the last generation replies."""
        for _ in range(self.rollout.max_tool_calls if tools and self.tools.schemas else 0):
            conversation = await self._generate(conversation, place, sampling)
            if conversation.ending:
                return conversation
            assert tools
            try:
                answers, reward = await tools.answer(conversation.messages[-1].content)  # ignores calls in thoughts
            except (EngineError, ToolFailure) as error:  # the engine parses the calls
                return conversation.end(Ending.ERROR, str(error))
            if not answers:
                return conversation
            extended = self._append(conversation.add_reward(reward), answers, sampling)
            if extended.ending:  # no room for the answers: the conversation ends with the call
                return conversation.end(extended.ending, extended.error)
            conversation = extended
        return await self._generate(conversation, place, sampling)

    async def _generate(
        self, conversation: Conversation, place: RolloutPlace, sampling: SamplingConfig
    ) -> Conversation:
        room = self.rollout.context_length - len(conversation.token_ids)
        if room < 1:
            reason = f"the task's messages alone fill rollout.context_length={self.rollout.context_length}"
            return conversation.end(Ending.ERROR, reason)
        ask = self._ask(conversation, place, sampling)
        try:
            routing_from = self._routing_from(conversation, sampling)
            turn = await thinking.sample_turn(ask, self.renderer, conversation.token_ids, sampling, room, routing_from)
        except EngineError as error:
            return conversation.end(Ending.ERROR, str(error))
        if turn.finish is Finish.ABORT:
            return conversation.end(Ending.ERROR, "the engine aborted the turn")
        conversation = conversation.add_turn(turn)
        full = turn.finish is Finish.LENGTH and len(turn.token_ids) == room
        return conversation.end(Ending.LENGTH) if full else conversation

    def _ask(self, conversation: Conversation, place: RolloutPlace, sampling: SamplingConfig) -> thinking.Ask:
        """A function that requests the conversation's next turn from the policy."""
        return partial(
            self.policy.generate,
            messages=conversation.messages,
            sampling=sampling,
            seed=seed_of(self.spec.seed, place, len(conversation.turns)),
            affinity=place.stream,
        )

    def _routing_from(self, conversation: Conversation, sampling: SamplingConfig) -> int | None:
        """The first position whose experts the next turn must record: the first one that earlier turns did not record.

        None if the turn is not trained: in futures, except with rollout.train_turns=all.
        """
        turns = self.spec.experts_of
        if turns is None or (sampling is self.rollout.future and turns != "all"):
            return None
        seen_ids = conversation.turns[-1].stream if conversation.turns else ()
        return len(seen_ids) - 1 if seen_ids and conversation.token_ids[: len(seen_ids)] == seen_ids else 0

    def _append(
        self, conversation: Conversation, messages: Sequence[Message], sampling: SamplingConfig
    ) -> Conversation:
        """Append messages of users or tools; the conversation ends if there is no room for a reply.

        After a user's message, earlier thoughts are dropped if rollout.strip_thoughts; after a tool's answer, never.
        """
        turns, thinks = conversation.turns, sampling.enable_thinking
        try:
            if self.rollout.strip_thoughts and messages[-1].role == "user":
                prompt = self.renderer.prompt_without_thoughts([*conversation.messages, *messages], turns, thinks)
            else:
                prompt = conversation.token_ids + self.renderer.next(messages, turns[-1].token_ids, thinks)
        except (ValueError, TypeError) as error:  # as in trained_turn
            return conversation.add_messages(messages, ()).end(Ending.ERROR, str(error))
        if len(prompt) >= self.rollout.context_length:
            return conversation.add_messages(messages, ()).end(Ending.LENGTH)
        return conversation.begin_anew(messages, prompt)

    def _deadline_message(self) -> str:
        return f"did not end within rollout.deadline={self.rollout.deadline:g} s"


def add_rewards(conversation: Conversation, rewards: Mapping[int, float]) -> Conversation:
    """The conversation with `rewards` added to its turns, by turn index."""
    for turn, value in rewards.items():
        conversation = conversation.add_reward(value, turn)
    return conversation


def add_final_calls(conversation: Conversation, tools: UserTools | None) -> Conversation:
    """The conversation with the user's calls after its last message: a note of that, and rewards of the last turn."""
    if not (tools and tools.calls):
        return conversation
    note, reward = tools.take_calls(FINAL_NOTE)
    *earlier, last = conversation.messages
    last = with_excerpts(replace(last, private={**last.private, **note}))
    return replace(conversation.add_reward(reward), messages=(*earlier, last))


def seed_of(run_seed: int, place: RolloutPlace, turn: int) -> int:
    """The engine's seed (31 bits) for one turn; it does not depend on when or where the turn is sampled."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{place.name}/{turn}".encode(), digest_size=4).digest()) >> 1
