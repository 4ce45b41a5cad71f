"""The embedded default world: the user wants a table for N people, on a day, at a time, and says only part of it.

Everything is exact: which slots a message gives, which a reply asks for, and whether the final booking is right. The
supervised conversations show mixed behavior, mostly guessing: asking must be learned from reward.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import ClassVar

from megatron_collab.environments import World
from megatron_collab.settings.documents import parse_json
from megatron_collab.types import Message, Task

USER = "scripted/booking"
STOP = "[[TERMINATE CHAT]]"
SLOTS: Mapping[str, tuple[str, ...]] = {
    "people": tuple(str(n) for n in range(1, 10)),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    "time": tuple(f"{n}pm" for n in range(1, 12)),
}
SAYING = {"people": "for {} people", "day": "on {}", "time": "at {}"}
QUESTION = {"people": "how many people", "day": "which day", "time": "what time"}
REQUEST, FINAL = "please book a table", "done :"
CONTEXT = 256  # tokens; the longest conversation takes about a third

COMPLETE_EVERY = 6  # in one of so many conversations the first message says everything
# The training tasks show more of what a first message rarely is: complete, or followed by a question and its answer.
TRAIN_COMPLETE_EVERY, TRAIN_LATER = 3, 0.25
# The first message says everything in 5 of 8 evaluated tasks: enough to count needless questions.
EVALUATED, EVALUATED_COMPLETE = 640, (5, 8)
OPENED_COMPLETE = 0.5  # a user who opens the conversation says everything this often
# How the supervised conversations behave.
ASKS, ASKS_ALL, ASKS_AGAIN, ASKS_NEEDLESSLY = 0.28, 0.5, 0.2, 0.06

Goal = Mapping[str, str]


def say(goal: Goal, slots: Collection[str]) -> str:
    """The values of `slots`, as the user and the assistant say them."""
    return " ".join(SAYING[slot].format(goal[slot]) for slot in SLOTS if slot in slots)


def ask(slots: Collection[str]) -> str:
    """The question for `slots`."""
    return " and ".join(QUESTION[slot] for slot in SLOTS if slot in slots) + " ?"


def final(goal: Goal) -> str:
    """The booking that ends the conversation."""
    return f"{FINAL} {say(goal, SLOTS)}"


def slots_asked(text: str) -> frozenset[str]:
    """The slots that an assistant's message asks for."""
    return frozenset(slot for slot in SLOTS if QUESTION[slot] in text)


def is_final(text: str) -> bool:
    return text.strip().startswith(FINAL)


def missing(task: Task) -> frozenset[str]:
    """The slots that no user message of the task has given yet."""
    goal = json.loads(task.goal)
    text = " ".join(message.content for message in task.messages if message.role == "user")
    return frozenset(slot for slot in SLOTS if say(goal, [slot]) not in text)


def reply(goal: str, messages: Sequence[Message]) -> str:
    """The user's next message for a goal in JSON: the slots asked for, the request again, or the end after a booking.

    Without messages it is the first message, which gives all of the goal or a part. It is drawn with the goal as seed.
    """
    if not messages:
        rng = random.Random(goal)
        number = len(SLOTS) if rng.random() < OPENED_COMPLETE else rng.randrange(len(SLOTS))
        return _first(json.loads(goal), set(rng.sample(list(SLOTS), number))).content
    text = messages[-1].content
    if is_final(text):
        return f"thanks . {STOP}"
    return f"{say(json.loads(goal), slots)} ." if (slots := slots_asked(text)) else f"{REQUEST} ."


def check_goal(goal: str) -> None:
    """Raises ValueError for a goal that `reply` cannot read."""
    try:
        known = parse_json(goal)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not all(isinstance(known.get(slot), str) for slot in SLOTS):
        raise ValueError(f"the goal must be a JSON object with strings for {', '.join(SLOTS)}")


def tasks(seed: int, n: int, *, held_out: bool = False) -> list[Task]:
    """`n` tasks. Held-out ones begin with the user's first message; its goal and its words never occur in training."""
    rng = random.Random(f"tasks {seed} {held_out}")
    openings = enumerate(islice(_evaluated(rng) if held_out else _trained(rng), n))
    name = f"booking-{'eval' if held_out else 'train'}-{seed}"
    return [Task(f"{name}-{i}", messages, json.dumps(goal), final(goal), USER) for i, (goal, messages) in openings]


def _trained(rng: random.Random) -> Iterator[tuple[Goal, tuple[Message, ...]]]:
    for i in count():
        goal, revealed = _opening(rng, i % TRAIN_COMPLETE_EVERY == 0, held_out=False)
        messages = [_first(goal, revealed)]
        if rng.random() < TRAIN_LATER:
            unknown = set(SLOTS) - revealed or set(SLOTS)
            messages += _exchange(goal, messages, _random_part(rng, unknown))
        yield goal, tuple(messages)


