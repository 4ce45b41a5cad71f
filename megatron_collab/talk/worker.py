"""TalkWorker: the ConversationWorker that plays chats, turn by turn instead of as groups."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from megatron_collab.inference.router import Router
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.llm.caller import ask_as
from megatron_collab.observability import records
from megatron_collab.observability.folder import rows_of
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.thinking import CLOSED, Ask
from megatron_collab.rollout.tools.toolbox import ConversationTools
from megatron_collab.rollout.users import Users
from megatron_collab.rollout.workers import ConversationWorker
from megatron_collab.runtime.redact import redacted, without_begun_key
from megatron_collab.settings import SamplingConfig
from megatron_collab.talk import ChatError
from megatron_collab.types import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Task,
    Turn,
    without_private,
)

Row = Mapping[str, Any]
Changes = AsyncIterator[Mapping[str, Any]]  # of the attributes of a session.Chat, by name

MOST_FUTURES = 16  # at a time
LONGEST_MESSAGE = 1 << 17  # characters
ROW_SECONDS = 0.2  # between two rows of a conversation while a turn of it is written
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
    """The moments of a chat, of which `undo` keeps the first `kept`; `lock`: one call at a time."""

    player: TalkPlayer
    moments: list[Moment]
    has_task: bool
    kept: int = 1
    name: str = field(default_factory=lambda: f"chat-{secrets.token_hex(4)}")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    draws: count[int] = field(default_factory=count)

    def place(self) -> RolloutPlace:
        """A new one at each call, so that a repeated turn is sampled again."""
        return RolloutPlace(self.name, next(self.draws))

    async def close(self) -> None:
        for moment in self.moments:
            await moment.tools.__aexit__()


class TalkPlayer(FuturesPlayer):
    """Plays the turns of a chat, as those of a run are played; a turn is never refused as malformed.

    `written`, by stream: returns the conversation with the turn that is being written, as far as it is.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.written: dict[str, Callable[[], Conversation]] = {}

    def tools_of(self, task: Task) -> ConversationTools:
        return self.tools.open(replace(task, messages=without_private(task.messages)))

    async def reply(self, moment: Moment, place: RolloutPlace) -> Moment:
        """The moment after the model's first turn, an answer to the task's messages."""
        return replace(moment, conversation=await self.trained_turn(moment.task, place, moment.tools))

    async def answer(self, text: str, moment: Moment, place: RolloutPlace) -> Moment:
        """The moment after a person's message and the model's answer."""
        if not moment.conversation.turns:
            return await self.reply(replace(moment, task=moment.task.play_on(Message("user", text))), place)
        sampling = self.rollout.turn
        conversation = self._append(moment.conversation, [Message("user", text)], sampling)
        try:
            async with asyncio.timeout(self.rollout.deadline):
                if not conversation.ending:
                    conversation = await self._turn(conversation, place, sampling, moment.tools)
        except TimeoutError:
            conversation = conversation.end(Ending.DEADLINE, self._deadline_message())
        return replace(moment, conversation=conversation)

    async def user_turn(self, moment: Moment, place: RolloutPlace) -> Moment:
        """The moment after a message of the simulated user and the model's answer."""
        task, conversation = moment.task, moment.conversation
        if conversation.turns:
            sampling, tools = self.rollout.turn, moment.tools
            played = await self.play_on(conversation, task, place, sampling, tools=tools, user_turns=1)
            return replace(moment, conversation=played)
        task, failure = await self._open(task, place.stream)
        moment = replace(moment, task=task)
        return replace(moment, conversation=conversation.end(*failure)) if failure else await self.reply(moment, place)

    async def futures(self, moment: Moment, number: int, place: RolloutPlace) -> Rollout:
        """`number` futures of the conversation, and the reward over them."""
        places = (replace(place, future=future) for future in range(number))
        start = moment.conversation
        played = (self._future(start, moment.task, future_place, moment.tools) for future_place in places)
        return self._rollout(start, await asyncio.gather(*played))

    def _ask(self, conversation: Conversation, place: RolloutPlace, sampling: SamplingConfig) -> Ask:
        """As in FuturesPlayer; if it is no turn of a future, it is `written` while it grows."""
        ask = super()._ask(conversation, place, sampling)
        if sampling is self.rollout.future:
            return ask
        begun = THOUGHT_BEGIN if self.renderer.opens_thought(conversation.token_ids) else ""

        def show(text: str = "") -> None:
            self.written[place.stream] = partial(_growing, conversation, begun, text)

        async def ask_and_show(prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            nonlocal begun
            show()
            turn = await ask(prompt_ids, **options, progress=show)
            begun += turn.text
            if THOUGHT_BEGIN in begun and THOUGHT_END not in begun:  # it is closed before the reply is requested
                begun += THOUGHT_END if turn.token_ids[-1:] == (self.renderer.thought_end,) else CLOSED
            return turn

        return ask_and_show


class TalkWorker(ConversationWorker):
    """A Ray actor that plays chats with the policy's servers, each of which serves another model of the run.

    There is one chat with each model. Its actions yield what changes: its row while it grows and in the end, or its
    futures. They raise ChatError if the chat cannot go on so.
    """

    def __init__(self, play: PlaySpec, client: ClientSpec, servers: list[tuple[str, str]], *more: Any) -> None:
        super().__init__(play, client, servers, *more)
        self.talkers = []
        for server, endpoint in zip(servers, self.endpoints, strict=True):
            users = Users(play.users, self.client, (endpoint,), self.adapter)
            policy = Router([server], client)
            self.talkers.append(TalkPlayer(policy, self.renderer, users, self.rewards, play))
        self._chats: dict[int, _Chat] = {}  # by the number of the model

    async def begin(self, model: int, task: Task | None) -> Changes:
        """Start the chat again; the model answers the task's messages, if any."""
        await self._close(model)
        player, first = self.talkers[model], task or _NO_TASK
        start = Moment(first, Conversation(first.messages, ()), player.tools_of(first))
        chat = self._chats[model] = _Chat(player, [start], task is not None)
        yield {"row": start.row, "prompt": len(first.messages)}
        if not first.unopened:
            async for changes in self._next(chat, player.reply):
                yield changes
        chat.kept = len(chat.moments)

    async def say(self, model: int, text: str) -> Changes:
        """A person's message."""
        text = text.encode(errors="replace").decode()
        if not text.strip():
            raise ChatError("the message is blank; write something")
        if len(text) > LONGEST_MESSAGE:
            raise ChatError(f"the message has {len(text)} characters, at most {LONGEST_MESSAGE}; write less")
        chat = self._chat(model)
        async for changes in self._next(chat, partial(chat.player.answer, text)):
            yield changes

    async def user(self, model: int) -> Changes:
        """The simulated user writes, and may end the conversation, which is then scored."""
        chat = self._chat(model, needs_task=True)
        async for changes in self._next(chat, chat.player.user_turn):
            yield changes

    async def futures(self, model: int, count: int) -> Changes:
        """`count` continuations with the simulated user to their endings, scored; the conversation itself stays."""
        if not 1 <= count <= MOST_FUTURES:
            raise ChatError(f"{count} futures: give a number from 1 to {MOST_FUTURES}")
        chat = self._chat(model, needs_task=True)
        async with chat.lock:
            moment = chat.moments[-1]
            _require_open(moment)
            if not moment.conversation.turns:
                raise ChatError("the model has not written yet; a future continues its last message")
            ask_as((place := chat.place()).name)
            rollout = await chat.player.futures(moment, count, place)
        yield {"futures": _rows(moment.task, rollout)}

    async def undo(self, model: int) -> Changes:
        """Take back the last message of the user and what followed."""
        chat = self._chat(model)
        async with chat.lock:
            if len(chat.moments) <= chat.kept:
                raise ChatError("no message to undo")
            await chat.moments.pop().tools.__aexit__()
            yield {"row": chat.moments[-1].row}

    async def refuse(self, model: int, reason: str) -> Changes:
        """Close the chat, since another one cannot begin for this reason."""
        await self._close(model)
        yield {"row": None}
        raise ChatError(reason)

    async def _close(self, model: int) -> None:
        if chat := self._chats.pop(model, None):
            await chat.close()

    async def _next(self, chat: _Chat, play: Callable[[Moment, RolloutPlace], Awaitable[Moment]]) -> Changes:
        """Play the next moment of the chat; yields its row while it grows, and in the end."""
        async with chat.lock:
            last, written = chat.moments[-1], chat.player.written
            _require_open(last)
            playing = asyncio.create_task(self._played(chat, play))
            try:
                while not playing.done():
                    await asyncio.wait([playing], timeout=ROW_SECONDS)
                    if growing := written.pop(chat.name, None):
                        yield {"row": replace(last, conversation=growing()).row}
                chat.moments.append(await playing)
            finally:
                playing.cancel()
                await asyncio.wait([playing])
                written.pop(chat.name, None)  # written after the last row, it is no part of the next action
        yield {"row": chat.moments[-1].row}

    async def _played(self, chat: _Chat, play: Callable[[Moment, RolloutPlace], Awaitable[Moment]]) -> Moment:
        """The next moment, on a copy of the chat's tools; scored if the conversation has ended."""
        last = chat.moments[-1]
        ask_as((place := chat.place()).name)
        async with AsyncExitStack() as stack:
            tools = await stack.enter_async_context(last.tools.fork())
            moment = await play(replace(last, tools=tools), place)
            if chat.has_task and moment.conversation.ending:
                moment = replace(moment, scored=await chat.player.rewards.future(moment.task, moment.conversation))
            stack.pop_all()
        return moment

    def _chat(self, model: int, needs_task: bool = False) -> _Chat:
        if model not in self._chats:
            raise ChatError("there is no conversation; begin another one")
        if needs_task and not self._chats[model].has_task:
            raise ChatError("this chat has no task, so no simulated user can write; begin one with a task")
        return self._chats[model]


def _growing(conversation: Conversation, begun: str, text: str) -> Conversation:
    """The conversation with a turn of `begun` and `text`, which grows; keys are redacted only once they are whole."""
    written = begun + without_begun_key(text)
    turn = Turn(conversation.token_ids, (), (), (), Finish.STOP, written)
    return conversation.add_turn(turn) if written else conversation


def _require_open(moment: Moment) -> None:
    if ending := moment.conversation.ending:
        reason = f" ({moment.conversation.error})" if moment.conversation.error else ""
        raise ChatError(f"the conversation has ended: {ending}{reason}; undo its last message, or begin anew")


def _rows(task: Task, rollout: Rollout) -> list[Row]:
    """The futures of a chat as rows of a run's transcripts, keys redacted."""
    return [records.finite(redacted(row)) for row in rows_of([Group(task, (rollout,))])]
