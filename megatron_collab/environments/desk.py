"""The desk world: a help desk whose user states a part of what a request needs; asking costs, guessing may fail.

Tasks, supervised conversations and files. The chances are in desk_model.py, what policies reach in desk_optimum.py.
Goals, phrasings, kinds of requests and kinds of users are held out, each in a set of its own.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from megatron_collab.environments import World
from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_behavior import DeskBehavior, random_part
from megatron_collab.environments.desk_language import KINDS, MODEL, VALUES, Kind
from megatron_collab.environments.desk_model import DeskState
from megatron_collab.environments.desk_optimum import Starts
from megatron_collab.environments.desk_predictions import DeskSet, predicted_scores, solve, tables
from megatron_collab.environments.desk_user import DeskGoal, draw, read_goal, reply, unknown
from megatron_collab.settings import option, require
from megatron_collab.types import Message, Task

logger = logging.getLogger(__name__)

USER = "desk"
SPLITS = GOALS, PHRASINGS, REQUESTS, PEOPLE = ("goals", "phrasings", "requests", "users")  # held out, a file each
TRAIN = "train"
TASKS = 4096  # of training
EVALUATED = 1024  # tasks of each held-out split, in which every second request is complete
CONTEXT = 256  # tokens
# Supervised: most replies guess, and every second request is complete, which teaches to read. Tasks of training: fewer
# are complete, and a quarter begins after a first question, which supervised conversations seldom ask.
CONVERSATIONS, COMPLETE_EVERY, TRAIN_COMPLETE_EVERY, TRAIN_LATER = 16384, 2, 3, 0.25
HELD_OUT_PERIOD = 5  # one kind of request and one goal of so many are held out


def kinds(held_out: bool) -> list[Kind]:
    """The kinds of requests that are held out, or those of training; both have every action and every topic."""
    actions, topics = list(language.ACTIONS), list(language.TOPICS)
    places = [(kind, actions.index(kind[0]) + topics.index(kind[1])) for kind in KINDS]
    return [kind for kind, place in places if (place % HELD_OUT_PERIOD == 0) == held_out]


def is_held_out(kind: Kind, values: Mapping[str, str]) -> bool:
    """Whether a goal is held out. Its open slots decide, so that guessable values have the same chances everywhere."""
    indexes = [VALUES[slot].index(value) for slot, value in values.items() if slot in MODEL.open]
    return len(indexes) > 0 and (sum(indexes) + KINDS.index(kind)) % HELD_OUT_PERIOD == 0


def tasks(seed: int, n: int, split: str = TRAIN) -> list[Task]:
    """`n` tasks of training, or of a held-out split, which differs from training in one thing.

    Held-out tasks begin with the user's first message.
    """
    rng = random.Random(f"desk tasks {seed} {split}")
    starts = islice(_trained(rng) if split == TRAIN else _evaluated(rng, split), n)
    return [
        Task(f"desk-{split}-{seed}-{i}", messages, goal.dump(), goal.answer, USER)
        for i, (goal, messages) in enumerate(starts)
    ]


def _trained(rng: random.Random) -> Iterator[tuple[DeskGoal, tuple[Message, ...]]]:
    for complete in cycle(i == 0 for i in range(TRAIN_COMPLETE_EVERY)):
        goal = _goal(rng, TRAIN, rng.choice(MODEL.seen_users))
        messages = [_first(rng, goal, complete)]
        if rng.random() < TRAIN_LATER:
            exchange = _exchange(rng, messages, goal, random_part(rng, unknown(goal, messages) or goal.values))
            messages += exchange if language.STOP not in exchange[-1].content else []
        yield goal, tuple(messages)


def _evaluated(rng: random.Random, split: str) -> Iterator[tuple[DeskGoal, tuple[Message, ...]]]:
    """A complete and an incomplete request for each kind of user in turn."""
    for user in cycle(MODEL.unseen_users if split == PEOPLE else MODEL.seen_users):
        for complete in (True, False):
            goal = _goal(rng, split, user)
            yield goal, (_first(rng, goal, complete),)


def _goal(rng: random.Random, split: str, user: str) -> DeskGoal:
    phrasing = language.HELD_OUT if split == PHRASINGS else language.TRAINED
    while True:
        kind = rng.choice(kinds(split == REQUESTS))
        values = {slot: draw(rng, slot) for slot in language.needed(kind)}
        if is_held_out(kind, values) == (split == GOALS):
            return DeskGoal(kind, values, user, phrasing)


def _first(rng: random.Random, goal: DeskGoal, complete: bool) -> Message:
    """A first message with all values, or with a random part, at most half of them."""
    number = len(goal.values) if complete else rng.randint(0, len(goal.values) // 2)
    slots = rng.sample(list(goal.values), number)
    stated = {slot: value for slot, value in goal.values.items() if slot in slots}
    return Message("user", language.opening(rng, goal.kind, stated, goal.phrasing))


def with_costs(rows: Sequence[Task], costs: Sequence[float]) -> list[Task]:
    """The tasks, each with one of `costs` for a question, which its goal has and its first message states.

    Without `costs` the tasks stay as they are.
    """

    def stated(task: Task) -> Task:
        cost = random.Random(f"desk cost {task.id}").choice(costs)
        goal = replace(read_goal(task.goal), cost=cost)
        return replace(task, messages=_stating(task.messages, cost), goal=goal.dump())

    return [stated(task) for task in rows] if costs else [*rows]


def _stating(messages: Sequence[Message], cost: float) -> tuple[Message, ...]:
    """The messages, with the cost of a question at the end of the first."""
    first, *later = messages
    return (replace(first, content=f"{first.content} {language.cost(cost)}"), *later)


def state_of(goal: DeskGoal, messages: Sequence[Message]) -> DeskState:
    """What is unknown after a first message."""
    slots = unknown(goal, messages)
    guessable = sum(slot in MODEL.guessable for slot in slots)
    return DeskState(guessable, len(slots) - guessable)


def conversations(seed: int, n: int, costs: Sequence[float] = ()) -> list[tuple[Message, ...]]:
    """`n` conversations for supervised training, in which no user states anything that is held out.

    A guess of the assistant draws what it does not know, so it may name a held-out goal, as rarely as any other. The
    first messages state one of `costs`, if there are any; the replies do not depend on it.
    """
    rng, cost_rng = random.Random(f"desk conversations {seed}"), random.Random(f"desk costs {seed}")
    rows = [_conversation(rng, i % COMPLETE_EVERY == 0) for i in range(n)]
    return [_stating(messages, cost_rng.choice(costs)) for messages in rows] if costs else rows


def _conversation(rng: random.Random, complete: bool) -> tuple[Message, ...]:
    """A supervised conversation. If the user leaves, it ends with the question."""
    goal = _goal(rng, TRAIN, rng.choice(MODEL.seen_users))
    messages, behavior = [_first(rng, goal, complete)], DeskBehavior()
    while True:
        messages.append(behavior.reply(rng, goal, messages))
        if language.is_final(messages[-1].content):
            return tuple(messages)
        answer = reply(goal, messages, str(rng.random()))
        if language.STOP in answer:
            return tuple(messages)
        messages.append(Message("user", answer))


def _exchange(rng: random.Random, messages: Sequence[Message], goal: DeskGoal, slots: Sequence[str]) -> list[Message]:
    """The policy asks for `slots`, the user answers."""
    question = Message("assistant", language.ask(slots))
    return [question, Message("user", reply(goal, [*messages, question], str(rng.random())))]


def starts_of(rows: Sequence[Task]) -> Starts:
    """How often each state follows an incomplete first message."""
    states = (state_of(read_goal(task.goal), task.messages) for task in rows)
    return Counter(state for state in states if state != DeskState(0, 0))


def evaluated_sets(seed: int, number: int = EVALUATED) -> dict[str, DeskSet]:
    """First messages and kinds of users of the held-out sets of `seed`, of the first `number` tasks of each."""
    return {
        split: DeskSet(
            starts_of(tasks(seed, number, split)), MODEL.unseen_users if split == PEOPLE else MODEL.seen_users
        )
        for split in SPLITS
    }


def predictions(seed: int, costs: Sequence[float] = (), number: int = EVALUATED) -> str:
    """Tables of what policies reach with the held-out sets of `seed`, at the `costs` that tasks state, if any do."""
    sets = evaluated_sets(seed, number)
    return tables(solve(MODEL, costs or MODEL.costs, sets), sets, stated=bool(costs))


@dataclass(frozen=True)
class DeskOptions:
    """Options of `Desk`."""

    costs: list[float] = option(
        [], "costs of a question: each task draws one and states it; empty: none is stated", ge=0
    )
    evaluated: int = option(EVALUATED, "tasks of each held-out set, which are also those of the predictions", ge=2)


class Desk(World):
    """A help desk whose user states a part of what a request needs; asking costs, guessing may fail."""

    Options: ClassVar[type] = DeskOptions
    result_names: ClassVar[Mapping[str, str]] = {
        "utility": f"{GOALS}/desk_utility",
        "utility_incomplete": f"{GOALS}/desk_utility_incomplete",
        "right": f"{GOALS}/desk_right",
        "questions": f"{GOALS}/desk_questions",
        "needless": f"{GOALS}/desk_needless",
    }

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        distinct = len(set(map(language.cost, options.costs))) == len(options.costs)
        require(distinct, f"data.world_options.costs={options.costs}: give costs that differ in their first six digits")

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write the model, the data and the predictions.

        model/, sft.jsonl (16,384 conversations), train.jsonl (4,096 tasks), SPLIT.jsonl (the tasks of each held-out
        split); if tasks state costs, also goals_COST.jsonl, the tasks of goals.jsonl at one cost. predictions.md, which
        is also logged, and predictions_COST.json, the same as scores of metrics, to compare results with.
        """
        # Both take seconds to import, and the users and the metrics need neither.
        from megatron_collab.data.datasets import task_row, write_jsonl
        from megatron_collab.environments import tiny_model

        costs, number = self.options.costs, self.options.evaluated
        sets = evaluated_sets(seed, number)
        solved = solve(MODEL, costs or MODEL.costs, sets)
        text = tables(solved, sets, stated=bool(costs))
        logger.info("predicted utility_incomplete (questions), by dynamic programming:\n%s", text)
        (folder / "predictions.md").write_text(text)
        for cost, prediction in solved.items():
            scores = predicted_scores(prediction, sets)
            (folder / f"predictions_{cost:.2f}.json").write_text(json.dumps(scores, indent=1))
        tiny_model.save(folder / "model", tiny_model.word_tokenizer(language.words(costs)), seed, CONTEXT)
        files = {split: (split, costs) for split in SPLITS} | {f"{GOALS}_{cost:g}": (GOALS, [cost]) for cost in costs}
        write_jsonl(folder / "train.jsonl", map(task_row, with_costs(tasks(seed, TASKS), costs)))
        for name, (split, stated) in files.items():
            write_jsonl(folder / f"{name}.jsonl", map(task_row, with_costs(tasks(seed, number, split), stated)))
        examples = conversations(seed, CONVERSATIONS, costs)
        rows = ({"messages": [message.as_dict() for message in messages]} for messages in examples)
        write_jsonl(folder / "sft.jsonl", rows)


if __name__ == "__main__":
    print(predictions(0), end="")