def _evaluated(rng: random.Random) -> Iterator[tuple[Goal, tuple[Message, ...]]]:
    """The complete ones use all held-out goals before one repeats."""
    goals = _goals(held_out=True)
    once = cycle(rng.sample(goals, len(goals)))
    share, period = EVALUATED_COMPLETE
    for i in count():
        complete = i * share % period < share  # spread evenly: any first part has both kinds
        goal, revealed = (next(once), set(SLOTS)) if complete else _opening(rng, False, held_out=True)
        yield goal, (_first(goal, revealed),)


def conversations(seed: int, n: int) -> list[tuple[Message, ...]]:
    """`n` full conversations for supervised training; no user states a held-out goal, but a guess may name one."""
    rng = random.Random(f"conversations {seed}")
    return [_conversation(rng, i % COMPLETE_EVERY == 0) for i in range(n)]


def _conversation(rng: random.Random, complete: bool) -> tuple[Message, ...]:
    goal, revealed = _opening(rng, complete, held_out=False)
    messages = [_first(goal, revealed)]
    unknown = set(SLOTS) - revealed
    if not unknown and rng.random() < ASKS_NEEDLESSLY:
        messages += _exchange(goal, messages, _random_part(rng, SLOTS))
    chance = ASKS
    while unknown and rng.random() < chance:
        questions = unknown if rng.random() < ASKS_ALL else _random_part(rng, unknown)
        messages += _exchange(goal, messages, questions)
        unknown = unknown - questions
        chance = ASKS_AGAIN
    guess = {slot: rng.choice(SLOTS[slot]) if slot in unknown else value for slot, value in goal.items()}
    return (*messages, Message("assistant", final(guess)))


def _opening(rng: random.Random, complete: bool, held_out: bool) -> tuple[Goal, set[str]]:
    """A goal, and the slots of it that the first message reveals. Goal and message are both held out, or neither."""
    goals = _goals(held_out)
    while True:
        goal = rng.choice(goals)
        revealed = set(SLOTS) if complete else set(rng.sample(list(SLOTS), rng.randrange(len(SLOTS))))
        if _held_out(goal, revealed) == held_out:
            return goal, revealed


@cache
def _goals(held_out: bool) -> list[Goal]:
    all_goals = (dict(zip(SLOTS, values, strict=True)) for values in product(*SLOTS.values()))
    return [goal for goal in all_goals if _held_out(goal, SLOTS) == held_out]


def _held_out(goal: Goal, revealed: Collection[str]) -> bool:
    """Whether a first message that reveals these slots is kept from training; with all slots, whether the goal is.

    Three of five are, and each single value occurs on both sides. A request that reveals nothing is trained on.
    """
    return len(revealed) > 0 and sum(SLOTS[slot].index(goal[slot]) for slot in revealed) % 5 < 3


def _random_part(rng: random.Random, slots: Collection[str]) -> set[str]:
    """A random part of `slots`, never empty."""
    choices = [slot for slot in SLOTS if slot in slots]
    return set(rng.sample(choices, rng.randint(1, len(choices))))


def _first(goal: Goal, revealed: set[str]) -> Message:
    return Message("user", " ".join([REQUEST, *([say(goal, revealed)] if revealed else []), "."]))


def _exchange(goal: Goal, messages: Sequence[Message], slots: set[str]) -> list[Message]:
    """The assistant asks for `slots`, the user answers."""
    question = Message("assistant", ask(slots))
    return [question, Message("user", reply(json.dumps(goal), [*messages, question]))]


def words() -> list[str]:
    """All words of the world."""
    phrases = [*SAYING.values(), *QUESTION.values(), REQUEST, FINAL, "and ? . thanks"]
    language = [word for phrase in phrases for word in phrase.split() if word != "{}"]
    return list(dict.fromkeys([*language, *(value for values in SLOTS.values() for value in values)]))


class Booking(World):
    """A table for N people on a day at a time; the first message says only part of it."""

    result_names: ClassVar[Mapping[str, str]] = {
        "ask_when_missing": "ask_when_missing",
        "needless": "ask_when_complete",
        "accuracy": "right_when_missing",
    }

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/, sft.jsonl (4,096 conversations), train.jsonl (4,096 tasks), eval.jsonl (640 held-out tasks)."""
        # Which take seconds to import; the script and the metrics need neither.
        from megatron_collab.data.datasets import task_row, write_jsonl
        from megatron_collab.environments import tiny_model

        tiny_model.save(folder / "model", tiny_model.word_tokenizer(words()), seed, CONTEXT)
        write_jsonl(folder / "train.jsonl", map(task_row, tasks(seed, 4096)))
        write_jsonl(folder / "eval.jsonl", map(task_row, tasks(seed, EVALUATED, held_out=True)))
        rows = ({"messages": [message.as_dict() for message in messages]} for messages in conversations(seed, 4096))
        write_jsonl(folder / "sft.jsonl", rows)
