"""The published settings as conf/reward sets them: the same twelve conversations, played and scored under each.

Four trained turns have three futures each. What is expected is worked out by hand, but for counts of cl100k tokens.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_collab.config import Config, ConfigError, compose, read_prompt
from megatron_collab.launch import validate
from megatron_collab.llm.answer import Field
from megatron_collab.reward import metrics
from megatron_collab.rollout.conversation import Player
from megatron_collab.rollout.users import UserReply
from megatron_collab.rollout.users.llm import system_prompt
from megatron_collab.types import Conversation, Message, Rollout, Score, Task
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy

NAMES = ("verl", "collabllm", "paper")
BUDGET = 20_000  # characters, which are the fake policy's tokens

# By task: what is said before the trained turn, the trained turn, and what the user and the policy then say by future.
# Every message of the user is there once, and what the policy answers follows from it.
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
# By future, what a judge says: accuracy, interactivity, understanding, clarification, suggestion.
JUDGED: dict[str, list[tuple[float, ...]]] = {
    "asked": [(1, 1, 1, 0.7, 0.4), (0, 0.5, 0.3, 0.3, 0), (0, 0.3, 0.3, 0, 0)],
    "thought": [(1, 0.2, 0.3, 0, 0.3), (1, 0.6, 0.7, 0.3, 0.5), (1, 0.4, 0.6, 0, 0.6)],
    "cut": [(1, 0.1, 0.3, 0, 0), (1, 0, 0, 0, 0.3), (0, 0, 0, 0, 0)],
    "long": [(1, 0.3, 0.3, 0, 0.6), (0, 0.2, 0, 0, 0.6), (1, 0.1, 0.3, 0, 0)],
}

# By preset and task, token_amount of each future, and the reward. Of `cut` under verl there are no futures.
#
# verl: words of both sides from the trained turn on. Of `asked` 4 of it, then 1 + 6 + 3 with the mark of the end,
#   2 + 8 + 1 + 4, and 1 + 4 + 2 + 4; of `thought` 4 without the thought. The reward is the mean of accuracy, that of
#   interactivity, which is the mean of three parts, and -1e-4 times that of the words.
# collabllm: thousands of cl100k tokens of all assistant messages, with the thoughts of the task's. The mean of accuracy
#   and of interactivity, and -0.5 times that of the tokens, however many.
# paper: cl100k tokens of what the user reads and writes. The same, with -min(5e-4 * tokens, 1) in each future.
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


class Judge:
    """Thinks of a conversation what JUDGED says, whatever it is asked."""

    async def ask(self, prompt: str, fields: Sequence[Field], **_: Any) -> dict[str, Any]:
        found = [(task, n) for task, futures in FUTURES.items() for n, said in enumerate(futures) if _in(said, prompt)]
        ((task, number),) = found
        names = ("accuracy", "interactivity", "understanding", "clarification", "suggestion")
        verdict = dict(zip(names, JUDGED[task][number], strict=True))
        return {field.name: verdict.get(field.name, "because") for field in fields}


def _in(said: Sequence[str], prompt: str) -> bool:
    return f"**User**: {said[0]}\n" in prompt


class Scores:
    """Scores by the metrics of a configuration, in this process."""

    def __init__(self, config: Config) -> None:
        kinds = {name: metrics.split(name, config.reward.metrics.get(name, {})) for name in config.reward.weights}
        judge: Any = Judge()
        self.metrics = {name: kind(options, judge) for name, (kind, options) in kinds.items()}

    async def score(self, task: Task, conversation: Conversation) -> dict[str, Score]:
        found = {name: await metric.score(task, conversation) for name, metric in self.metrics.items()}
        return {name: value for name, value in found.items() if value is not None}


class Scripted:
    """The user of a future, who says what FUTURES has."""

    def __init__(self, config: Config, said: Sequence[str] = ()) -> None:
        self.config, self.said, self.counters = config, iter(said), Counter[str]()

    def make(self, task: Task, sample: str) -> Any:
        return Scripted(self.config, FUTURES[task.id][int(sample.rpartition("/")[2])][::2])

    async def start(self, conversation: Conversation) -> None:
        """Nothing to prepare."""

    async def reply(self, conversation: Conversation) -> UserReply:
        said = next(self.said)
        return UserReply(Message("user", said), STOP in said)

    async def finish(self, conversation: Conversation) -> float:
        return 0.0

    def ended(self, task: Task, conversation: Conversation) -> None:
        """Nobody counts."""


def preset(name: str) -> Config:
    settings = ["run.dir=r", "model.path=m", "data.train=t", "reward.judge.model=openai/j", "user.model=openai/u"]
    return compose(
        [f"reward={name}", f"rollout.turn.max_new_tokens={BUDGET}", "rollout.context_length=100000", *settings]
    )


def task_of(name: str, config: Config) -> Task:
    """With the system message in front that rollout.system_prompt puts there."""
    system = read_prompt("rollout.system_prompt", config.rollout.system_prompt, "", ()).render()
    said = [Message("assistant" if at % 2 else "user", text) for at, text in enumerate(BEFORE[name])]
    return Task(name, (Message("system", system), *said), f"How many {name}?", "18", "llm")


def play(name: str) -> tuple[dict[str, Rollout], list[str]]:
    """By task the rollout of its trained turn, and the prompts that the policy was given."""
    config, prompts = preset(name), list[str]()
    config.train.rollouts_per_prompt = 1
    answers = {
        said[at]: said[at + 1] for futures in FUTURES.values() for said in futures for at in range(0, len(said) - 1, 2)
    }
    answers |= {BEFORE[task][-1]: reply for task, reply in TRAINED.items()}

    def reply(prompt: str, seed: int) -> str:
        prompts.append(prompt)
        return answers[re.split("<user>|<assistant>", prompt)[-2]]

    users: Any = Scripted(config)
    rewards: Any = Scores(config)
    player = Player(FakePolicy(reply), CharacterRenderer(), users, rewards, config)
    groups = {task: asyncio.run(player.play(task_of(task, config), f"s-{task}")) for task in BEFORE}
    return {task: group.rollouts[0] for task, group in groups.items()}, prompts


@pytest.mark.parametrize("name", NAMES)
def test_a_published_setting(name: str) -> None:
    rollouts, prompts = play(name)
    assert prompts and all(prompt.startswith("<system>You help a user over several turns.") for prompt in prompts)
    for task, (tokens, value) in GOLDEN[name].items():
        scores = [future.scores for future in rollouts[task].futures if future.scores]
        assert [score["accuracy"] for score in scores] == [said[0] for said in JUDGED[task]][: len(tokens)], (
            "the judge's"
        )
        assert [score["token_amount"] for score in scores] == pytest.approx(tokens), task
        assert rollouts[task].reward.value == pytest.approx(value), task
        assert len(rollouts[task].futures) == (len(tokens) or 1), task


def test_the_twelve_conversations() -> None:
    """Four trained turns with three futures, to which nothing is in common that decides a score."""
    assert [len(futures) for futures in FUTURES.values()] == [3] * 4
    said = [text for futures in FUTURES.values() for future in futures for text in future[::2]]
    assert len({*said, *(texts[-1] for texts in BEFORE.values())}) == len(said) + len(BEFORE)


SETTINGS = {  # of the recipe; of the authors' code, whose future has four new messages, and the paper, whose w is 2
    "verl": {"malformed": -1.0, "rubric": "parts", "count": "words", "max_tokens": 512, "attempts": 3},
    "collabllm": {"malformed": None, "rubric": "holistic", "count": "cl100k", "max_tokens": 1024, "attempts": 10},
    "paper": {"malformed": None, "rubric": "holistic", "count": "seen", "max_tokens": 1024, "attempts": 10},
}


@pytest.mark.parametrize("experiment", ["gsm8k", "collabllm_math", "train_8b"])
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_all_that_is_published_whatever_the_experiment(name: str, experiment: str) -> None:
    config = compose([f"experiment={experiment}", f"reward={name}", "model.path=m", "run.dir=r", "data.train=t"])
    reward, rollout, user = config.reward, config.rollout, config.user
    assert reward.mode == name and reward.metrics["accuracy"] == {"judge": True, "verify": False}
    own = {"malformed": reward.malformed, "rubric": reward.metrics["interactivity"]["rubric"]}
    own |= {"count": reward.metrics["token_amount"]["count"], "max_tokens": user.max_tokens, "attempts": user.attempts}
    assert own == SETTINGS[name]
    assert (rollout.futures, rollout.max_user_turns, rollout.max_assistant_turns) == (3, 2, 3)
    assert (rollout.train_turns, rollout.system_prompt, config.data.prefixes) == ("first", "collaborator.j2", True)
    assert (user.temperature, reward.judge.temperature, reward.judge.max_tokens, reward.judge.attempts) == (
        1,
        0,
        2048,
        6,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_user_has_the_published_rules(name: str) -> None:
    config = preset(name)
    said = system_prompt(config.user, task_of("asked", config))
    for rule in ("little trouble", "Be vague at first", "Make a mistake now and then", "knowledge and preferences"):
        assert rule in said
    assert "answer what the assistant asks" not in said and "How many asked?" in said and '"current_answer"' in said


@pytest.mark.parametrize("name", NAMES)
def test_without_a_judge_one_line_says_what_is_missing(name: str) -> None:
    config = preset(name)
    config.reward.judge.model = None
    with pytest.raises(ConfigError, match=r"^reward\.weights\.accuracy: needs a judge; set reward\.judge\.model to a "):
        validate.check_settings(config)
