"""Groups that are played ahead of the step that trains them: their order in the run, and those in flight.

Calls of Ray actors go on by themselves, so sampling runs ahead of training without a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import ray

from megatron_collab import stacks
from megatron_collab.observe.progress import progress
from megatron_collab.processes import Hung
from megatron_collab.types import Ending, Group, Task

POLL_SECONDS = 1.0  # between two looks at the servers; a request to one that has gone fails later than that


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


class Flight:
    """Groups that the workers play, or have played and nobody has taken yet."""

    def __init__(
        self, workers: Sequence[Any], lacking: Callable[[], bool], patience: Callable[[int], float], written: Path
    ) -> None:
        """`lacking`: whether there was, since servers were last revived, a time when none was left.

        `patience`: seconds that a group may take where so many are in flight; `written`: the folder of stacks.
        """
        self._workers = cycle(enumerate(workers))
        self._lacking = lacking
        self._patience, self._written = patience, written
        self._moved = time.monotonic()
        self._pending: dict[Any, Asked] = {}
        self._players: dict[Any, int] = {}  # the number of the worker that plays it
        self._disturbed: set[Slot] = set()  # in flight while no server was left

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def slots(self) -> list[Slot]:
        return sorted(asked.slot for asked in self._pending.values())

    def begin(self, asked: Asked) -> None:
        number, worker = next(self._workers)
        reference = getattr(worker, asked.method).remote(asked.task, asked.stream)
        self._pending[reference], self._players[reference] = asked, number
        self._moved = time.monotonic()

    def take(self, count: int, title: str) -> Generator[bool, None, dict[Slot, Group]]:
        """The first `count` groups that are finished, those begun first where more are; in the order of their slots.

        Yields after every look, a second apart at most. True: no server is left, to be resumed when there is one;
        finished groups are kept over it, and those in flight that it has cost a conversation are played again. Hung
        where none is finished in all the time that a group may take.
        """
        taken: dict[Slot, Group] = {}
        self._moved = time.monotonic()
        with progress(title, count) as bar:
            while len(taken) < count:
                finished = self._finished()
                lacking = self._lacking()
                if lacking:
                    self._disturbed.update(self.slots)
                self._check_moving(bool(finished))
                yield lacking
                if lacking:
                    self._moved = time.monotonic()
                for reference in finished[: count - len(taken)]:
                    asked, group = self._pending.pop(reference), ray.get(reference)
                    del self._players[reference]
                    if asked.slot in self._disturbed and _failed(group):
                        self.begin(asked)
                    else:
                        taken[asked.slot] = group
                        bar.update(1)
                    self._disturbed.discard(asked.slot)
        return dict(sorted(taken.items()))

    def _finished(self) -> list[Any]:
        """What is finished, in the order in which it was begun, which is not Ray's; waits a moment for the first."""
        ray.wait(list(self._pending), num_returns=1, timeout=POLL_SECONDS)
        finished = set(ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)[0])
        return [reference for reference in self._pending if reference in finished]

    def _check_moving(self, finished: bool) -> None:
        now, patience = time.monotonic(), self._patience(len(self._pending))
        if finished:
            self._moved = now
        if now - self._moved <= patience:
            return
        stacks.ask(self._written)
        streams = [asked.stream for asked in self._pending.values()]
        workers = sorted({f"conversation-{number}" for number in self._players.values()})
        raise Hung(
            f"rank 0 has waited {patience:.0f} s for any of {len(streams)} groups, longer than one can take by "
            f"rollout.deadline, reward.timeout, reward.judge.deadline and the limits of llm: {', '.join(streams[:4])}"
            f"{', …' if len(streams) > 4 else ''}, asked of {', '.join(workers)}; stacks are in {self._written}"
        )


def _failed(group: Group) -> bool:
    conversations = [
        conversation
        for rollout in group.rollouts
        for conversation in (rollout.start, *(future.conversation for future in rollout.futures))
    ]
    return any(conversation.ending is Ending.ERROR for conversation in conversations)
