"""Twelve conversations that are the same under each published setting, a judge's scores and the expected rewards.

Four trained turns have three futures each. The expected values are computed by hand, except counts of cl100k tokens.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_collab.config import Config, compose
from megatron_collab.launch.play_specs import play_spec, reward_spec
from megatron_collab.llm.answer import Field
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.users import UserReply
from megatron_collab.settings import read_prompt
from megatron_collab.types import Conversation, Future, Group, Message, Task
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy

NAMES = ("verl", "collabllm", "paper")
BUDGET = 20_000  # characters, which are the fake policy's tokens

# By task: the messages before the trained turn, the trained turn, and by future the later messages of user and policy.
# Every message of the user is unique and decides what the policy answers.
BEFORE: dict[str, tuple[str, ...]] = {
    "asked": ("how many apples?", "<think>well</think>in which box?", "mine"),
    "thought": ("how many pears?",),
    "cut": ("how many plums?",),
    "long": ("how many figs?", "here or there?", "there"),
}
TRAINED = {
    "asked": "how many per row?",
    "thought": "<think>it must be eighteen</think>there are eighteen pears",
    "cut": "plum " * 6000,  # longer than the budget
    "long": "fig " * 4500,
}
FUTURES: dict[str, list[list[str]]] = {
    "asked": [
        ["six", r"three rows: eighteen, and not \boxed{19}", f"thanks {STOP}"],  # ends with the user
        ["about six", "it may be 17, it may be 18", "which?", "the answer is 17"],
        ["7", "the answer is 18", "no, wait", "then it is 21"],
    ],
    "thought": [
        [f"right {STOP}"],
        ["are you sure?", "yes, eighteen", "fine", "glad to help"],
        ["why?", "three rows of six", f"ah {STOP}"],
    ],
    "cut": [
        ["stop it", "sorry", "again", "there are eighteen plums"],
        ["what?", "sorry, eighteen", f"bye {STOP}"],
        [f"no {STOP}"],
    ],
    "long": [
        ["too long", "eighteen figs", f"bye then {STOP}"],
        ["shorter", "nineteen figs", f"hm {STOP}"],
        ["and?", "eighteen", "so", "eighteen figs, as I said"],
    ],
}
# By future, the judge's scores: accuracy, interactivity, understanding, clarification, suggestion.
JUDGED: dict[str, list[tuple[float, ...]]] = {
    "asked": [(1, 1, 1, 0.7, 0.4), (0, 0.5, 0.3, 0.3, 0), (0, 0.3, 0.3, 0, 0)],
    "thought": [(1, 0.2, 0.3, 0, 0.3), (1, 0.6, 0.7, 0.3, 0.5), (1, 0.4, 0.6, 0, 0.6)],
    "cut": [(1, 0.1, 0.3, 0, 0), (1, 0, 0, 0, 0.3), (0, 0, 0, 0, 0)],
    "long": [(1, 0.3, 0.3, 0, 0.6), (0, 0.2, 0, 0, 0.6), (1, 0.1, 0.3, 0, 0)],
}

# By preset and task, token_amount of each future, and the reward. `cut` has no futures under verl.
#
# verl: words of both sides from the trained turn on. Of `asked` 4 of it, then 1 + 6 + 3 with the mark of the end,
#   2 + 8 + 1 + 4, and 1 + 4 + 2 + 4; of `thought` 4 without the thought. The reward is the mean of accuracy, that of
#   interactivity, which is the mean of three parts, and -1e-4 times that of the words.
# collabllm: thousands of cl100k tokens of all assistant messages, with the thoughts of the task's. The mean of accuracy
#   and of interactivity, and -0.5 times that of the tokens, however many.
# paper: cl100k tokens that the user reads and writes. The same, with -min(5e-4 * tokens, 1) in each future.
GOLDEN: dict[str, dict[str, tuple[list[float], float]]] = {
    "verl": {
        "asked": ([14, 19, 15], 1 / 3 + (0.7 + 0.2 + 0.1) / 3 - 1e-4 * 16),
        "thought": ([7, 13, 12], 1 + (0.2 + 0.5 + 0.4) / 3 - 1e-4 * 32 / 3),
        "cut": ([], -1),
        "long": ([4508, 4506, 4508], 2 / 3 + (0.3 + 0.2 + 0.1) / 3 - 1e-4 * 13522 / 3),
    },
    "collabllm": {
        "asked": ([0.028, 0.032, 0.026], 1 / 3 + 1.8 / 3 - 0.5 * 0.086 / 3),
        "thought": ([0.005, 0.011, 0.009], 1 + 1.2 / 3 - 0.5 * 0.025 / 3),
        "cut": ([4.008, 4.005, 4.002], 2 / 3 + 0.1 / 3 - 0.5 * 12.015 / 3),
        "long": ([4.508, 4.508, 4.513], 2 / 3 + 0.6 / 3 - 0.5 * 13.529 / 3),
    },
    "paper": {
        "asked": ([35, 34, 29], 1 / 3 + 1.8 / 3 - 5e-4 * 98 / 3),
        "thought": ([18, 21, 24], 1 + 1.2 / 3 - 5e-4 * 63 / 3),
        "cut": ([4015, 4019, 4014], 2 / 3 + 0.1 / 3 - 1),
        "long": ([4525, 4523, 4522], 2 / 3 + 0.6 / 3 - 1),
    },
}


def verdict(prompt: str) -> dict[str, Any]:
    """The scores in JUDGED of the conversation in a judge's prompt."""
    futures = ((task, number, texts) for task, futures in FUTURES.items() for number, texts in enumerate(futures))
    ((task, number),) = [(task, number) for task, number, texts in futures if f"**User**: {texts[0]}\n" in prompt]
    names = ("accuracy", "interactivity", "understanding", "clarification", "suggestion")
    return {"thought": "because", **dict(zip(names, JUDGED[task][number], strict=True))}


