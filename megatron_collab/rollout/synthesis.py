"""Conversations that are built turn by turn, as CollabLLM's data (arXiv:2502.00640): of several candidates for a turn
the one with the best reward goes on, with what the user said to it in one of its futures.
"""

from __future__ import annotations

import random
from pathlib import Path

from tqdm import tqdm

from megatron_collab.data.built import FOLDER, write
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.rollout.evaluation import Evaluator
from megatron_collab.rollout.meter import Meter
from megatron_collab.rollout.needs import applying
from megatron_collab.rollout.scheduler import Asked, Flight, Slot, answers
from megatron_collab.rollout.summary import evaluated
from megatron_collab.types import Conversation, Ending, Group, Message, Missing, Rollout, Task


class Synthesis(Evaluator):
    """Builds a conversation about each task of the sets of data.eval, all at once, and writes its candidates as rows.

    What an evaluation records, of all candidates, is recorded too.
    """

    def _begin(self, one: EvaluationSet, name: str, step: int) -> None:
        flight = Flight(self.config, self._workers, self._journal, self._lost_all, after=self._after)
        tasks = self._prepared(one)
        self._flight = flight
        self._groups: list[list[Group]] = [[] for _ in tasks]
        title = f"conversations{f' of {one.name}' if one.name else ''}"
        self._meter = Meter(self.config, tasks, title, self._spend)
        for index, task in enumerate(tasks):
            flight.begin(Asked(Slot(0, 0, index), f"build-{one.name}-{index}.0", task))
        flight.wait_for(len(tasks), title)

    def _after(self, asked: Asked, group: Group) -> Asked | None:
        """The group of the next turn of a conversation, unless that has ended."""
        self._groups[asked.slot.number].append(group)
        draw = random.Random(f"{self.config.run.seed}/{asked.stream}")
        task = following(group, self.config.rollout.max_messages or 0, draw)
        self._meter.turn(asked.slot.number, ended=task is None, played=asked.reference is not None)
        if task is None:
            return None
        turn = asked.slot.step + 1
        stream = f"{asked.stream.rpartition('.')[0]}.{turn}"
        return Asked(Slot(turn, 0, asked.slot.number), stream, task)

    def _record(self, one: EvaluationSet, name: str, step: int) -> None:
        self._flight = None
        tqdm.write(self._meter.line())
        write(Path(self.config.run.dir) / FOLDER, one.name or "train", self._groups, self.config)
        groups = [group for conversation in self._groups for group in conversation]
        self.run.evaluation(name, one.name, step, evaluated(groups, applying(self.config)), groups)

    def _spend(self) -> dict[str, float]:
        asked = {"what was spent, of the limiter": self._limiter.spend.remote()}
        (spent,) = answers(asked, self.config.launch.timeout / 2)
        return spent


def best(group: Group) -> Rollout | None:
    """The candidate that goes on: the first with the largest reward; None where none has one that a user may see."""
    seen = [one for one in group.rollouts if not (one.malformed or isinstance(one.reward.value, Missing))]
    return max(seen, key=lambda one: float(one.reward.value), default=None)  # type: ignore[arg-type]


def reply_of(rollout: Rollout) -> tuple[Message, ...]:
    """The messages of the trained turn: the reply, after calls of tools and their answers."""
    messages = rollout.start.messages
    asked = max(at for at, message in enumerate(messages) if message.role == "user")
    return messages[asked + 1 :]


def following(group: Group, longest: int, draw: random.Random) -> Task | None:
    """The task of the next turn, in a conversation of at most `longest` messages of user and policy; None at its end.

    It ends as often as its futures do: where the one that is drawn has no answer of the user, or the last.
    """
    rollout = best(group)
    if rollout is None:
        return None
    future = draw.choice(rollout.futures).conversation
    after = future.messages[len(rollout.start.messages) :]
    if not after or after[0].role != "user" or (future.ending is Ending.USER_DONE and len(after) == 1):
        return None
    task = group.task.play_on(*reply_of(rollout), after[0])
    return task if Conversation(task.messages, ()).said < longest else None
