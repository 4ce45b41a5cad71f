"""Groups that are played ahead of the step that trains them: their order, those in flight, how long one may take.

Calls of Ray actors go on by themselves, so sampling runs ahead of training without a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import ray

from megatron_collab.config import Config
from megatron_collab.observability.progress import progress
from megatron_collab.reward import metrics
from megatron_collab.rollout.journal import Journal, conversations
from megatron_collab.runtime import stacks
from megatron_collab.runtime.process import Hung
from megatron_collab.types import Ending, Group, Task

POLL_SECONDS = 1.0  # between two looks at the servers; a request to one that has gone fails later than that
STARTS = 2  # a group whose worker dies is played again from its beginning


class Slot(NamedTuple):
    """A group's place in the order of the run: `number` of a step's own groups (`refill` 0) or of a refill."""

    step: int
    refill: int
    number: int

    @property
    def stream(self) -> str:
        """The name that the seeds of its samples follow from."""
        return f"train-{self.step}.{self.refill}-{self.number}" if self.refill else f"train-{self.step}-{self.number}"

    def after(self, prompts: int) -> Slot:
        """The next one of the steps' own groups, of which a step has `prompts`."""
        return Slot(self.step, 0, self.number + 1) if self.number + 1 < prompts else Slot(self.step + 1, 0, 0)


def window(step: int, steps: int, prompts: int, ahead: int) -> int:
    """How many groups may be in flight before step `step` takes its own: what it and the `ahead` next steps train.

    The weights of version `step` sample then; what is begun beyond could only be trained when it is older than
    `ahead` versions. AReaL's bound on what is begun (Fu et al. 2025, arXiv:2505.24298, section 5.1).
    """
    return (min(step + ahead + 1, steps) - step) * prompts


class Asked(NamedTuple):
    """What a worker was asked: to play `task` by the Player's `method`."""

    slot: Slot
    stream: str
    method: str
    task: Task


def answers(asked: Mapping[str, Any], seconds: float) -> list[Any]:
    """What Ray actors answer, each by what is asked of whom; Hung where one does not within `seconds`."""
    _, silent = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    if silent:
        names = [name for name, reference in asked.items() if reference in silent]
        raise Hung(f"rank 0 has waited {seconds:g} s (half of launch.timeout) for {'; '.join(names)}")
    return ray.get(list(asked.values()))


class Look(Enum):
    """What is seen at a look at the groups that are waited for."""

    PLAYING = auto()
    FINISHED = auto()  # as many as are waited for
    SERVERS_LOST = auto()  # no server is left that could sample, until some are started again


