"""Records the answers of language models, or replays recorded ones in their place."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_collab.llm.answer import AnswerTooLong, LlmError, short
from megatron_collab.llm.caller import Caller, caller
from megatron_collab.llm.recording import Call, CallKey, Recording, Shard, Usage
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.redact import redact, redacted
from megatron_collab.settings import LlmConfig

_MOST_COMPARED = 2000  # calls that are searched for the nearest one
_MESSAGES, _SCHEMA = "messages", "schema"
CUT_OFF = "CutOff"  # a call that was cancelled, e.g. by rollout.deadline
_FAILURES: dict[str, type[LlmError]] = {AnswerTooLong.__name__: AnswerTooLong}


class NotRecorded(RunStopped):
    """llm.replay does not contain a call. The run would differ from the recorded one from here on, so it ends."""


class Tape:
    """The tape of one process. It counts `llm/replayed` calls, their recorded price `llm/replayed_usd`, and `llm/live`
    calls, which were not recorded.
    """

    def __init__(self, replay: Recording | None, record: Shard | None, live: bool, latency: float) -> None:
        """`live`: send calls that `replay` lacks; `latency`: factor on the recorded seconds of a replayed call."""
        self._replay, self._record, self._live, self._latency = replay, record, live, latency
        self._counters: dict[str, float] = defaultdict(float)
        self._anonymous = Caller("")  # for calls outside of a conversation

    async def answer(
        self,
        question: Mapping[str, Any],
        ask: Callable[[Usage], Awaitable[Any]],
        *,
        shared: bool = False,
    ) -> Any:
        """The recorded answer to `question`, else that of `ask`, redacted; both are JSON. `ask` fills in the usage.

        The answer to a `shared` question does not depend on the conversation. Raises the recorded LlmError, the
        LlmError of `ask`, or NotRecorded.
        """
        conversation = caller() or self._anonymous
        call_key = CallKey(conversation.name, 0, question, shared)
        if not shared:
            call_key.number = conversation.question_counts[call_key.digest]
            conversation.question_counts[call_key.digest] += 1
        if self._replay is not None:
            call = self._look_up(self._replay, call_key)
            if call is not None:
                return await self._play(call)
            self._counters["llm/live"] += 1
        return await ask(Usage()) if self._record is None else await self._recorded(self._record, call_key, ask)

    def take_counters(self) -> dict[str, float]:
        """The counters since the last call."""
        counters, self._counters = self._counters, defaultdict(float)
        return dict(counters)

    def _look_up(self, recording: Recording, call_key: CallKey) -> Call | None:
        try:
            call = recording.find(call_key)
            if call is None and not self._live:
                raise NotRecorded(redact(_not_recorded(recording, call_key)))
            return call
        except ValueError as error:
            raise RunStopped(f"llm.replay: {error}; restore it, or replay another recording") from error

    async def _play(self, call: Call) -> Any:
        self._counters["llm/replayed"] += 1
        self._counters["llm/replayed_usd"] += call.taken.usd or 0.0
        await asyncio.sleep(self._latency * call.taken.seconds)
        if call.failed:
            kind, reason = call.failed
            raise _FAILURES.get(kind, LlmError)(reason, call.answer or "")
        return call.answer

    async def _recorded(self, shard: Shard, call_key: CallKey, ask: Callable[[Usage], Awaitable[Any]]) -> Any:
        usage, answer, failed = Usage(), None, None
        try:
            answer = redacted(await ask(usage))
            return answer
        except LlmError as error:
            failed, answer = (type(error).__name__, str(error)), redact(error.answer) or None
            raise
        except asyncio.CancelledError:
            failed = CUT_OFF, f"{call_key.question['model']}: cut off while it was recorded"
            raise
        finally:
            if failed or answer is not None:
                question, failed = redacted(call_key.question), failed and (failed[0], redact(failed[1]))
                shard.record(
                    call_key, Call(call_key.name, call_key.number, time.time(), question, answer, failed, usage)
                )


def open_tape(llm: LlmConfig, run_dir: Path) -> Tape | None:
    """The tape for llm.record and llm.replay; None if neither is set. Raises RunStopped if llm.replay is unreadable."""
    if not (llm.record or llm.replay):
        return None
    try:
        replay = Recording(Path(llm.replay)) if llm.replay else None
    except (ValueError, OSError) as error:
        raise RunStopped(f"llm.replay={llm.replay}: {error}") from error
    record = Shard(Path(llm.record), run_name(run_dir)) if llm.record else None
    return Tape(replay, record, llm.replay_missing == "live", llm.replay_latency)


def run_name(run_dir: Path) -> str:
    """The run's name in a recording: its absolute run.dir."""
    return str(run_dir.absolute())


