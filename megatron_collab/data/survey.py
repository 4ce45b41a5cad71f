"""The survey before a run: every row is read once, bad rows are refused, and rows left out are counted by reason."""

from __future__ import annotations

import hashlib
import json
import textwrap
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from megatron_collab.data.examples import Examples
from megatron_collab.data.formats import FORMATS, Format
from megatron_collab.data.messages import Unfit
from megatron_collab.data.parsing import NAMED, refusal
from megatron_collab.data.readers import Candidate
from megatron_collab.runtime.screen import progress
from megatron_collab.runtime.trial import Steps, TrialError, run_trial
from megatron_collab.types import Task

TRIAL_SECONDS = 60.0  # of each call of a metric, user or tool before the start
_SAMPLE = 100  # tasks of a source that metrics try, evenly spread
_NO_ROW = -1
Step = Callable[[str], None]  # is called with the name of what comes next, for the case that it never ends


@dataclass(frozen=True)
class TaskRequirements:
    """The requirements on every task.

    `settings`: of the metrics and users that not every task may fit. `missing`, by such a setting: what a task lacks
    for the metric to apply, or for the user to play; raises ValueError if the task's user, a metric or a tool cannot
    read it. `trials`, by setting: of tasks that lack nothing for it, by place the reasons why the metric could not
    score them. `in_child`: all this is called in a fork of this process, since it may crash or never end, and the
    reader of data.format reads anew; so only processes without devices may have it. `depends_on`: the settings behind
    all, as JSON.
    """

    settings: Collection[str] = ()
    missing: Callable[[Task, Step], Mapping[str, str]] = lambda task, step: {}
    trials: Mapping[str, Callable[[Sequence[Task], Step], Mapping[int, str]]] = field(default_factory=dict)
    in_child: bool = False
    depends_on: Any = None


_NO_REQUIREMENTS = TaskRequirements()


@dataclass(frozen=True)
class Survey:
    """The result for a source. `left_out`: numbers of the rows left out; `dropped`: how many for which reason; `users`:
    for each user that tasks name, the id of the first such task; `lacking`: by setting, how many of the tasks taken
    lack what; `repeated`: a message about ids that several tasks have; `unread`: one about unread parts; `unscorable`:
    by setting, how many of the tasks tried a metric cannot score, how many were tried, and the first with its reason;
    `forged`: a message about control tokens in texts; `unopened`: whether the user opens a conversation of them.
    """

    left_out: Sequence[int] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    repeated: str = ""
    unread: str = ""
    unscorable: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    forged: str = ""
    unopened: bool = False


def unread_note(unread: Mapping[str, int]) -> str:
    """A message about parts of rows that are not read, each with its number; empty if there are none."""
    parts = ", ".join(f"{part} ({count})" for part, count in sorted(unread.items()))
    return f"not read: {parts}" if parts else ""


def survey(
    examples: Examples[Any],
    longest: int,
    at_most: Callable[[Any], int],
    tokens: Callable[[Any], int],
    requirements: TaskRequirements = _NO_REQUIREMENTS,
    control_tokens: Callable[[Any], int] = lambda example: 0,
) -> Survey:
    """Reads every row; leaves out rows of more than `longest` tokens, and rows that nothing can be learned from.

    `tokens` of an example is called only if `at_most`, an upper bound, exceeds `longest`. `control_tokens` of an
    example: how many its texts have. Raises ValueError for bad rows, naming setting, file and row of the first, and how
    many there are; also if a metric, user or tool crashes, or takes too long or too much memory.
    """
    work = partial(_survey, examples, longest, at_most, tokens, requirements, control_tokens)
    with closing(progress(f"checking {examples.source.title}", len(examples.rows), unit="row")) as bar:
        shown = 0

        def show(number: int) -> None:
            nonlocal shown
            if number > shown:
                bar.update(number - shown)
                shown = number

        if not requirements.in_child:
            return work(lambda number, name="": show(number))
        steps = Steps()
        try:
            return run_trial(partial(work, steps.enter), TRIAL_SECONDS, steps=steps, progress=show)
        except TrialError as error:
            number, name = steps.current
            row = [] if number == _NO_ROW else [examples.at(number)]
            raise ValueError(": ".join([*row, f"{name or 'the survey'} {error}; mend it, or leave it out"])) from error