class Judge:
    async def ask(self, prompt: str, fields: Sequence[Field], **_: Any) -> dict[str, Any]:
        scores = verdict(prompt)
        return {field.name: scores[field.name] for field in fields}


class Scores:
    """Scores by the metrics of a configuration, in this process."""

    def __init__(self, config: Config) -> None:
        judge: Any = Judge()
        self.metrics = {name: metric.make(judge) for name, metric in reward_spec(config.reward).metrics.items()}

    async def future(self, task: Task, conversation: Conversation) -> Future:
        scores = {name: await metric.score(task, conversation) for name, metric in self.metrics.items()}
        return Future(conversation, {name: value for name, value in scores.items() if value is not None})


class Scripted:
    """The user of a future: says its messages in FUTURES."""

    def __init__(self, config: Config, texts: Sequence[str] = ()) -> None:
        self.config, self.texts, self.counters = config, iter(texts), Counter[str]()

    def make(self, task: Task, sample: str) -> Any:
        return Scripted(self.config, FUTURES[task.id][int(sample.rpartition("/")[2])][::2])

    async def start(self, conversation: Conversation) -> None:
        """Nothing to prepare."""

    async def reply(self, conversation: Conversation) -> UserReply:
        text = next(self.texts)
        return UserReply(Message("user", text), STOP in text)

    async def finish(self, conversation: Conversation) -> float:
        return 0.0

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Counts nothing."""


def preset(name: str) -> Config:
    settings = ["run.dir=r", "model.path=m", "data.train=t", "reward.judge.model=openai/j", "user.model=openai/u"]
    return compose(
        [f"reward={name}", f"rollout.turn.max_new_tokens={BUDGET}", "rollout.context_length=100000", *settings]
    )


def task_of(name: str, config: Config) -> Task:
    """The task, beginning with the system message of rollout.system_prompt."""
    system = read_prompt("rollout.system_prompt", config.rollout.system_prompt, "", ()).render()
    messages = [Message("assistant" if at % 2 else "user", text) for at, text in enumerate(BEFORE[name])]
    return Task(name, (Message("system", system), *messages), f"How many {name}?", "18", "llm")


def play(name: str) -> tuple[list[Group], list[str]]:
    """A group of one rollout for each task, and the prompts that the policy received."""
    config, prompts = preset(name), list[str]()
    config.train.rollouts_per_prompt = 1
    answers = {BEFORE[task][-1]: reply for task, reply in TRAINED.items()}
    for texts in (texts for futures in FUTURES.values() for texts in futures):
        answers |= dict(zip(texts[::2], texts[1::2], strict=False))  # the user's last message may end the chat

    def reply(prompt: str, seed: int) -> str:
        prompts.append(prompt)
        return answers[re.split("<user>|<assistant>", prompt)[-2]]

    users: Any = Scripted(config)
    rewards: Any = Scores(config)
    player = FuturesPlayer(FakePolicy(reply), CharacterRenderer(), users, rewards, play_spec(config))
    return [asyncio.run(player.play(task_of(task, config), f"s-{task}")) for task in BEFORE], prompts
