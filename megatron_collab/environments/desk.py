"""The desk world: a help desk whose user states a part of what a request needs; asking costs, guessing may fail.

Tasks, supervised conversations and files. The chances are in desk_model.py, what policies reach in desk_optimum.py.
Goals, phrasings, kinds of requests and kinds of users are held out, each in a set of its own.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar

from megatron_collab.environments import World
from megatron_collab.environments import desk_language as language
from megatron_collab.environments.desk_language import KINDS, MODEL, VALUES, Kind
from megatron_collab.environments.desk_model import USERS, DeskState
from megatron_collab.environments.desk_optimum import POLICIES, DeskPredictions, Starts
from megatron_collab.environments.desk_user import DeskGoal, draw, read_goal, reply
from megatron_collab.types import Message, Task

logger = logging.getLogger(__name__)

USER = "desk"
SPLITS = GOALS, PHRASINGS, REQUESTS, PEOPLE = ("goals", "phrasings", "requests", "users")  # held out, a file each
TRAIN = "train"
TASKS, EVALUATED = 4096, 1024  # of the training data, and of each held-out split: every second one of these is complete
CONTEXT = 256  # tokens
# The supervised conversations mostly guess, and complete ones teach to read; training shows what is rare in them.
CONVERSATIONS, COMPLETE_EVERY, TRAIN_COMPLETE_EVERY, TRAIN_LATER = 8192, 2, 3, 0.25
ASKS, ASKS_ALL, ASKS_AGAIN, ASKS_NEEDLESSLY = 0.28, 0.5, 0.2, 0.06
HELD_OUT_PERIOD = 5  # one kind of request and one goal of so many are held out


def kinds(held_out: bool) -> list[Kind]:
    """The kinds of requests of one side; each action and each topic occurs on both."""
    actions, topics = list(language.ACTIONS), list(language.TOPICS)
    places = [(kind, actions.index(kind[0]) + topics.index(kind[1])) for kind in KINDS]
    return [kind for kind, place in places if (place % HELD_OUT_PERIOD == 0) == held_out]


def is_held_out(kind: Kind, values: Mapping[str, str]) -> bool:
    """Whether a goal is kept from training: by its open slots, so that guessable ones keep their chances everywhere."""
    indexes = [VALUES[slot].index(value) for slot, value in values.items() if slot in MODEL.open]
    return len(indexes) > 0 and (sum(indexes) + KINDS.index(kind)) % HELD_OUT_PERIOD == 0


def tasks(seed: int, n: int, split: str = TRAIN) -> list[Task]:
    """`n` tasks of training, or of a held-out split, which then begin with the user's first message.

    The others differ from training in nothing else: each split holds out one thing.
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
            exchange = _exchange(rng, messages, goal, _random_part(rng, unknown(goal, messages) or goal.values))
            messages += exchange if language.STOP not in exchange[-1].content else []
        yield goal, tuple(messages)


def _evaluated(rng: random.Random, split: str) -> Iterator[tuple[DeskGoal, tuple[Message, ...]]]:
    """Complete and incomplete ones in turn, and all kinds of users in turn of each."""
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


def unknown(goal: DeskGoal, messages: Sequence[Message]) -> list[str]:
    """The slots that the request needs and no message of the user has given."""
    values = language.heard(messages).values
    return [slot for slot in goal.values if slot not in values]


def state_of(goal: DeskGoal, messages: Sequence[Message]) -> DeskState:
    """What is unknown after a first message."""
    slots = unknown(goal, messages)
    guessable = sum(slot in MODEL.guessable for slot in slots)
    return DeskState(guessable, len(slots) - guessable)


def conversations(seed: int, n: int) -> list[tuple[Message, ...]]:
    """`n` conversations for supervised training, which show nothing that is held out."""
    rng = random.Random(f"desk conversations {seed}")
    return [_conversation(rng, i % COMPLETE_EVERY == 0) for i in range(n)]


