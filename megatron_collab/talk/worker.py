"""TalkWorker: the ConversationWorker that plays chats, turn by turn instead of as groups."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from megatron_collab.inference.router import Router
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.llm.caller import ask_as
from megatron_collab.llm.served import ServedModel
from megatron_collab.observability import records
from megatron_collab.observability.folder import rows_of
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.tools.toolbox import ConversationTools
from megatron_collab.rollout.users import Users
from megatron_collab.rollout.workers import ConversationWorker
from megatron_collab.runtime.redact import redacted
from megatron_collab.talk import ChatError
from megatron_collab.types import (
    Conversation,
    Ending,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Task,
    without_private,
)

Row = Mapping[str, Any]

MOST_FUTURES = 16  # at a time
LONGEST_MESSAGE = 1 << 17  # characters
_MOST_CHATS = 100  # the oldest are closed
_NO_TASK = Task("chat", (), "", "", "")


@dataclass(frozen=True)
class Moment:
    """A state of a chat, to which `undo` returns; `tools` continue those of the moment before.

    `scored`: the conversation with its scores, once it has ended.
    """

    task: Task
    conversation: Conversation
    tools: ConversationTools
    scored: Future | None = None

    @property
    def row(self) -> Row:
        """The conversation as a row of a run's transcripts, without a reward."""
        future = self.scored or Future(self.conversation, {})
        return _rows(self.task, Rollout(self.conversation, (future,), Reward(Missing("a chat has none"))))[0]


@dataclass
class _Chat:
    """The moments of a chat, the first without a message of it; `lock`: one call at a time."""

    player: TalkPlayer
    moments: list[Moment]
    has_task: bool
    name: str = field(default_factory=lambda: f"chat-{secrets.token_hex(4)}")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    draws: count[int] = field(default_factory=count)

    def place(self) -> RolloutPlace:
        """Another one each time, so that a repeated turn is sampled anew."""
        return RolloutPlace(self.name, next(self.draws))

    async def close(self) -> None:
        for moment in self.moments:
            await moment.tools.__aexit__()


class TalkPlayer(FuturesPlayer):
    """Plays the turns of a chat, as those of a run are played; a turn is never refused as malformed."""

    def tools_of(self, task: Task) -> ConversationTools:
        return self.tools.open(replace(task, messages=without_private(task.messages)))

    async def reply(self, moment: Moment, place: RolloutPlace) -> Conversation:
        """The conversation after the model's first turn, an answer to the task's messages."""
        return await self.trained_turn(moment.task, place, moment.tools)

    async def opened(self, moment: Moment, place: RolloutPlace) -> Moment:
        """The moment after the simulated user's first message and the model's answer."""
        task, failure = await self._open(moment.task, place.stream)
        moment = replace(moment, task=task)
        if failure:
            return replace(moment, conversation=moment.conversation.end(*failure))
        return replace(moment, conversation=await self.reply(moment, place))

    async def answer(self, moment: Moment, text: str, place: RolloutPlace) -> Conversation:
        """The conversation after a person's message and the model's answer."""
        sampling = self.rollout.turn
        conversation = self._append(moment.conversation, [Message("user", text)], sampling)
        try:
            async with asyncio.timeout(self.rollout.deadline):
                if not conversation.ending:
                    conversation = await self._turn(conversation, place, sampling, moment.tools)
        except TimeoutError:
            conversation = conversation.end(Ending.DEADLINE, self._deadline_message())
        return conversation

    async def user_turn(self, moment: Moment, place: RolloutPlace) -> Conversation:
        """The conversation after a message of the simulated user and the model's answer."""
        return await self.play_on(
            moment.conversation, moment.task, place, self.rollout.turn, tools=moment.tools, user_turns=1
        )

    async def futures(self, moment: Moment, number: int, place: RolloutPlace) -> Rollout:
        """`number` futures of the conversation, and the reward over them."""
        places = (replace(place, future=future) for future in range(number))
        start = moment.conversation
        played = (self._future(start, moment.task, future_place, moment.tools) for future_place in places)
        return self._rollout(start, await asyncio.gather(*played))