def _not_recorded(recording: Recording, call_key: CallKey) -> str:
    folder = ", ".join(map(str, recording.folders))
    name, model = call_key.name or "none", call_key.question["model"]
    message = f"llm.replay={folder}: no recorded call matches (caller: {name}, model: {model})"
    out = "replay with the settings and data of the recorded run, or set llm.replay_missing=live to call the model"
    near = nearest(recording, call_key)
    if near is None:
        return f"{message}; it holds no calls; {out}"
    return f"{message}; the nearest (caller: {near.name or 'none'}) differs in {difference(call_key, near)}; {out}"


def nearest(recording: Recording, call_key: CallKey) -> Call | None:
    """The most similar call of the same conversation, else of any: by model, then by the common prefix of messages.

    In a large recording, only an evenly spaced subset of the calls is compared.
    """
    near = list(recording.of(call_key.name))
    step = -(-len(recording) // _MOST_COMPARED) or 1
    near = near or [recording.stored(number).call() for number in range(0, len(recording), step)]
    return max(near, key=lambda call: _likeness(call_key.question, call.question), default=None)


def _likeness(question: Mapping[str, Any], recorded: Mapping[str, Any]) -> tuple[int, ...]:
    same = sum(question[name] == recorded.get(name) for name in question)
    messages, recorded_messages = question.get(_MESSAGES, []), recorded.get(_MESSAGES, [])
    at = _common(messages, recorded_messages)
    characters = 0
    if at < min(len(messages), len(recorded_messages)):
        characters = _common(_content(messages[at]), _content(recorded_messages[at]))
    return question.get("model") == recorded.get("model"), at, characters, same


def difference(call_key: CallKey, call: Call) -> str:
    """The settings and the first message in which a question differs from a recorded one, on one line."""
    question, recorded = call_key.question, call.question
    differences = []
    for name in sorted({*question, *recorded} - {_MESSAGES, _SCHEMA}):
        if question.get(name) != recorded.get(name):
            differences.append(f"{name}: {short(question.get(name))}, recorded {short(recorded.get(name))}")
    if question.get(_SCHEMA) != recorded.get(_SCHEMA):
        differences.append("the answer format")
    messages, recorded_messages = question.get(_MESSAGES, []), recorded.get(_MESSAGES, [])
    at = _common(messages, recorded_messages)
    if at < min(len(messages), len(recorded_messages)):
        text, recorded_text = _content(messages[at]), _content(recorded_messages[at])
        begin = _common(text, recorded_text)
        texts = f"{short(text[begin:])}, recorded {short(recorded_text[begin:])}"
        roles = [str(message.get("role")) for message in (messages[at], recorded_messages[at])]
        where = f"message {at + 1} ({' or '.join(dict.fromkeys(roles))})"
        differences.append(f"{where} from character {begin + 1} on: {texts}")
    elif len(messages) != len(recorded_messages):
        differences.append(f"the number of messages: {len(messages)}, recorded {len(recorded_messages)}")
    if call_key.name != call.name:
        differences.append("the caller")
    elif not differences:
        differences.append(f"the repetition: {call_key.number + 1}, recorded {call.number + 1}")
    return "; ".join(differences)


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content", ""))


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
