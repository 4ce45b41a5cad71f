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

from megatron_collab.observability.progress import progress
from megatron_collab.rollout.journal import Journal, conversations
from megatron_collab.runtime import stacks
from megatron_collab.runtime.process import Hung
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
    """Groups that are found in the journal, that the workers play, or have played and nobody has taken yet."""

    def __init__(
        self,
        workers: Sequence[Any],
        lacking: Callable[[], bool],
        journal: Journal,
        patience: Callable[[int], float],
        written: Path,
    ) -> None:
        """`lacking`: whether there was, since servers were last revived, a time when none was left.

        `patience`: seconds that a group may take where so many are in flight; `written`: the folder of stacks.
        """
        self._workers = cycle(enumerate(workers))
        self._lacking = lacking
        self._journal = journal
        self._patience, self._written = patience, written
        self._moved = time.monotonic()
        self._asked: dict[Slot, Asked] = {}  # in the order in which they were begun
        self._playing: dict[Any, tuple[Slot, int]] = {}  # by reference, with the number of the worker
        self._finished: dict[Slot, Group] = {}
        self._disturbed: set[Slot] = set()  # in flight while no server was left
        self._found = 0

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
                self.look(0.0 if self._finished else POLL_SECONDS)
                lacking = self._lacking()
                if lacking:
                    self._disturbed.update(self._asked)
                finished = [slot for slot in self._asked if slot in self._finished]
                self._check_moving(bool(finished))
                yield lacking
                if lacking:
                    self._moved = time.monotonic()
                for slot in finished[: count - len(taken)]:
                    asked, group = self._asked.pop(slot), self._finished.pop(slot)
                    if slot in self._disturbed and _failed(group):
                        self._play(asked)
                    else:
                        taken[slot] = group
                        bar.update(1)
                    self._disturbed.discard(slot)
        return dict(sorted(taken.items()))

    def look(self, seconds: float) -> None:
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
        now, patience = time.monotonic(), self._patience(len(self._playing))
        if finished:
            self._moved = now
        if now - self._moved <= patience:
            return
        stacks.ask(self._written)
        streams = [self._asked[slot].stream for slot, _ in self._playing.values()]
        workers = sorted({f"conversation-{number}" for _, number in self._playing.values()})
        raise Hung(
            f"rank 0 has waited {patience:.0f} s for any of {len(streams)} groups, longer than one can take by "
            f"rollout.deadline, reward.timeout, reward.judge.deadline and the limits of llm: {', '.join(streams[:4])}"
            f"{', …' if len(streams) > 4 else ''}, asked of {', '.join(workers)}; stacks are in {self._written}"
        )


def _failed(group: Group) -> bool:
    return any(conversation.ending is Ending.ERROR for conversation in conversations(group))