def _survey(
    examples: Examples[Any],
    longest: int,
    at_most: Callable[[Any], int],
    tokens: Callable[[Any], int],
    requirements: TaskRequirements,
    control_tokens: Callable[[Any], int],
    enter: Callable[..., None],
) -> Survey:
    """As `survey`; enters a step, of the row's number and perhaps a name, before each row and each foreign call."""
    left_out, dropped, users, unread = list[int](), Counter[str](), dict[str, str](), Counter[str]()
    bad, first_bad, forged = list[int](), "", list[int]()
    lacking = {setting: Counter[str]() for setting in requirements.settings}
    sample, every = list[tuple[int, Task, Mapping[str, str]]](), -(-len(examples.rows) // _SAMPLE)
    ids, unopened = _TaskIds(), False
    format = FORMATS.get(examples.format)
    chosen = _chosen_candidates(examples, format) if format and format.candidate and not examples.distinct else None
    for number, row in examples.numbered():
        try:
            enter(number)
            example = examples.read(row, number)
            if chosen is not None and number not in chosen:
                raise Unfit("replaced by another candidate")
            counts = (_token_count(example, count, examples.at, number) for count in (at_most, tokens))
            if all(count > longest for count in counts):
                raise Unfit(f"of more than {longest} tokens")
            task_lacks: Mapping[str, str] = {}
            if isinstance(example, Task):
                task_lacks = _missing_parts(example, requirements, examples.at, number, enter)
            if count := control_tokens(example):
                forged.append(count)
            for part in examples.unread(row):
                unread[part] += 1
        except Unfit as reason:
            left_out.append(number)
            dropped[str(reason)] += 1
        except ValueError as error:
            bad.append(number)
            first_bad = first_bad or str(error)
        else:
            if isinstance(example, Task):
                ids.add(example.id, number)
                unopened |= example.unopened
                users.setdefault(example.user, example.id)
                if number % every == 0 and requirements.trials:
                    sample.append((number, example, task_lacks))
                for setting, requirement in task_lacks.items():
                    lacking[setting][requirement] += 1
    if bad:
        next_rows = [examples.at(number).rpartition(" ")[2] for number in bad[1:NAMED]]
        raise ValueError(refusal(first_bad, next_rows, len(bad), len(examples.rows)))
    lacking_counts = {setting: dict(counts) for setting, counts in lacking.items() if counts}
    unscorable = _unscorable(requirements, sample, examples.at, partial(enter, _NO_ROW))
    notes = ids.message(examples), unread_note(unread)
    kept_as_text = f"{sum(forged)} control tokens of the model in texts of {len(forged)} rows are kept as text"
    forged_note = kept_as_text if forged else ""
    return Survey(left_out, dict(dropped), users, lacking_counts, *notes, unscorable, forged_note, unopened)


def _unscorable(
    requirements: TaskRequirements,
    sample: Sequence[tuple[int, Task, Mapping[str, str]]],
    at: Callable[[int], str],
    step: Step,
) -> dict[str, tuple[int, int, str]]:
    """`Survey.unscorable` of a sample: numbers, tasks and what they lack. Raises ValueError if a metric does."""
    counts = {}
    for setting, trial in requirements.trials.items():
        tried = [(number, task) for number, task, task_lacks in sample if setting not in task_lacks]
        if reasons := trial([task for _, task in tried], step):
            first = min(reasons)
            counts[setting] = len(reasons), len(tried), f"{at(tried[first][0])}: {reasons[first]}"
    return counts


class _TaskIds:
    """Finds repeated ids of tasks, in 16 bytes a row."""

    def __init__(self) -> None:
        self._hashes, self._numbers = array("q"), array("q")

    def add(self, name: str, number: int) -> None:
        self._hashes.append(hash(name))
        self._numbers.append(number)

    def message(self, examples: Examples[Any]) -> str:
        """How many tasks have the id of an earlier one, and which is the first; empty if none."""
        hashes, numbers = np.array(self._hashes), np.array(self._numbers)
        order = np.argsort(hashes, kind="stable")
        repeats = order[1:][hashes[order][1:] == hashes[order][:-1]]
        if not len(repeats):
            return ""
        first = int(repeats.min())
        before, number = int(numbers[np.argmax(hashes == hashes[first])]), int(numbers[first])
        name = textwrap.shorten(repr(examples.read(examples.rows[number], number).id), 60, placeholder=" …")
        rows = (examples.at(at).rpartition(" ")[2] for at in (number, before))
        place = "row {} that of row {}".format(*rows)
        return f"repeated ids: {len(repeats)} rows have the id of an earlier one, the first is {place} ({name})"


def _missing_parts(
    task: Task,
    requirements: TaskRequirements,
    at: Callable[[int], str],
    number: int,
    enter: Callable[[int, str], None],
) -> Mapping[str, str]:
    """What a task lacks, by setting. Raises ValueError if the task is refused."""
    try:
        return requirements.missing(task, partial(enter, number))
    except ValueError as error:
        raise ValueError(f"{at(number)}: {error}") from error


def _token_count(example: Any, tokens: Callable[[Any], int], at: Callable[[int], str], number: int) -> int:
    try:
        return tokens(example)
    except ValueError as error:  # the template refuses a role, or does not write tool calls
        raise ValueError(f"{at(number)}: {error}") from error


def first_of_prompts(candidates: Sequence[tuple[int, Candidate, str]]) -> set[int]:
    """The row number of the first candidate of each prompt; `candidates`: (row number, candidate, prompt)."""
    first: dict[str, int] = {}
    for number, _, prompt in candidates:
        first.setdefault(prompt, number)
    return set(first.values())


def best_of_conversations(candidates: Sequence[tuple[int, Candidate, str]]) -> set[int]:
    """The row number of the best candidate of the last turn of each conversation, the first of equal ones."""
    best: dict[str, tuple[tuple[int, float], int]] = {}
    for number, candidate, _ in candidates:
        rank = candidate.turn, candidate.score
        if candidate.conversation not in best or rank > best[candidate.conversation][0]:
            best[candidate.conversation] = rank, number
    return {number for _, number in best.values()}


def candidates_of(examples: Examples[Any], format: Format) -> list[tuple[int, Candidate, str]]:
    """Row number, candidate and a digest of the prompt of every row. Raises ValueError naming the row."""
    candidates = []
    for number, row in examples.numbered():
        try:
            assert format.candidate
            candidate = format.candidate(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{examples.at(number)}: {error}") from error
        prompt = json.dumps(row["prompt"], sort_keys=True).encode()
        candidates.append((number, candidate, hashlib.blake2b(prompt, digest_size=16).hexdigest()))
    return candidates


def _chosen_candidates(examples: Examples[Any], format: Format) -> set[int]:
    """The rows to keep: for tasks one row of each prompt, for conversations the best of each conversation."""
    candidates = candidates_of(examples, format)
    return first_of_prompts(candidates) if examples.use == "task" else best_of_conversations(candidates)