def _conversation(rng: random.Random, complete: bool) -> tuple[Message, ...]:
    """Of a user who leaves, it ends with the question."""
    goal = _goal(rng, TRAIN, rng.choice(MODEL.seen_users))
    messages = [_first(rng, goal, complete)]
    chance = ASKS_NEEDLESSLY if complete else ASKS
    while rng.random() < chance:
        slots = unknown(goal, messages) or list(MODEL.slots)
        asks_all = not complete and rng.random() < ASKS_ALL
        question, answer = _exchange(rng, messages, goal, slots if asks_all else _random_part(rng, slots))
        if language.STOP in answer.content:
            return (*messages, question)
        messages += [question, answer]
        chance = 0.0 if complete or not unknown(goal, messages) else ASKS_AGAIN
    known = language.heard(messages).values
    guess = {slot: known.get(slot) or draw(rng, slot) for slot in goal.values}
    return (*messages, Message("assistant", language.final(guess)))


def _random_part(rng: random.Random, slots: Sequence[str] | Mapping[str, str]) -> list[str]:
    """A random part of `slots`, never empty, in the order of the world."""
    part = rng.sample(list(slots), rng.randint(1, len(slots)))
    return [slot for slot in MODEL.slots if slot in part]


def _exchange(rng: random.Random, messages: Sequence[Message], goal: DeskGoal, slots: Sequence[str]) -> list[Message]:
    """The policy asks for `slots`, the user answers."""
    question = Message("assistant", language.ask(slots))
    return [question, Message("user", reply(goal, [*messages, question], str(rng.random())))]


def starts_of(rows: Sequence[Task]) -> Starts:
    """How often each state is that after an incomplete first message."""
    states = (state_of(read_goal(task.goal), task.messages) for task in rows)
    return Counter(state for state in states if state != DeskState(0, 0))


def predictions(seed: int) -> str:
    """Tables of what policies reach: with each held-out set of `seed`, and with each kind of user on that of goals.

    For incomplete requests; with a complete one every policy answers at once and is right.
    """
    starts = {split: starts_of(tasks(seed, EVALUATED, split)) for split in SPLITS}
    sets, people = [_row("set", "cost", *POLICIES), _rule(len(POLICIES) + 2)], []
    for cost in MODEL.costs:
        prediction = DeskPredictions(MODEL, cost, starts[GOALS], MODEL.seen_users)
        for split in SPLITS:
            users = MODEL.unseen_users if split == PEOPLE else MODEL.seen_users
            values = [prediction.value(policy, users, starts[split]) for policy in POLICIES]
            cells = [f"{value.utility(cost):.3f} ({value.questions:.2f})" for value in values]
            sets.append(_row(split, f"{cost:.2f}", *cells))
        for policy in POLICIES:
            utilities = [f"{prediction.utility(policy, [user], starts[GOALS]):.3f}" for user in USERS]
            people.append(_row(policy, f"{cost:.2f}", *utilities))
    return "\n".join([*sets, "", _row("policy", "cost", *USERS), _rule(len(USERS) + 2), *people]) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * columns + "|"


class Desk(World):
    """A help desk whose user states a part of what a request needs; asking costs, guessing may fail."""

    result_names: ClassVar[Mapping[str, str]] = {
        "utility": f"{GOALS}/desk_utility",
        "utility_incomplete": f"{GOALS}/desk_utility_incomplete",
        "right": f"{GOALS}/desk_right",
        "questions": f"{GOALS}/desk_questions",
        "needless": f"{GOALS}/desk_needless",
    }

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/, sft.jsonl (8,192 conversations), train.jsonl (4,096 tasks), SPLIT.jsonl (1,024 tasks of each
        held-out split) and predictions.md, which is also logged: what is measured is compared with it.
        """
        # Which take seconds to import; the users and the metrics need neither.
        from megatron_collab.data.datasets import task_row, write_jsonl
        from megatron_collab.environments import tiny_model

        tables = predictions(seed)
        logger.info("predicted utility_incomplete (questions), by dynamic programming:\n%s", tables)
        (folder / "predictions.md").write_text(tables)
        tiny_model.save(folder / "model", tiny_model.word_tokenizer(language.words()), seed, CONTEXT)
        write_jsonl(folder / "train.jsonl", map(task_row, tasks(seed, TASKS)))
        for split in SPLITS:
            write_jsonl(folder / f"{split}.jsonl", map(task_row, tasks(seed, EVALUATED, split)))
        rows = (
            {"messages": [message.as_dict() for message in messages]} for messages in conversations(seed, CONVERSATIONS)
        )
        write_jsonl(folder / "sft.jsonl", rows)


if __name__ == "__main__":
    print(predictions(0), end="")