class TalkWorker(ConversationWorker):
    """A Ray actor that plays chats with the policy's servers, each of which serves another model of the run.

    Methods take the chat's number, and raise ChatError if there is none or it cannot go on.
    """

    def __init__(
        self,
        play: PlaySpec,
        client: ClientSpec,
        servers: list[tuple[str, str]],
        reward_workers: list[str],
        name: str,
        served: Mapping[str, ServedModel],
    ) -> None:
        super().__init__(play, client, servers, reward_workers, name, served)
        self.talkers = []
        for server, endpoint in zip(servers, self.endpoints, strict=True):
            users = Users(play.users, self.client, (endpoint,), self.adapter)
            policy = Router([server], client)
            self.talkers.append(TalkPlayer(policy, self.renderer, users, self.rewards, play))
        self._chats: dict[int, _Chat] = {}
        self._numbers = count()

    async def begin(self, model: int, task: Task | None) -> tuple[int, Row]:
        """The number and the conversation of a new chat with a model; it has answered the task's messages, if any."""
        player = self.talkers[model]
        first = task or _NO_TASK
        tools = player.tools_of(first)
        chat = _Chat(player, [Moment(first, Conversation(first.messages, ()), tools)], task is not None)
        if not first.unopened:
            (moment,) = chat.moments
            ask_as((place := chat.place()).name)
            chat.moments = [replace(moment, conversation=await player.reply(moment, place))]
        while len(self._chats) >= _MOST_CHATS:
            await self._chats.pop(next(iter(self._chats))).close()
        number = next(self._numbers)
        self._chats[number] = chat
        return number, chat.moments[-1].row

    async def say(self, number: int, text: str) -> Row:
        text = text.encode(errors="replace").decode()
        if not text.strip():
            raise ChatError("the message is blank; write something")
        if len(text) > LONGEST_MESSAGE:
            raise ChatError(f"the message has {len(text)} characters, at most {LONGEST_MESSAGE}; write less")

        async def play(player: TalkPlayer, moment: Moment, place: RolloutPlace) -> Moment:
            if moment.conversation.turns:
                return replace(moment, conversation=await player.answer(moment, text, place))
            opened = replace(moment, task=moment.task.play_on(Message("user", text)))
            return replace(opened, conversation=await player.reply(opened, place))

        return await self._next(number, play)

    async def let_user(self, number: int) -> Row:
        async def play(player: TalkPlayer, moment: Moment, place: RolloutPlace) -> Moment:
            if moment.conversation.turns:
                return replace(moment, conversation=await player.user_turn(moment, place))
            return await player.opened(moment, place)

        self._require_task(number)
        return await self._next(number, play)

    async def futures(self, number: int, futures: int) -> list[Row]:
        if not 1 <= futures <= MOST_FUTURES:
            raise ChatError(f"{futures} futures: give a number from 1 to {MOST_FUTURES}")
        self._require_task(number)
        chat = self._chat(number)
        async with chat.lock:
            moment = chat.moments[-1]
            _require_open(moment)
            if not moment.conversation.turns:
                raise ChatError("the model has not written yet; a future continues its last message")
            ask_as((place := chat.place()).name)
            rollout = await chat.player.futures(moment, futures, place)
        return _rows(moment.task, rollout)

    async def undo(self, number: int) -> Row:
        chat = self._chat(number)
        async with chat.lock:
            if len(chat.moments) == 1:
                raise ChatError("no message to undo")
            await chat.moments.pop().tools.__aexit__()
            return chat.moments[-1].row

    async def close(self, number: int) -> None:
        if number in self._chats:
            await self._chats.pop(number).close()

    async def _next(self, number: int, play: Callable[[TalkPlayer, Moment, RolloutPlace], Awaitable[Moment]]) -> Row:
        """Play the next moment of the chat, on a copy of its tools; returns its conversation."""
        chat = self._chat(number)
        async with chat.lock:
            last = chat.moments[-1]
            _require_open(last)
            ask_as((place := chat.place()).name)
            async with AsyncExitStack() as stack:
                tools = await stack.enter_async_context(last.tools.fork())
                moment = await play(chat.player, replace(last, tools=tools), place)
                if chat.has_task and moment.conversation.ending:
                    scored = await chat.player.rewards.future(moment.task, moment.conversation)
                    moment = replace(moment, scored=scored)
                chat.moments.append(moment)
                stack.pop_all()
            return chat.moments[-1].row

    def _chat(self, number: int) -> _Chat:
        if number not in self._chats:
            raise ChatError("this chat is closed, or was lost with its process; begin another")
        return self._chats[number]

    def _require_task(self, number: int) -> None:
        if not self._chat(number).has_task:
            raise ChatError("this chat has no task, so no simulated user can write; begin one with a task")


def _require_open(moment: Moment) -> None:
    if ending := moment.conversation.ending:
        reason = f" ({moment.conversation.error})" if moment.conversation.error else ""
        raise ChatError(f"the conversation has ended: {ending}{reason}; undo its last message, or begin anew")


def _rows(task: Task, rollout: Rollout) -> list[Row]:
    """The futures of a chat as rows of a run's transcripts, keys redacted."""
    return [records.finite(redacted(row)) for row in rows_of([Group(task, (rollout,))])]