class Flight:
    """Groups that are found in the journal, that the workers play, or have played and nobody has taken yet."""

    def __init__(
        self, config: Config, workers: Sequence[Any], journal: Journal, servers_lost: Callable[[], bool]
    ) -> None:
        """`servers_lost`: whether there was a time, since servers were last started again, when none was left."""
        self._config = config
        self._workers = cycle(enumerate(workers))
        self._servers_lost = servers_lost
        self._journal = journal
        self._stacks = Path(config.run.dir) / stacks.FOLDER
        self._moved = time.monotonic()
        self._asked: dict[Slot, Asked] = {}  # in the order in which they were begun
        self._playing: dict[Any, tuple[Slot, int]] = {}  # by reference, with the number of the worker
        self._finished: dict[Slot, Group] = {}
        self._disturbed: set[Slot] = set()  # in flight while no server was left
        self._found = 0
        self._outage = False  # the last look saw no server
        self._wanted, self._taken = 0, dict[Slot, Group]()
        self._bar: Any = None

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def slots(self) -> list[Slot]:
        return sorted(self._asked)

    def begin(self, asked: Asked) -> None:
        """Have a group played, unless an earlier start of the run had that done."""
        found = self._journal.find(asked.stream, asked.task)
        if found is None:
            self._play(asked)
        else:
            self._asked[asked.slot] = asked
            self._finished[asked.slot] = found
            self._found += 1

    def wait_for(self, count: int, title: str) -> None:
        """From now on `look` takes groups, until there are `count`; at their end `take` gives them."""
        self._wanted, self._taken = count, {}
        self._moved = time.monotonic()
        self._bar = progress(title, count)

    def look(self) -> Look:
        """Look for up to POLL_SECONDS for groups that are finished: those that were begun first are taken.

        SERVERS_LOST: to be called again once servers are there. What is finished is kept, and what an outage has cost a
        conversation is played again. Hung where no group is finished in all the time that one may take.
        """
        self.collect(0.0 if self._finished else POLL_SECONDS)
        if self._servers_lost():
            self._disturbed.update(self._asked)
            self._outage = True
            return Look.SERVERS_LOST
        if self._outage:  # the wait for servers was nobody's fault
            self._outage, self._moved = False, time.monotonic()
        finished = [slot for slot in self._asked if slot in self._finished]
        self._check_moving(bool(finished))
        for slot in finished[: self._wanted - len(self._taken)]:
            asked, group = self._asked.pop(slot), self._finished.pop(slot)
            if slot in self._disturbed and _failed(group):
                self._play(asked)
            else:
                self._taken[slot] = group
                self._bar.update(1)
            self._disturbed.discard(slot)
        if len(self._taken) < self._wanted:
            return Look.PLAYING
        self._bar.close()
        return Look.FINISHED

    def take(self) -> dict[Slot, Group]:
        """The groups that were waited for, in the order of their slots."""
        return dict(sorted(self._taken.items()))

    def collect(self, seconds: float) -> None:
        """Write down what is finished; waits for the first up to that long.

        Where a group could not be played, what its worker raised is raised here, once the others are written down.
        """
        if not self._playing:
            return
        ray.wait(list(self._playing), num_returns=1, timeout=seconds)
        found = set(ray.wait(list(self._playing), num_returns=len(self._playing), timeout=0)[0])
        references = [reference for reference in self._playing if reference in found]
        groups: dict[Slot, Group] = {}
        failures: list[Exception] = []
        for reference in references:
            slot, _ = self._playing.pop(reference)
            try:
                groups[slot] = ray.get(reference)
            except Exception as error:
                failures.append(error)
        self._finished |= groups
        for step in {slot.step for slot in groups}:
            streams = {self._asked[slot].stream: group for slot, group in groups.items() if slot.step == step}
            self._journal.write(step, streams)
        if failures:
            raise failures[0]

    def take_found(self) -> int:
        """How many groups came from the journal since the last call."""
        found, self._found = self._found, 0
        return found

    def _play(self, asked: Asked) -> None:
        number, worker = next(self._workers)
        self._asked[asked.slot] = asked
        self._playing[getattr(worker, asked.method).remote(asked.task, asked.stream)] = asked.slot, number
        self._moved = time.monotonic()

    def _check_moving(self, finished: bool) -> None:
        now, limit = time.monotonic(), group_seconds(self._config, len(self._playing))
        if finished:
            self._moved = now
        if now - self._moved <= limit:
            return
        stacks.ask(self._stacks)
        streams = [self._asked[slot].stream for slot, _ in self._playing.values()]
        workers = sorted({f"conversation-{number}" for _, number in self._playing.values()})
        raise Hung(
            f"rank 0 has waited {limit:.0f} s for any of {len(streams)} groups, longer than one can take by "
            f"rollout.deadline, reward.timeout, reward.judge.deadline and the limits of llm: {', '.join(streams[:4])}"
            f"{', …' if len(streams) > 4 else ''}, asked of {', '.join(workers)}; stacks are in {self._stacks}"
        )


def _failed(group: Group) -> bool:
    return any(conversation.ending is Ending.ERROR for conversation in conversations(group))


def group_seconds(config: Config, groups: int) -> float:
    """Upper bound, in seconds, after which `groups` in flight without a finished one count as hung.

    A trained turn and its futures have rollout.deadline each, what is scored waits for a place and then has its own
    limit. Never less than it can take: every conversation counts as played to its end, every call as needed as often
    as it may be tried.
    """
    conversations = groups * config.train.rollouts_per_prompt * max(1, config.rollout.futures)
    return STARTS * (2 * config.rollout.deadline + _score_seconds(config, conversations))


def _score_seconds(config: Config, conversations: int) -> float:
    """For the scores of conversations that all end at once, one worker having to be found stuck."""
    reward, judge = config.reward, config.reward.judge
    places = reward.workers * reward.concurrency
    kinds = [metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights]
    judged = sum(kind.judged(options) for kind, options in kinds)
    scoring = ceil(conversations / places) * reward.timeout
    if judged:
        places = min(places, config.llm.max_concurrent)
        scoring = max(scoring, ceil(judged * conversations / places) * judge.deadline)
    return scoring + 2 * reward.timeout + _limiter_seconds(config, judged * conversations, conversations)


def _limiter_seconds(config: Config, judgements: int, conversations: int) -> float:
    """What the limits of llm hold up judgements, and what users say before them."""
    user, judge, llm = config.user, config.reward.judge, config.llm
    said = conversations * config.rollout.max_user_turns * user.attempts
    calls = judgements * judge.attempts + said
    tokens = judgements * judge.attempts * judge.max_tokens + said * user.max_tokens
    tokens += calls * config.rollout.context_length  # prompts
    minutes = calls / (llm.requests_per_minute or float("inf")) + tokens / (llm.tokens_per_minute or float("inf"))
    return 60 * minutes
