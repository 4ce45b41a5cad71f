"""What stands between language models and those who ask them: it records the answers, or replays recorded ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_collab.config import Config
from megatron_collab.llm.answer import AnswerTooLong, LlmError
from megatron_collab.llm.caller import Caller, caller
from megatron_collab.llm.recording import Call, CallKey, Recording, Shard, Taken
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.redact import redact, redacted

_LOOKED_AT = 2000  # calls among which the nearest one is looked for
_SHOWN = 60  # characters of a text
_MESSAGES, _SCHEMA = "messages", "schema"
CUT_OFF = "CutOff"  # a call that was cancelled, as by rollout.deadline
_FAILURES: dict[str, type[LlmError]] = {AnswerTooLong.__name__: AnswerTooLong}


class NotRecorded(RunStopped):
    """llm.replay does not hold a call: what follows would be another run than the recorded one, so the run ends."""


class Tape:
    """Of one process. It counts `llm/replayed` calls, `llm/replayed_usd` that these had cost, and `llm/live` calls,
    which were not recorded.
    """

    def __init__(self, replay: Recording | None, record: Shard | None, live: bool, latency: float) -> None:
        """`live`: what `replay` does not hold is asked; `latency`: times the recorded seconds a replayed call takes."""
        self._replay, self._record, self._live, self._latency = replay, record, live, latency
        self._counters: dict[str, float] = defaultdict(float)
        self._nobody = Caller("")  # who asks where no conversation does

    async def answer(
        self,
        question: Mapping[str, Any],
        ask: Callable[[Taken], Awaitable[Any]],
        *,
        shared: bool = False,
    ) -> Any:
        """The recorded answer to `question`, or that of `ask`, which notes what it took, without keys; both JSON.

        The answer to a `shared` question does not depend on who asks. Raises the recorded LlmError, that of `ask`,
        NotRecorded.
        """
        who = caller() or self._nobody
        asked = CallKey(who.name, 0, question, shared)
        if not shared:
            asked.number = who.asked[asked.digest]
            who.asked[asked.digest] += 1
        if self._replay is not None:
            call = self._found(self._replay, asked)
            if call is not None:
                return await self._again(call)
            self._counters["llm/live"] += 1
        return await ask(Taken()) if self._record is None else await self._recorded(self._record, asked, ask)

    def take_counters(self) -> dict[str, float]:
        """Since the last call."""
        taken, self._counters = self._counters, defaultdict(float)
        return dict(taken)

    def _found(self, recording: Recording, asked: CallKey) -> Call | None:
        try:
            call = recording.find(asked)
            if call is None and not self._live:
                raise NotRecorded(redact(_not_recorded(recording, asked)))
            return call
        except ValueError as error:
            raise RunStopped(f"llm.replay: {error}; restore it, or replay another recording") from error

    async def _again(self, call: Call) -> Any:
        self._counters["llm/replayed"] += 1
        self._counters["llm/replayed_usd"] += call.taken.usd or 0.0
        await asyncio.sleep(self._latency * call.taken.seconds)
        if call.failed:
            kind, why = call.failed
            raise _FAILURES.get(kind, LlmError)(why)
        return call.answer

    async def _recorded(self, shard: Shard, asked: CallKey, ask: Callable[[Taken], Awaitable[Any]]) -> Any:
        taken, answer, failed = Taken(), None, None
        try:
            answer = redacted(await ask(taken))
            return answer
        except LlmError as error:
            failed = type(error).__name__, str(error)
            raise
        except asyncio.CancelledError:
            failed = CUT_OFF, f"{asked.question['model']}: cut off while it was recorded"
            raise
        finally:
            if failed or answer is not None:
                question, failed = redacted(asked.question), failed and (failed[0], redact(failed[1]))
                shard.record(asked, Call(asked.name, asked.number, time.time(), question, answer, failed, taken))


def open_tape(config: Config) -> Tape | None:
    """As the options llm.record and llm.replay say; None without either. Raises RunStopped where it cannot be read."""
    llm = config.llm
    if not (llm.record or llm.replay):
        return None
    try:
        replay = Recording(Path(llm.replay)) if llm.replay else None
    except (ValueError, OSError) as error:
        raise RunStopped(f"llm.replay={llm.replay}: {error}") from error
    record = Shard(Path(llm.record), run_name(config)) if llm.record else None
    return Tape(replay, record, llm.replay_missing == "live", llm.replay_latency)


def run_name(config: Config) -> str:
    """What a recording calls the run."""
    return str(Path(config.run.dir).absolute())


def _not_recorded(recording: Recording, asked: CallKey) -> str:
    folder = ", ".join(map(str, recording.folders))
    said = f"llm.replay={folder}: has no answer to a question of {asked.name or 'nobody'} to {asked.question['model']}"
    out = "replay with the settings and data of the recorded run, or set llm.replay_missing=live, which asks the model"
    near = nearest(recording, asked)
    if near is None:
        return f"{said}; it holds no calls; {out}"
    return f"{said}; the nearest is of {near.name or 'nobody'}, and differs in {difference(asked, near)}; {out}"


def nearest(recording: Recording, asked: CallKey) -> Call | None:
    """The call of the same conversation, or else of any, that is most like it: the model, then how far messages agree.

    Of a large recording it looks at a part of the calls, evenly spread.
    """
    near = list(recording.of(asked.name))
    step = -(-len(recording) // _LOOKED_AT) or 1
    near = near or [recording.stored(number).call() for number in range(0, len(recording), step)]
    return max(near, key=lambda call: _likeness(asked.question, call.question), default=None)


def _likeness(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[int, ...]:
    same = sum(one[name] == other.get(name) for name in one)
    messages, others = one.get(_MESSAGES, []), other.get(_MESSAGES, [])
    at = _common(messages, others)
    characters = 0
    if at < min(len(messages), len(others)):
        characters = _common(_content(messages[at]), _content(others[at]))
    return one.get("model") == other.get("model"), at, characters, same


def difference(asked: CallKey, call: Call) -> str:
    """In which settings and in which message a question differs from a recorded one, on one line."""
    one, other = asked.question, call.question
    found = []
    for name in sorted({*one, *other} - {_MESSAGES, _SCHEMA}):
        if one.get(name) != other.get(name):
            found.append(f"{name}: {_short(one.get(name))}, recorded {_short(other.get(name))}")
    if one.get(_SCHEMA) != other.get(_SCHEMA):
        found.append("the form of the answer")
    messages, others = one.get(_MESSAGES, []), other.get(_MESSAGES, [])
    at = _common(messages, others)
    if at < min(len(messages), len(others)):
        here, there = _content(messages[at]), _content(others[at])
        begin = _common(here, there)
        texts = f"{_short(here[begin:])}, recorded {_short(there[begin:])}"
        roles = [str(each.get("role")) for each in (messages[at], others[at])]
        where = f"message {at + 1} ({' or '.join(dict.fromkeys(roles))})"
        found.append(f"{where} from character {begin + 1} on: {texts}")
    elif len(messages) != len(others):
        found.append(f"the number of messages: {len(messages)}, recorded {len(others)}")
    if asked.name != call.name:
        found.append("who asks")
    elif not found:
        found.append(f"how often it was asked: {asked.number + 1} times, recorded {call.number + 1}")
    return "; ".join(found)


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content", ""))


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many of the first entries are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
