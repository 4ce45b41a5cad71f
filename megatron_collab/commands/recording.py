"""Recorded calls of language models (llm.record): show them, merge several recordings, remove private texts.

    megatron-collab recording show FOLDER … [--calls N]
    megatron-collab recording merge FOLDER … --out FOLDER
    megatron-collab recording scrub FOLDER … --out FOLDER [--pattern REGEX …] [--field NAME …]

`show` prints for each model its calls, tokens, price, percentiles of latency and versions, and the question and answer
of N calls. `merge` writes one shard; if a later call supersedes others, as when a conversation was played again, it
keeps only the last. `scrub` does the same and writes *** for what a regular expression matches, and for all texts of a
field (messages, or a value of an answer such as thought). Keys in the environment are removed in any case. A replay
still finds a call by its original question, and gives the scrubbed answer.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_collab.commands import ArgumentParser
from megatron_collab.runtime.console import show
from megatron_collab.runtime.redact import HIDDEN, redact
from megatron_collab.settings import WRITTEN_FOLDER, ConfigError, check_path, require

if TYPE_CHECKING:
    from megatron_collab.llm.recording import Call, Recording

_PERCENTILES = (50, 90, 99)
_WIDTH = 200  # characters of a text that are shown


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("recording", __doc__)
    parser.add_argument("action", choices=("show", "merge", "scrub"))
    parser.add_argument("folder", type=Path, nargs="+", help="recording")
    parser.add_argument("--calls", type=int, default=0, metavar="N", help="show: print the first N calls too [0]")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="merge, scrub: new folder to write")
    parser.add_argument("--pattern", action="append", default=[], metavar="REGEX", help="scrub: text to remove")
    parser.add_argument("--field", action="append", default=[], metavar="NAME", help="scrub: field to clear")
    options = parser.parse_intermixed_args(arguments)
    require(options.calls >= 0, f"--calls={options.calls}: must be 0 or more")
    from megatron_collab.llm.recording import Recording

    try:
        recording = Recording(*options.folder)
        for torn in recording.torn:
            show(torn)
        if options.action == "show":
            _show(recording, options.calls)
        elif options.action == "merge":
            _write(recording, options)
        else:
            scrub = Scrub([_pattern(text) for text in options.pattern], set(options.field))
            _write(recording, options, scrub)
            show(scrub.report())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return 0


def _show(recording: Recording, shown: int) -> None:
    by_model: dict[str, list[Call]] = defaultdict(list)
    for number in range(len(recording)):
        call = recording.stored(number).call()
        if number < shown:
            _print_call(call)
        by_model[str(call.question["model"])].append(replace(call, question={}, answer=None))
    runs, superseded = _short(", ".join(sorted(recording.runs))), len(recording.superseded())
    show(f"{len(recording)} calls of {runs or 'no run'} in {len(recording.shards)} shards; {superseded} superseded")
    for model, calls in sorted(by_model.items()):
        show(f"\n{_short(model)}: {_period(calls)}")
        for line in _lines(calls):
            show(f"  {line}")


def _lines(calls: Sequence[Call]) -> Iterator[str]:
    """Lines about the calls of a model: counts, tokens, price, seconds, versions."""
    uncached = [call for call in calls if not call.taken.cached]
    failed = Counter(call.failed[0] for call in calls if call.failed)
    yield f"calls     {len(calls)}: {len(calls) - len(uncached)} cached, {failed.total()} failed{_counts(failed)}"
    yield f"requests  {sum(call.taken.requests for call in calls)}"
    prompt, answer = (sum(getattr(call.taken, f"{of}_tokens") for call in calls) for of in ("prompt", "answer"))
    yield f"tokens    {prompt} of prompts, {answer} of answers"
    unpriced = sum(call.taken.usd is None for call in calls)
    price = f"{sum(call.taken.usd or 0.0 for call in calls):.4f} USD"
    yield f"price     {price}{f', and {unpriced} calls of unknown price' if unpriced else ''}"
    if uncached:
        seconds = sorted(call.taken.seconds for call in uncached)
        shares = [f"p{share} {seconds[(len(seconds) - 1) * share // 100]:.3f}" for share in _PERCENTILES]
        yield f"seconds   {', '.join(shares)}, longest {seconds[-1]:.3f}"
    versions = Counter(call.taken.version for call in uncached if call.taken.version)
    yield f"versions  {_short(', '.join(versions)) or 'unknown'}"


def _counts(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""


def _period(calls: Sequence[Call]) -> str:
    times = [call.time for call in calls]
    first, last = (datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S") for time in (min(times), max(times)))
    return f"from {first} to {last} UTC"


def _print_call(call: Call) -> None:
    show(f"{_short(call.name) or 'unnamed'} calls {_short(call.question['model'])}:")
    for message in call.question.get("messages") or []:
        show(f"  {_short(message.get('role'))}: {_short(message.get('content'))}")
    show(f"  -> {_short(call.failed or call.answer)}\n")


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


class Scrub:
    """Replaces texts of calls by ***, and counts the replacements by field."""

    def __init__(self, patterns: Sequence[re.Pattern[str]], fields: set[str]) -> None:
        self._patterns, self._fields = patterns, fields
        self._counts: Counter[str] = Counter()
        self._answers = 0

    def __call__(self, call: Call) -> Call:
        answer = self._walk(call.answer, "answer")
        self._answers += answer != call.answer
        failed = call.failed and (call.failed[0], self._walk(call.failed[1], "failed"))
        return replace(call, question=self._walk(call.question, "question"), answer=answer, failed=failed)

    def report(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()) if count)
        changed = f"; {self._answers} answers changed; a replay gives the new ones" if self._answers else ""
        return f"removed by field: {counts or 'nothing'}{changed}"

    def _walk(self, part: Any, field: str) -> Any:
        if isinstance(part, Mapping):
            return {name: self._walk(value, field if field in self._fields else name) for name, value in part.items()}
        if isinstance(part, list):
            return [self._walk(value, field) for value in part]
        if not isinstance(part, str):
            return part
        scrubbed = HIDDEN if field in self._fields else redact(part)
        for pattern in self._patterns:
            scrubbed = pattern.sub(HIDDEN, scrubbed)
        self._counts[field] += scrubbed != part
        return scrubbed


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--pattern={text}: is not a regular expression ({error})") from error


def _write(
    recording: Recording, options: argparse.Namespace, change: Callable[[Call], Call] = lambda call: call
) -> None:
    """Write the calls that are not superseded, in order of time, as one shard in a new folder."""
    from megatron_collab.llm.recording import Shard

    require(options.out is not None, f"{options.action}: give the folder to write as --out=FOLDER")
    check_path("--out", options.out, WRITTEN_FOLDER)
    require(
        not options.out.exists() or not any(options.out.iterdir()), f"--out={options.out}: is not empty; give a new one"
    )
    superseded = recording.superseded()
    shard = Shard(options.out, ", ".join(sorted(recording.runs)))
    numbers = [number for number in range(len(recording)) if number not in superseded]
    for number in numbers:
        stored = recording.stored(number)
        shard.append(stored.containing(change(stored.call())))
    show(f"{shard.file}: {len(numbers)} calls; {len(superseded)} superseded ones left out")
